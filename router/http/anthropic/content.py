"""The content of messages that clients send: a string, or a list of blocks. Only blocks of text are served."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import PlainValidator, WithJsonSchema


def _content(value: Any) -> str:
    """Blocks become lines."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise ValueError("must be a string or a list of content blocks")
    return "\n".join(_text_of(block) for block in value)


def _text_of(block: Any) -> str:
    kind = block.get("type") if isinstance(block, dict) else None
    if kind != "text":
        shown = repr(kind[:64]) if isinstance(kind, str) else "unknown"
        raise ValueError(f"a content block of type {shown} is not supported here: only text is")
    if not isinstance(block.get("text"), str):
        raise ValueError("a text block needs a string in `text`")
    return str(block["text"])


_STRING = {"type": "string"}
_TEXT_BLOCK = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": _STRING},
    "required": ["type", "text"],
}

Content = Annotated[
    str,
    PlainValidator(_content),
    WithJsonSchema({"anyOf": [_STRING, {"type": "array", "items": _TEXT_BLOCK}]}),
]
