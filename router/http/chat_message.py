"""What an answer's parts look like in a chat: a whole message, or what one chunk of a stream adds to it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from router.answer_reader import AnswerDelta
from router.tool_parsers import CallArguments, CallStart, Content, Piece


def message_of(parts: AnswerDelta) -> dict[str, Any]:
    """Content is null where there is something else instead."""
    calls = [{name: value for name, value in call.items() if name != "index"} for call in _calls(parts.pieces)]
    content = _content(parts.pieces)
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if not content and (calls or parts.reasoning):
        message["content"] = None
    return {**message, **_reasoning(parts), **({"tool_calls": calls} if calls else {})}


def delta_of(parts: AnswerDelta) -> dict[str, Any]:
    """Empty if nothing is new."""
    content = _content(parts.pieces)
    calls = _calls(parts.pieces)
    return {
        **_reasoning(parts),
        **({"content": content} if content else {}),
        **({"tool_calls": calls} if calls else {}),
    }


def has_calls(parts: AnswerDelta) -> bool:
    return any(isinstance(piece, CallStart) for piece in parts.pieces)


def _reasoning(parts: AnswerDelta) -> dict[str, Any]:
    """Under vLLM's name for it, and under the one of DeepSeek's API that most clients know."""
    return {"reasoning": parts.reasoning, "reasoning_content": parts.reasoning} if parts.reasoning else {}


def _content(pieces: Sequence[Piece]) -> str:
    return "".join(piece.text for piece in pieces if isinstance(piece, Content))


def _calls(pieces: Sequence[Piece]) -> list[dict[str, Any]]:
    """One entry per call, the first with its id and name."""
    calls: dict[int, dict[str, Any]] = {}
    for piece in pieces:
        if isinstance(piece, CallStart):
            function = {"name": piece.name, "arguments": ""}
            calls[piece.index] = {"index": piece.index, "id": piece.id, "type": "function", "function": function}
        elif isinstance(piece, CallArguments):
            call = calls.setdefault(piece.index, {"index": piece.index, "function": {"arguments": ""}})
            call["function"]["arguments"] += piece.text
    return list(calls.values())
