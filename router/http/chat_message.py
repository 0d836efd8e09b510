"""What an answer's parts look like in a chat: a whole message, or what one chunk of a stream adds to it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from router.tool_parsers import CallArguments, CallStart, Content, Part, Thought

_FUNCTION = ("function", "arguments")
_CUSTOM = ("custom", "input")
"""Types of calls, and the field for what comes."""


def message_of(parts: Sequence[Part]) -> dict[str, Any]:
    """Content is null where there is something else instead. `refusal` is null, as it has to be there."""
    calls = [{name: value for name, value in call.items() if name != "index"} for call in _calls(parts)]
    content, reasoning = _content(parts), _reasoning(parts)
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if not content and (calls or reasoning):
        message["content"] = None
    return {**message, **reasoning, **({"tool_calls": calls} if calls else {})}


def delta_of(parts: Sequence[Part]) -> dict[str, Any]:
    """Empty if nothing is new."""
    content = _content(parts)
    calls = _calls(parts)
    return {
        **_reasoning(parts),
        **({"content": content} if content else {}),
        **({"tool_calls": calls} if calls else {}),
    }


def has_calls(parts: Sequence[Part]) -> bool:
    return any(isinstance(part, CallStart) for part in parts)


def _reasoning(parts: Sequence[Part]) -> dict[str, Any]:
    """Under vLLM's name for it, and under the one of DeepSeek's API that most clients know."""
    text = "".join(part.text for part in parts if isinstance(part, Thought))
    return {"reasoning": text, "reasoning_content": text} if text else {}


def _content(parts: Sequence[Part]) -> str:
    return "".join(part.text for part in parts if isinstance(part, Content))


def _calls(parts: Sequence[Part]) -> list[dict[str, Any]]:
    """One entry per call, the first with its id and name."""
    calls: dict[int, dict[str, Any]] = {}
    for part in parts:
        if isinstance(part, CallStart):
            kind, text = _CUSTOM if part.is_custom else _FUNCTION
            calls[part.index] = {"index": part.index, "id": part.id, "type": kind, kind: {"name": part.name, text: ""}}
        elif isinstance(part, CallArguments):
            kind, text = _CUSTOM if part.is_custom else _FUNCTION
            call = calls.setdefault(part.index, {"index": part.index, kind: {text: ""}})
            call[kind][text] += part.text
    return list(calls.values())
