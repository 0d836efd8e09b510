"""What both front ends share: from a client's wish to a running generation."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from baton.errors import InvalidRequest
from router.answer import Answer
from router.ask import Ask, check_prompt, sampling_params
from router.dispatcher import Dispatcher
from router.generation import Generation, Part
from router.life import RoutedRequest
from router.models import Models, ServedModel
from router.stops import StopScanner

log = logging.getLogger(__name__)

INLINE_CHARS = 16_384
"""Longer texts are tokenized on another thread: 5 ms of work and more, beside which the hop is nothing."""


class Service:
    """`request_timeout_s` bounds each request, from its receipt. `tells_timings`: see Generation."""

    def __init__(
        self, dispatcher: Dispatcher, models: Models, request_timeout_s: float, tells_timings: bool = True
    ) -> None:
        self.models = models
        self._dispatcher = dispatcher
        self._request_timeout_s = request_timeout_s
        self._tells_timings = tells_timings
        self._serial = itertools.count()

    def render_chat(
        self,
        model: ServedModel,
        messages: Sequence[Mapping[str, str]],
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt of a chat. Raises InvalidRequest."""
        if model.chat is None:
            raise InvalidRequest(f"The model `{model.name}` has no chat template. Use completions.", "messages")
        if not messages:
            raise InvalidRequest("messages must not be empty", "messages")
        return model.chat.render(messages, add_generation_prompt, variables)

    async def tokenize(
        self, model: ServedModel, prompts: Sequence[str | tuple[int, ...]], add_special_tokens: bool
    ) -> list[tuple[int, ...]]:
        """Token ids of each prompt; those given as such stay."""

        def encode_all() -> list[tuple[int, ...]]:
            encode = model.tokenizer.encode
            return [encode(p, add_special_tokens) if isinstance(p, str) else p for p in prompts]

        if sum(len(prompt) for prompt in prompts if isinstance(prompt, str)) <= INLINE_CHARS:
            return encode_all()
        return await asyncio.to_thread(encode_all)

    async def generate(self, model: ServedModel, ask: Ask, received: float) -> Generation:
        """Start it. `received` is when the request came (`time.monotonic`). Raises BatonError.

        The caller closes the generation, however it ends.
        """
        prompts = await self.tokenize(model, ask.prompts, ask.add_special_tokens)
        parts = [self._part(model, ask, prompt, i * ask.n) for i, prompt in enumerate(prompts)]
        generation = Generation(ask.request_id, self._dispatcher, parts, self._tells_timings)
        generation.start(received)
        log.debug("placed prompts=%d n=%d", len(prompts), ask.n)
        return generation

    def _part(self, model: ServedModel, ask: Ask, prompt: tuple[int, ...], first_index: int) -> Part:
        check_prompt(prompt, model)
        sampling = sampling_params(ask, model, len(prompt))
        request = RoutedRequest(
            # Unique for ever: clients may repeat their ids, and nodes remember those that were aborted.
            request_id=f"{ask.request_id}.{next(self._serial):x}",
            prompt_tokens=prompt,
            n=ask.n,
            sampling=sampling,
            deadline_s=min(self._request_timeout_s, ask.timeout_s or self._request_timeout_s),
            cache_salt=ask.cache_salt,
        )
        eos = () if ask.ignore_eos else model.defaults.eos_token_ids
        ending_ids = frozenset((*eos, *ask.stop_token_ids))
        answers = [self._answer(model, ask, first_index + sample, ending_ids) for sample in range(ask.n)]
        return Part(request, answers)

    def _answer(self, model: ServedModel, ask: Ask, index: int, ending_ids: frozenset[int]) -> Answer:
        return Answer(
            index,
            model.tokenizer.detokenizer(ask.skip_special_tokens),
            StopScanner(ask.stop, ask.include_stop_str_in_output),
            ending_ids,
            ask.min_tokens,
            ask.include_stop_str_in_output,
        )
