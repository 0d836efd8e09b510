"""The decoder of a tokenizer.json, in the form in which llguidance and XGrammar look for the texts of tokens."""

from __future__ import annotations

from typing import Any

from baton.errors import InvalidRequest

_TO_BYTES = {"ByteLevel", "ByteFallback"}


def replace_metaspace(tokenizer: dict[str, Any]) -> bool:
    """Write it out where there is a step Metaspace, which llguidance refuses, and which XGrammar passes over: then no
    token had a blank. Whether there is one. Raises InvalidRequest for a decoder that both do not know."""
    steps = _steps(tokenizer)
    types = [step["type"] for step in steps]
    if "Metaspace" in types:
        written = [_blank_of(step) if step["type"] == "Metaspace" else step for step in steps]
        if not _TO_BYTES.intersection(types):
            written += [{"type": "ByteFallback"}, {"type": "Fuse"}]
        tokenizer["decoder"] = {"type": "Sequence", "decoders": written}
        return True
    if not _TO_BYTES.intersection(types):
        raise InvalidRequest(
            "no backend knows the texts of this model's tokens: the decoder of its tokenizer.json is "
            f"{' and '.join(types) or 'null'}, and not ByteLevel, ByteFallback or Metaspace",
            "structured_outputs",
        )
    return False


def _steps(tokenizer: dict[str, Any]) -> list[dict[str, Any]]:
    decoder = tokenizer.get("decoder")
    if decoder is None:
        return []
    return list(decoder["decoders"]) if decoder["type"] == "Sequence" else [decoder]


def _blank_of(metaspace: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"String": metaspace["replacement"]}, "content": " "}
