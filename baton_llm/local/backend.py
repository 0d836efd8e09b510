"""Answers prompts with the nodes and the router of this process."""

from __future__ import annotations

import dataclasses
import logging
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tokenizers
from transformers import PreTrainedTokenizerFast

from baton.errors import InternalError, NodeUnavailable
from baton.node_info import GenerationDefaults
from baton.telemetry import ROUTER, RouterMetrics, new_registry
from baton_llm.local.handoff_link import HandoffLink
from baton_llm.local.node import LocalNode
from baton_llm.local.router_link import RouterLink
from baton_llm.local.settings import make_settings
from baton_llm.prompts import Chat, Encoded, Input
from baton_llm.sampling_params import SamplingParams, request_of
from decode_node.node import make_role as make_decode_role
from node.loop import Turn
from prefill_node.node import make_role as make_prefill_role
from router.http.chat_prompt import chat_prompt, read_chat
from router.http.schemas import size_of_prompt
from router.limits import MAX_N
from router.nodes.dispatcher import Dispatcher
from router.request_metrics import RequestMetrics
from router.requests.admission import Admission
from router.requests.core import RouterCore
from router.service import Service
from router.text.answer import Delta
from router.text.generation_request import GenerationRequest, sampling_params
from router.text.models import Models, ServedModel
from router.text.num_logprobs import UNLIMITED

log = logging.getLogger(__name__)

_MAX_IN_FLIGHT = 1024
"""Several steps' worth; each prompt in flight costs the router's and the nodes' accounts some memory."""
_EPOCH_BITS = 63


class LocalBackend:
    """Loads the model twice, once for each node. `flags`: settings of the nodes, by name. On a GPU, the two share what
    --gpu-memory-utilization allows."""

    def __init__(self, flags: Mapping[str, Any]) -> None:
        """Takes seconds. Raises TypeError, ValueError, OSError or BatonError."""
        for_prefill, for_decode = make_settings(flags)
        # What a process has allocated counts to its share: the second node's is what the first one leaves.
        half = for_prefill.gpu_memory_utilization / 2
        self.prefill = LocalNode(for_prefill.model_copy(update={"gpu_memory_utilization": half}), make_prefill_role)
        try:
            self.decode = LocalNode(for_decode, make_decode_role)
        except BaseException:
            self.prefill.close()
            raise
        self.max_in_flight = min(_MAX_IN_FLIGHT, for_prefill.max_waiting)
        self._epoch = secrets.randbits(_EPOCH_BITS)
        name = self.prefill.info.served_model_name
        metrics = RequestMetrics(RouterMetrics(new_registry(ROUTER)), lambda: name)
        self._dispatcher = Dispatcher(RouterCore(self._epoch, max_waiting=self.max_in_flight * MAX_N), metrics)
        self._models = Models()
        self._service = Service(
            self._dispatcher,
            self._models,
            for_prefill.request_timeout,
            Admission(),
            MAX_N,
            trusts_request_templates=True,
        )
        self._transformers_tokenizer: Any = None
        self._failure: BaseException | None = None

    async def start(self) -> None:
        handoffs = HandoffLink(self.prefill, self.decode)
        await self._start_node(self.prefill, handoffs.deliver_prefill)
        await self._start_node(self.decode, handoffs.deliver_decode)

    async def encode(self, prompt: Input, params: SamplingParams | None) -> Encoded:
        model, text, special = self._model, None, True
        if isinstance(prompt, str):
            text = prompt
        elif isinstance(prompt, Chat):
            text, special = await self._render(model, prompt), False
        ids: Any = prompt
        prompts = (ids if text is None else text,)
        wanted = dataclasses.replace(request_of(params, "", ()), prompts=prompts, add_special_tokens=special)
        [token_ids] = await self._service.tokenize(model, wanted)
        sampling_params(wanted, model, len(token_ids))  # checks them together
        return Encoded(text, token_ids)

    async def generate(self, request: GenerationRequest, take: Callable[[Sequence[Delta]], None]) -> int:
        if self._failure is not None:
            raise self._failed_error()
        received = time.monotonic()
        request = dataclasses.replace(request, logprob_limits=UNLIMITED)
        with self._service.admit(self._model, [len(prompt) for prompt in request.prompts], request.n) as admitted:
            generation = await self._service.generate(self._model, (request,), received, admitted, None, None)
        try:
            while not generation.done:
                take(await generation.next())
        except NodeUnavailable:
            if self._failure is not None:
                raise self._failed_error() from self._failure
            raise
        finally:
            generation.close()
        return generation.usage.num_cached_tokens or 0

    def token_text(self, token_id: int) -> str | None:
        return self._model.tokenizer.token_bytes(token_id).decode(errors="replace")

    async def defaults(self) -> GenerationDefaults:
        return self._model.defaults

    def tokenizer(self) -> Any:
        """Made of what the nodes serve."""
        if self._transformers_tokenizer is None:
            info = self.prefill.info
            self._transformers_tokenizer = PreTrainedTokenizerFast(
                tokenizer_object=tokenizers.Tokenizer.from_str(self.prefill.tokenizer.decode()),
                chat_template=info.chat_template or None,
                model_max_length=info.max_model_len,
                **info.special_tokens,
            )
        return self._transformers_tokenizer

    async def stop(self) -> None:
        self._dispatcher.close()

    def close(self) -> None:
        self._service.close(wait=True)
        self.prefill.close()
        self.decode.close()

    @property
    def _model(self) -> ServedModel:
        return self._models.get(None)

    async def _start_node(self, node: LocalNode, hand_off: Callable[[Turn], None]) -> None:
        link = RouterLink(node, self._dispatcher, self._epoch)

        def deliver(turn: Turn) -> None:
            link.deliver(turn)
            hand_off(turn)

        async def fetch() -> bytes:
            return node.tokenizer

        await node.start(deliver, self._fail)
        self._models.join(node.info, await self._models.tokenizer(node.info, fetch))
        link.open()

    async def _render(self, model: ServedModel, prompt: Chat) -> str:
        chat = read_chat(prompt.json)
        return await chat_prompt(self._service, model, chat, size_of_prompt(chat))

    def _fail(self, error: BaseException) -> None:
        """An engine has ended: so does everything else, since no prompt can be answered without it."""
        if self._failure is None:
            self._failure = error
            log.critical("engine failed error=%r", error)
            self._dispatcher.close()

    def _failed_error(self) -> InternalError:
        return InternalError(f"the engine failed: {self._failure}")
