"""A message as clients get it, whole; and the parts that streamed ones share with it."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any

from baton.sampling import FinishReason
from router.generation import Generation, Usage
from router.http.chat_message import has_calls
from router.http.parse import parse_begun
from router.http.shapes import timings_of
from router.text.answer import Delta, join
from router.text.answer_reader import AnswerReading, parts_of
from router.text.models import ServedModel
from router.tool_parsers import CallArguments, CallStart, Content, Part, Thought, merge


class MessageShape:
    """`reading` says how the text becomes blocks; None: it is one block."""

    def __init__(self, request_id: str, model: ServedModel, reading: AnswerReading | None = None) -> None:
        self._head = {"id": f"msg_{request_id}", "type": "message", "role": "assistant", "model": model.name}
        self.reads_pieces = reading is not None and reading.parts_reasoning
        self._reading = reading
        self._reader = reading.reader() if reading else None
        self._has_calls = False

    def whole(self, generation: Generation, answers: Sequence[Sequence[Delta]]) -> dict[str, Any]:
        (deltas,) = answers
        answer = join(deltas)
        pieces = deltas if self.reads_pieces else [answer]
        return {
            **self._head,
            "content": _blocks(merge(part for piece in pieces for part in self.read(piece))),
            **self.stop_of(answer),
            "usage": self.usage(generation.usage),
            **timings_of(generation.timings),
        }

    def begun(self, usage: Usage) -> dict[str, Any]:
        """The message before its first token, when it is not known yet how much of the prompt was cached."""
        counts = {"input_tokens": usage.num_prompt_tokens, "output_tokens": 0}
        return {**self._head, "content": [], "stop_reason": None, "stop_sequence": None, "usage": counts}

    def usage(self, usage: Usage) -> dict[str, Any]:
        """Of the message as far as it was read."""
        num_reasoning = self._reading.num_reasoning_tokens if self._reading else None
        details = {} if num_reasoning is None else {"output_tokens_details": {"thinking_tokens": num_reasoning}}
        return {**usage_of(usage), **details}

    def read(self, delta: Delta) -> Sequence[Part]:
        parts = parts_of(self._reader, delta)
        self._has_calls = self._has_calls or has_calls(parts)
        return parts

    def stop_of(self, answer: Delta) -> dict[str, str | None]:
        """Why the answer ended. `answer` has its finish reason, and was read."""
        if isinstance(answer.stop, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": answer.stop}
        if answer.finish_reason is FinishReason.LENGTH:
            return {"stop_reason": "max_tokens", "stop_sequence": None}
        return {"stop_reason": "tool_use" if self._has_calls else "end_turn", "stop_sequence": None}


TEXT = {"type": "text", "text": ""}
"""A block of text that is to be filled, as are the following ones."""
THINKING = {"type": "thinking", "thinking": "", "signature": ""}
SIGNATURE = "unsigned"
"""Clients expect some; thinking that comes back in a later request is not checked."""


def tool_use(call: CallStart) -> dict[str, Any]:
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}


def usage_of(usage: Usage) -> dict[str, int]:
    """`input_tokens` does not count the cached ones: in Anthropic's API the prompt is the sum of both. A client that is
    not told what was cached gets the sum."""
    counts = {"input_tokens": usage.num_prompt_tokens, "output_tokens": usage.num_completion_tokens}
    if usage.num_cached_tokens is None:
        return counts
    counts["input_tokens"] -= usage.num_cached_tokens
    return {**counts, "cache_creation_input_tokens": 0, "cache_read_input_tokens": usage.num_cached_tokens}


def _blocks(parts: Sequence[Part]) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    arguments: dict[int, str] = {}
    calls: dict[int, dict[str, Any]] = {}
    for part in parts:
        match part:
            case Thought(text):
                blocks.append({**THINKING, "thinking": text, "signature": SIGNATURE})
            case Content(text):
                blocks.append({**TEXT, "text": text})
            case CallStart(index):
                calls[index] = tool_use(part)
                blocks.append(calls[index])
            case CallArguments(index, text):
                arguments[index] = arguments.get(index, "") + text
    for index, text in arguments.items():
        calls[index]["input"] = _object(text)
    return blocks


def _object(text: str) -> dict[str, Any]:
    """The arguments of a call; of those that were cut off, what is there."""
    return {name: _finite(value) for name, value in parse_begun(text).items()}


def _finite(value: Any) -> Any:
    """The same, with the largest number for one that is too large to be read: JSON cannot say infinity."""
    match value:
        case dict():
            return {name: _finite(inner) for name, inner in value.items()}
        case list():
            return [_finite(inner) for inner in value]
        case float() if math.isinf(value):
            return math.copysign(sys.float_info.max, value)
    return value
