"""The content of messages that clients send: a string, or a list of blocks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import PlainValidator, WithJsonSchema

from router.http.fields import num_chars
from router.http.tools import bound_schema
from router.limits import MAX_NAME_CHARS


@dataclass(frozen=True, slots=True)
class Text:
    text: str


@dataclass(frozen=True, slots=True)
class Thinking:
    """Reasoning of an earlier turn. Its signature is not read: any model may get it back."""

    text: str


@dataclass(frozen=True, slots=True)
class RedactedThinking:
    """Reasoning of an earlier turn that Anthropic has encrypted: as nobody here can read it, no prompt has it."""

    text: str = ""


@dataclass(frozen=True, slots=True)
class ToolUse:
    """A call that the model made in an earlier turn."""

    id: str
    name: str
    input: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ToolResult:
    tool_use_id: str
    text: str


Block = Text | Thinking | RedactedThinking | ToolUse | ToolResult


def size_of_block(block: Block) -> int:
    return len(block.name) + num_chars(dict(block.input)) if isinstance(block, ToolUse) else len(block.text)


def _blocks(value: Any) -> tuple[Block, ...]:
    if isinstance(value, str):
        return (Text(value),)
    return tuple(_block(block, _READERS) for block in _list(value))


def _text(value: Any, readers: Mapping[str, Callable[[dict[str, Any]], Text]]) -> str:
    """Blocks become lines."""
    if isinstance(value, str):
        return value
    return "\n".join(_block(block, readers).text for block in _list(value))


def _system_text(value: Any) -> str:
    """Leave out the line that Claude Code begins it with, for Anthropic's accounts. It differs in each request, so no
    prompt would have a prefix of an earlier one, and nothing would be found in prefix caches."""
    text = _text(value, _TEXT_ONLY)
    return text.partition("\n")[2] if text.startswith(_BILLING) else text


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError("must be a string or a list of content blocks")
    return value


def _block(block: Any, readers: Mapping[str, Callable[[dict[str, Any]], Any]]) -> Any:
    kind = block.get("type") if isinstance(block, dict) else None
    if not isinstance(kind, str) or kind not in readers:
        shown = repr(kind[:64]) if isinstance(kind, str) else "unknown"
        raise ValueError(f"a content block of type {shown} is not supported here: {', '.join(readers)} are")
    return readers[kind](block)


def _read_text(block: dict[str, Any]) -> Text:
    return Text(_string(block, "text"))


def _read_tool_reference(block: dict[str, Any]) -> Text:
    """Of a tool that a client's search has found. The model sees all tools from the beginning on, so its name says
    which."""
    return Text(_name(block, "tool_name"))


def _read_thinking(block: dict[str, Any]) -> Thinking:
    return Thinking(_string(block, "thinking"))


def _read_redacted_thinking(block: dict[str, Any]) -> RedactedThinking:
    return RedactedThinking()


def _read_tool_use(block: dict[str, Any]) -> ToolUse:
    given = block.get("input")
    if not isinstance(given, dict):
        raise ValueError("a tool_use block needs an object in `input`")
    return ToolUse(_name(block, "id"), _name(block, "name"), bound_schema(given))


def _read_tool_result(block: dict[str, Any]) -> ToolResult:
    return ToolResult(_name(block, "tool_use_id"), _text(block.get("content") or "", _IN_RESULTS))


def _string(block: dict[str, Any], field: str) -> str:
    if not isinstance(block.get(field), str):
        raise ValueError(f"a {block['type']} block needs a string in `{field}`")
    return str(block[field])


def _name(block: dict[str, Any], field: str) -> str:
    name = _string(block, field)
    if not 0 < len(name) <= MAX_NAME_CHARS:
        raise ValueError(f"`{field}` of a {block['type']} block must have 1 to {MAX_NAME_CHARS} characters")
    return name


_TEXT_ONLY: Mapping[str, Callable[[dict[str, Any]], Text]] = {"text": _read_text}
_IN_RESULTS: Mapping[str, Callable[[dict[str, Any]], Text]] = {**_TEXT_ONLY, "tool_reference": _read_tool_reference}
_READERS: Mapping[str, Callable[[dict[str, Any]], Block]] = {
    "text": _read_text,
    "thinking": _read_thinking,
    "redacted_thinking": _read_redacted_thinking,
    "tool_use": _read_tool_use,
    "tool_result": _read_tool_result,
}

_STRING = {"type": "string"}
_BILLING = "x-anthropic-billing-header:"


def _described(kind: str, required: tuple[str, ...] = (), **fields: Any) -> dict[str, Any]:
    required = required or tuple(fields)
    return {"type": "object", "properties": {"type": {"const": kind}, **fields}, "required": ["type", *required]}


_TEXT_CONTENT = {"anyOf": [_STRING, {"type": "array", "items": _described("text", text=_STRING)}]}
_RESULT_BLOCK = {"anyOf": [_described("text", text=_STRING), _described("tool_reference", tool_name=_STRING)]}
_RESULT_CONTENT = {"anyOf": [_STRING, {"type": "array", "items": _RESULT_BLOCK}]}
_BLOCK = {
    "anyOf": [
        _described("text", text=_STRING),
        _described("thinking", thinking=_STRING),
        _described("redacted_thinking", data=_STRING),
        _described("tool_use", id=_STRING, name=_STRING, input={"type": "object"}),
        _described("tool_result", ("tool_use_id",), tool_use_id=_STRING, content=_RESULT_CONTENT),
    ]
}

Content = Annotated[
    tuple[Block, ...],
    PlainValidator(_blocks),
    WithJsonSchema({"anyOf": [_STRING, {"type": "array", "items": _BLOCK}]}),
]
SystemText = Annotated[str, PlainValidator(_system_text), WithJsonSchema(_TEXT_CONTENT)]
