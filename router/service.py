"""What both front ends share: from a client's request to a running generation."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

from baton.block_hash import BlockHash, chain
from baton.errors import InvalidRequest, NodeUnavailable
from baton.sampling import DEFAULT_MAX_LOGPROBS, SamplingParams
from baton.structured_output.constraint import StructuredBackend, StructuredKind, StructuredOutput
from baton.telemetry.trace_context import current_trace
from router.api_keys import salted
from router.deliveries import Deliveries
from router.generation import Generation, Part
from router.nodes.dispatcher import Dispatcher
from router.offload.grammars import GrammarChecker
from router.offload.request_templates import RequestTemplates, question_of
from router.offload.threads import Offload, Pauses
from router.requests.admission import Admission, Admitted
from router.requests.request_record import Preparation
from router.requests.request_state import RoutedRequest
from router.text.answer import Answer, NoAnswer
from router.text.bad_words import bad_words_token_ids
from router.text.generation_request import (
    GenerationRequest,
    check_answer_logprobs,
    num_kept_tokens,
    prompt_tokens,
    sampling_params,
)
from router.text.models import Models, ServedModel
from router.text.prompt_logprobs import check_prompt_logprobs
from router.text.stops import NO_STOPS, StopScanner, StopStrings

log = logging.getLogger(__name__)

MESSAGE_SIZE = 32
"""Characters that stand for what a message of a chat itself costs."""
_MAX_TEXT_SIZE = 64 * 2**20
"""Characters of texts that are being parsed, tokenized and so on; each takes about a hundred bytes meanwhile."""


class Prompt(NamedTuple):
    """`block_hashes`: of its full blocks, see `RoutedRequest`."""

    tokens: tuple[int, ...]
    block_hashes: tuple[BlockHash, ...]


class Service:
    """`request_timeout_s` bounds each request, counted from its receipt; `max_num_samples` bounds the answers to one
    request. `tells_timings`: see Generation. `trusts_request_templates`: requests may bring chat templates.
    `template_defaults`: variables of chat templates that requests may set otherwise."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        models: Models,
        request_timeout_s: float,
        admission: Admission,
        max_num_samples: int,
        tells_timings: bool = True,
        trusts_request_templates: bool = False,
        template_defaults: Mapping[str, Any] | None = None,
    ) -> None:
        self.models = models
        self.admission = admission
        self.offload = Offload(_MAX_TEXT_SIZE, admission.on_refused)
        self._dispatcher = dispatcher
        self._request_timeout_s = request_timeout_s
        self._max_num_samples = max_num_samples
        self._tells_timings = tells_timings
        self._serial = itertools.count()
        self._deliveries = Deliveries()
        self._grammars = GrammarChecker(admission.on_refused)
        self._template_defaults = template_defaults
        self._request_templates = RequestTemplates(trusts_request_templates, admission.on_refused)

    def close(self, wait: bool = False) -> None:
        """See Offload.close."""
        self._grammars.close()
        self._request_templates.close()
        self.offload.close(wait)

    def model(self, name: str | None) -> ServedModel:
        """Of a request to generate: see Models.get."""
        try:
            return self.models.get(name)
        except NodeUnavailable as error:
            self.admission.on_refused(error)
            raise

    def admit(self, model: ServedModel, sizes: Sequence[int], n: int = 1) -> Admitted:
        """Reserve room for prompts of these sizes, in characters if not tokenized yet, else in tokens.

        Raises InvalidRequest or Overloaded.
        """
        num_samples = len(sizes) * n
        if num_samples > self._max_num_samples:
            raise InvalidRequest(
                f"{len(sizes)} prompts with n={n} are {num_samples} answers, but one request may have at most "
                f"{self._max_num_samples} (--max-num-samples)",
                "prompt" if len(sizes) > 1 else "n",
            )
        longest = 2 * model.max_model_len  # a prompt with more tokens is refused before it costs more
        return self.admission.admit(len(sizes), sum([min(size, longest) for size in sizes]))

    async def render_chat(
        self,
        model: ServedModel,
        messages: Callable[[], Sequence[Mapping[str, Any]]],
        size: int,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
        continue_final_message: bool = False,
        tools: Callable[[], Sequence[Mapping[str, Any]] | None] = lambda: None,
        chat_template: str | None = None,
    ) -> str:
        """The prompt of a chat of `size` characters, see `ChatTemplate.render`. `chat_template`: the request's own.
        Raises InvalidRequest or Overloaded."""
        chat = model.chat
        if chat is None and chat_template is None:
            raise InvalidRequest(f"The model `{model.name}` has no chat template. Use completions.", "messages")
        if not size:
            raise InvalidRequest("messages must not be empty", "messages")
        if self._template_defaults:
            variables = {**self._template_defaults, **(variables or {})}

        def arguments() -> dict[str, Any]:
            return {
                "messages": messages(),
                "add_generation_prompt": add_generation_prompt,
                "variables": variables,
                "continue_final_message": continue_final_message,
                "tools": tools(),
            }

        if chat_template is None:
            assert chat is not None
            return await self.offload.run(lambda: chat.render(**arguments()), size)
        source = chat_template
        self._request_templates.check_trusted()
        question = await self.offload.run(lambda: question_of(source, model.special_tokens, arguments()), size)
        return await self._request_templates.render(question)

    async def tokenize(self, model: ServedModel, wanted: GenerationRequest) -> list[tuple[int, ...]]:
        """Token ids of each prompt, checked. Raises InvalidRequest or Overloaded."""
        (prompts,) = await self._prompts(model, (wanted,), hashed=False)
        return [prompt.tokens for prompt in prompts]

    async def _prompts(
        self, model: ServedModel, wanted: Sequence[GenerationRequest], hashed: bool = True
    ) -> list[list[Prompt]]:
        """The prompts of each request, checked; `hashed`: with the hashes of their blocks. Raises InvalidRequest or
        Overloaded."""
        block_size = model.block_size if hashed else 0

        def make(one: GenerationRequest) -> list[Prompt]:
            most = num_kept_tokens(one, model)
            found = []
            for prompt in one.prompts:
                tokens = prompt_tokens(prompt, one, model, most)
                found.append(Prompt(tokens, tuple(chain(tokens, block_size, one.cache_salt)) if block_size else ()))
            return found

        size = 0
        for one in wanted:
            size += sum(map(len, one.prompts))
        return await self.offload.run(lambda: list(map(make, wanted)), size)

    async def generate(
        self,
        model: ServedModel,
        wanted: Sequence[GenerationRequest],
        received: float,
        admitted: Admitted,
        client: Hashable,
        tenant: bytes | None,
    ) -> Generation:
        """Start a generation of what one client wants: requests of the same id, `n` and limits, which run and end as
        one. `received` is when they came (`time.monotonic`), `client` from whom, `tenant` with whom alone it may share
        cached blocks (see ApiKeys; None: with all). Raises BatonError.

        The caller closes the generation, however it ends, and the generation returns what was admitted.
        """
        read = time.monotonic()
        if tenant is not None:
            wanted = [salted(one, tenant) for one in wanted]
        for one in wanted:
            for tool, definition in one.definitions:
                await self._check_definition(tool, definition, model, client)
            if (structured := one.sampling.get("structured_outputs")) is not None:
                await self._grammars.check(structured, model, client)
        prompts = await self._prompts(model, wanted)
        sizes = [(one, len(prompt.tokens)) for one, own in zip(wanted, prompts, strict=True) for prompt in own]
        check_prompt_logprobs(sizes, model)
        num_tokens = 0
        for _, size in sizes:
            num_tokens += size
        admitted.resize(num_tokens)
        parts = await self._parts(model, wanted, prompts, _preparation(received, read))
        first = wanted[0]
        with_many: list[SamplingParams] = []
        for part in parts:
            if part.request.sampling.num_logprobs > DEFAULT_MAX_LOGPROBS:
                with_many.append(part.request.sampling)
        if with_many:
            check_answer_logprobs(with_many, first)
        generation = Generation(
            first.request_id, self._dispatcher, parts, admitted, self._deliveries, self._tells_timings
        )
        await generation.start(received)
        log.debug("placed prompts=%d n=%d", len(parts), first.n)
        return generation

    async def _parts(
        self,
        model: ServedModel,
        wanted: Sequence[GenerationRequest],
        prompts: Sequence[Sequence[Prompt]],
        preparation: Preparation,
    ) -> list[Part]:
        """prompts: of each request."""
        parts: list[Part] = []
        pause = Pauses()
        for one, own in zip(wanted, prompts, strict=True):
            bad_words = await self._bad_words(model, one.bad_words) if one.bad_words else ()
            stops = StopStrings(one.stop) if one.stop else NO_STOPS
            for prompt in own:
                parts.append(self._part(model, one, stops, prompt, len(parts) * one.n, bad_words, preparation))
                await pause()
        return parts

    async def _check_definition(
        self, tool: str, definition: StructuredOutput, model: ServedModel, client: Hashable
    ) -> None:
        """Raises InvalidRequest, or Overloaded. Of Lark, XGrammar says nothing."""
        kind = definition.kind
        if kind is StructuredKind.GRAMMAR and model.structured_outputs_backend is not StructuredBackend.GUIDANCE:
            return
        try:
            await self._grammars.check(definition, model, client)
        except InvalidRequest as error:
            reason = error.message.removeprefix(f"structured_outputs: {kind.value}: ")
            raise InvalidRequest(f"The {kind.value} of the tool `{tool}` is refused: {reason}", "tools") from None

    async def _bad_words(self, model: ServedModel, words: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
        size = 2 * sum(map(len, words))
        return await self.offload.run(lambda: bad_words_token_ids(words, model.tokenizer, model.vocab_size), size)

    def _part(
        self,
        model: ServedModel,
        wanted: GenerationRequest,
        stops: StopStrings,
        prompt: Prompt,
        first_index: int,
        bad_words: tuple[tuple[int, ...], ...],
        preparation: Preparation,
    ) -> Part:
        sampling = sampling_params(wanted, model, len(prompt.tokens), bad_words)
        request = RoutedRequest(
            # Unique for ever, because clients may repeat their ids and nodes remember those that were aborted.
            request_id=f"{wanted.request_id}.{next(self._serial):x}",
            prompt_tokens=prompt.tokens,
            block_hashes=prompt.block_hashes,
            n=wanted.n,
            sampling=sampling,
            deadline_s=min(self._request_timeout_s, wanted.timeout_s or self._request_timeout_s),
            cache_salt=wanted.cache_salt,
            priority=wanted.priority,
            version=model.version,
            preparation=preparation,
        )
        answers: list[Answer | NoAnswer] = [
            NoAnswer(index)
            if wanted.prompt_only
            else self._answer(model, wanted, stops, index, sampling, prompt.tokens)
            for index in range(first_index, first_index + wanted.n)
        ]
        asked = sampling.num_prompt_logprobs is not None
        return Part(request, answers, owed=set(range(wanted.n)) if asked else set())

    def _answer(
        self,
        model: ServedModel,
        wanted: GenerationRequest,
        stops: StopStrings,
        index: int,
        sampling: SamplingParams,
        prompt: Sequence[int],
    ) -> Answer:
        eos = () if sampling.ignore_eos else model.defaults.eos_token_ids
        return Answer(
            index,
            model.tokenizer.detokenizer(wanted.skip_special_tokens, wanted.spaces_between_special_tokens, prompt),
            StopScanner(stops, wanted.include_stop_str_in_output),
            sampling.stop_token_ids.union(eos),
            sampling.min_tokens,
            wanted.include_stop_str_in_output,
        )


def _preparation(received: float, read: float) -> Preparation:
    """Of a request that is tokenized now. `received`, `read`: when it came, and when its prompt was there as text."""
    tokenized = time.monotonic()
    received_at = time.time() - (tokenized - received)
    return Preparation(received_at, read - received, tokenized - received, current_trace())
