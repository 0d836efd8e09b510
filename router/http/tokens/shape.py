"""What clients of tokens get: vLLM's form, whole and as chunks."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from baton.messages import TokenLogprobs
from router.generation import Generation, Usage
from router.http.logprobs import PromptShape, shown
from router.http.shapes import timings_of, usage_of
from router.text.answer import Delta, join
from router.text.models import ServedModel


class TokensShape:
    """`num_top`: tokens in each of the `top_logprobs`, at least 1; None: there are no logprobs."""

    reads_pieces = False
    only_text_changes = False

    def __init__(
        self, request_id: str, model: ServedModel, num_top: int | None, prompt_shape: PromptShape | None
    ) -> None:
        self._head = {"request_id": request_id}
        self._model = model
        self._num_top = num_top
        self._prompt_shape = prompt_shape

    def chunk(self, delta: Delta) -> dict[str, Any]:
        return {**self._head, "choices": [self._choice(delta)], **self._prompt(delta)}

    def whole(self, generation: Generation, answers: Sequence[Sequence[Delta]]) -> dict[str, Any]:
        joined = [join(deltas) for deltas in answers]
        return {
            **self._head,
            "model": self._model.name,
            "created": int(time.time()),
            "choices": [self._choice(answer) for answer in joined],
            "usage": self.usage(generation.usage),
            **timings_of(generation.timings),
            "prompt_logprobs": None,
            **self._prompt(joined[0]),
            "kv_transfer_params": None,
        }

    def usage(self, usage: Usage) -> dict[str, Any]:
        return usage_of(usage)

    def usage_chunk(self, usage: Usage) -> dict[str, Any]:
        return {**self._head, "choices": [], "usage": usage_of(usage)}

    def _choice(self, delta: Delta) -> dict[str, Any]:
        return {
            "index": delta.index,
            "logprobs": None if self._num_top is None else self._logprobs(delta, self._num_top),
            "finish_reason": delta.finish_reason.value if delta.finish_reason else None,
            "token_ids": list(delta.token_ids),
        }

    def _prompt(self, delta: Delta) -> dict[str, Any]:
        if self._prompt_shape is None or delta.prompt is None:
            return {}
        return {"prompt_logprobs": self._prompt_shape(delta.prompt)}

    def _logprobs(self, delta: Delta, num_top: int) -> dict[str, Any]:
        pairs = zip(delta.token_ids, delta.logprobs, strict=True)
        return {"content": [_scored(token_id, entry, num_top) for token_id, entry in pairs]}


def _scored(token_id: int, entry: TokenLogprobs, num_top: int) -> dict[str, Any]:
    """The token itself comes first in `top_logprobs`, even if it is none of the most likely ones."""
    own = _named(token_id, entry.logprob)
    others = [_named(other, logprob) for other, logprob in entry.top if other != token_id]
    return {**own, "top_logprobs": [own, *others][:num_top]}


def _named(token_id: int, logprob: float) -> dict[str, Any]:
    return {"token": f"token_id:{token_id}", "logprob": shown(logprob), "bytes": None}
