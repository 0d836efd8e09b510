"""A message as clients get it, whole; and the parts that streamed ones share with it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from baton.sampling import FinishReason
from router.answer import Delta
from router.generation import Generation, Usage
from router.http.shapes import timings_of
from router.models import ServedModel


class MessageShape:
    def __init__(self, request_id: str, model: ServedModel) -> None:
        self._head = {"id": f"msg_{request_id}", "type": "message", "role": "assistant", "model": model.name}

    def whole(self, generation: Generation, answers: Sequence[Delta]) -> dict[str, Any]:
        (answer,) = answers
        return {
            **self._head,
            "content": [{**TEXT, "text": answer.text}] if answer.text else [],
            **stop_of(answer),
            "usage": usage_of(generation.usage),
            **timings_of(generation.timings),
        }

    def begun(self, usage: Usage) -> dict[str, Any]:
        """The message before its first token, when it is not known yet how much of the prompt was cached."""
        counts = {"input_tokens": usage.num_prompt_tokens, "output_tokens": 0}
        return {**self._head, "content": [], "stop_reason": None, "stop_sequence": None, "usage": counts}


TEXT = {"type": "text", "text": ""}
"""A block of text that is to be filled."""


def stop_of(answer: Delta) -> dict[str, str | None]:
    """Why the answer ended. `answer` has its finish reason."""
    if isinstance(answer.stop, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": answer.stop}
    reason = "max_tokens" if answer.finish_reason is FinishReason.LENGTH else "end_turn"
    return {"stop_reason": reason, "stop_sequence": None}


def usage_of(usage: Usage) -> dict[str, int]:
    """`input_tokens` does not count the cached ones: in Anthropic's API the prompt is the sum of both. A client that is
    not told what was cached gets the sum."""
    counts = {"input_tokens": usage.num_prompt_tokens, "output_tokens": usage.num_completion_tokens}
    if usage.num_cached_tokens is None:
        return counts
    counts["input_tokens"] -= usage.num_cached_tokens
    return {**counts, "cache_creation_input_tokens": 0, "cache_read_input_tokens": usage.num_cached_tokens}
