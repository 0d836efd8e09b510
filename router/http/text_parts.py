"""Texts in parts, as in the content of messages: a list of objects, each with a type and a text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_THOUGHTS = ("thinking", "redacted_thinking")
"""Types of parts. Only Anthropic can read the second, so it is left out."""


def read_text(value: Any, texts: Mapping[str, str]) -> str:
    """A text, or parts, which become lines. `texts`: the types of parts that are read, and the field of each that has
    its text. Raises ValueError."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise ValueError("must be a string or a list of text parts")
    return "\n".join(_text_of(part, texts) for part in value)


def without_thoughts(message: dict[str, Any]) -> dict[str, Any]:
    """A message, whose content is a list, with `reasoning` in place of parts that are thoughts, unless it has some
    already. Raises ValueError."""
    thoughts = [part for part in message["content"] if _kind_of(part) == "thinking"]
    others = [part for part in message["content"] if _kind_of(part) not in _THOUGHTS]
    parted = {**message, "content": others}
    if thoughts and message.get("reasoning") is None and message.get("reasoning_content") is None:
        parted["reasoning"] = read_text(thoughts, {"thinking": "thinking"})
    return parted


def parts_schema(texts: Mapping[str, str]) -> dict[str, Any]:
    """A list of such parts, for the API's description."""
    parts = [
        {
            "type": "object",
            "properties": {"type": {"const": kind}, field: {"type": "string"}},
            "required": ["type", field],
        }
        for kind, field in texts.items()
    ]
    return {"type": "array", "items": {"anyOf": parts}}


def _kind_of(part: Any) -> Any:
    return part.get("type") if isinstance(part, dict) else None


def _text_of(part: Any, texts: Mapping[str, str]) -> str:
    kind = _kind_of(part)
    if not isinstance(kind, str) or kind not in texts:
        shown = repr(kind[:64]) if isinstance(kind, str) else "unknown"
        raise ValueError(f"a part of type {shown} is not supported here; these are: {', '.join(texts)}")
    if not isinstance(part.get(texts[kind]), str):
        raise ValueError(f"a part of type '{kind}' needs a string in `{texts[kind]}`")
    return str(part[texts[kind]])
