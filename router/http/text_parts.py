"""Texts in parts, as in the content of messages: a list of objects, each with a type and a text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def read_text(value: Any, texts: Mapping[str, str]) -> str:
    """A text, or parts, which become lines. `texts`: the types of parts that are read, and the field of each that has
    its text. Raises ValueError."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise ValueError("must be a string or a list of text parts")
    return "\n".join(_text_of(part, texts) for part in value)


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


def _text_of(part: Any, texts: Mapping[str, str]) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str) or kind not in texts:
        shown = repr(kind[:64]) if isinstance(kind, str) else "unknown"
        raise ValueError(f"a part of type {shown} is not supported here; these are: {', '.join(texts)}")
    if not isinstance(part.get(texts[kind]), str):
        raise ValueError(f"a part of type '{kind}' needs a string in `{texts[kind]}`")
    return str(part[texts[kind]])
