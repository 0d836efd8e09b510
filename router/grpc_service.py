"""The public gRPC API: `baton.v1.Generation`, with the meaning that the HTTP API has."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, TypeVar

import grpc
import grpc.aio

from baton import wire
from baton.errors import BatonError, InternalError, InvalidRequest, RequestCancelled
from baton.telemetry import request_scope
from baton.v1 import generation_pb2 as pb
from baton.v1 import generation_pb2_grpc
from router.answer import Delta
from router.api_keys import ApiKeys, salted
from router.ask import Ask
from router.generation import Generation
from router.life import RequestTimings
from router.models import ServedModel
from router.scope import RETRY_AFTER_S, usable_request_id
from router.service import Service

log = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]
R = TypeVar("R")

_ABORT_S = 1.0

_OPTIONAL = (
    *("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("seed", "max_tokens", "timeout_s"),
)


class GenerationService(generation_pb2_grpc.GenerationServicer):
    """`write_timeout_s`: so long each message may wait for its client to read; then the call ends."""

    def __init__(self, service: Service, keys: ApiKeys | None = None, write_timeout_s: float = 30.0) -> None:
        self._service = service
        self._keys = keys
        self._write_timeout_s = write_timeout_s

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> None:  # noqa: N802
        """GenerationStarted, deltas, GenerationFinished; or an error status. The call's own deadline holds too."""
        received = time.monotonic()
        metadata = dict(context.invocation_metadata() or ())
        request_id = usable_request_id(request.request_id or str(metadata.get("x-request-id", "")))

        async def run() -> None:
            await context.send_initial_metadata((("x-request-id", request_id),))
            model = self._service.models.get(request.model)
            ask = self._ask(model, request, request_id, context.time_remaining())
            tenant = self._keys and self._keys.check(authorization_of(context.invocation_metadata()))
            generation = await self._service.generate(model, salted(ask, tenant or None), received)
            try:
                await self._send(generation, model, context)
            finally:
                generation.close()

        with request_scope(request_id):
            await _answered("Generate", context, run, received)

    async def ListModels(self, request: pb.ListModelsRequest, context: Context) -> pb.ListModelsResponse:  # noqa: N802
        async def run() -> pb.ListModelsResponse:
            model = self._service.models.get(None)
            return pb.ListModelsResponse(models=[pb.Model(id=model.name, max_model_len=model.max_model_len)])

        return await _answered("ListModels", context, run, time.monotonic())

    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:  # noqa: N802
        async def run() -> pb.TokenizeResponse:
            model = self._service.models.get(request.model)
            text, special = self._text(model, request)
            if request.HasField("add_special_tokens"):
                special = request.add_special_tokens
            [tokens] = await self._service.tokenize(model, [text], special)
            return pb.TokenizeResponse(token_ids=wire.pack_tokens(tokens), max_model_len=model.max_model_len)

        return await _answered("Tokenize", context, run, time.monotonic())

    async def Detokenize(self, request: pb.DetokenizeRequest, context: Context) -> pb.DetokenizeResponse:  # noqa: N802
        async def run() -> pb.DetokenizeResponse:
            model = self._service.models.get(request.model)
            tokens = wire.unpack_tokens(request.token_ids)
            return pb.DetokenizeResponse(text=model.tokenizer.decode(tokens, skip_special_tokens=False))

        return await _answered("Detokenize", context, run, time.monotonic())

    async def _send(self, generation: Generation, model: ServedModel, context: Context) -> None:
        """Raises RequestCancelled when the client does not read."""
        usage, rid = generation.usage, generation.request_id

        async def write(response: pb.GenerateResponse) -> None:
            try:
                async with asyncio.timeout(self._write_timeout_s):
                    await context.write(response)
            except TimeoutError:
                raise RequestCancelled(f"the client did not read for {self._write_timeout_s:g} s") from None

        started = pb.GenerationStarted(num_prompt_tokens=usage.num_prompt_tokens, model=model.name)
        await write(pb.GenerateResponse(request_id=rid, started=started))
        while not generation.done:
            for delta in await generation.next():
                await write(pb.GenerateResponse(request_id=rid, delta=_delta(delta)))
        finished = pb.GenerationFinished(usage=_usage(generation), timings=_timings(generation.timings))
        await write(pb.GenerateResponse(request_id=rid, finished=finished))

    def _ask(self, model: ServedModel, request: pb.GenerateRequest, request_id: str, left_s: float | None) -> Ask:
        """Raises InvalidRequest. `left_s`: until the call's own deadline."""
        prompt, special = self._prompt(model, request)
        given = {name: getattr(request, name) for name in _OPTIONAL if request.HasField(name)}
        if left_s is not None:
            given["timeout_s"] = min(left_s, given.get("timeout_s", left_s))
        if request.HasField("logprobs") and request.logprobs < 0:
            raise InvalidRequest(f"logprobs must be 0 or more, not {request.logprobs}", "logprobs")
        return Ask(
            request_id=request_id,
            prompts=(prompt,),
            add_special_tokens=special,
            n=request.n or 1,
            logit_bias=dict(request.logit_bias),
            min_tokens=request.min_tokens,
            ignore_eos=request.ignore_eos,
            num_logprobs=request.logprobs if request.HasField("logprobs") else -1,
            stop=tuple(request.stop),
            stop_token_ids=tuple(request.stop_token_ids),
            include_stop_str_in_output=request.include_stop_str_in_output,
            skip_special_tokens=request.skip_special_tokens if request.HasField("skip_special_tokens") else True,
            cache_salt=request.cache_salt,
            **given,
        )

    def _prompt(self, model: ServedModel, request: pb.GenerateRequest) -> tuple[str | tuple[int, ...], bool]:
        """Text or token ids, and whether to add special tokens to a text."""
        if request.WhichOneof("input") == "prompt_tokens":
            return wire.unpack_tokens(request.prompt_tokens.ids, "prompt_tokens"), False
        return self._text(model, request)

    def _text(self, model: ServedModel, request: pb.GenerateRequest | pb.TokenizeRequest) -> tuple[str, bool]:
        match request.WhichOneof("input"):
            case "prompt":
                return request.prompt, True
            case "chat":
                return self._service.render_chat(model, [_message(m) for m in request.chat.messages]), False
            case _:
                raise InvalidRequest("there is no input: give a prompt, prompt_tokens or a chat", "input")


async def _answered(method: str, context: Context, run: Callable[[], Awaitable[R]], received: float) -> R:
    """What `run` returns; its errors become the call's status."""
    error: BatonError
    try:
        result = await run()
    except BatonError as named:
        error = named
    except Exception as unnamed:  # a request's boundary
        error = InternalError(f"internal error: {type(unnamed).__name__}")
        if context.cancelled():
            error = RequestCancelled("the client went away")
        else:
            log.exception("our own mistake in %s", method)
    else:
        _log_end(method, "OK", received)
        return result
    _log_end(method, error.grpc_status, received)
    retry = (("retry-after", str(RETRY_AFTER_S)),) if error.retryable else ()
    try:
        async with asyncio.timeout(_ABORT_S):
            await context.abort(grpc.StatusCode[error.grpc_status], error.message, retry)
    except (TimeoutError, grpc.aio.InternalError):  # it does not read what was written before, or has left
        raise asyncio.CancelledError from None
    raise error  # abort raises; this tells the type checker


def authorization_of(metadata: Iterable[Any] | None) -> str:
    """What the call says as HTTP's header of that name; empty for nothing."""
    return str(dict(metadata or ()).get("authorization", ""))


def _log_end(method: str, status: str, received: float) -> None:
    log.info("grpc %s status=%s took_ms=%.1f", method, status, (time.monotonic() - received) * 1e3)


def _message(message: pb.ChatMessage) -> dict[str, str]:
    plain = {"role": message.role, "content": message.content}
    return {**plain, "name": message.name} if message.name else plain


def _delta(delta: Delta) -> pb.GenerationDelta:
    answer = pb.GenerationDelta(
        index=delta.index,
        text=delta.text,
        token_ids=wire.pack_tokens(delta.token_ids),
        logprobs=wire.write_logprobs(delta.logprobs),
    )
    if delta.finish_reason:
        answer.finish_reason = wire.write_finish_reason(delta.finish_reason)
    if isinstance(delta.stop, str):
        answer.stop_string = delta.stop
    elif delta.stop is not None:
        answer.stop_token_id = delta.stop
    return answer


def _usage(generation: Generation) -> pb.Usage:
    usage = generation.usage
    return pb.Usage(
        num_prompt_tokens=usage.num_prompt_tokens,
        num_completion_tokens=usage.num_completion_tokens,
        num_cached_tokens=usage.num_cached_tokens or 0,
    )


def _timings(timings: RequestTimings | None) -> pb.Timings | None:
    if timings is None:
        return None
    return pb.Timings(
        queue_s=timings.queue_s,
        prefill_s=timings.prefill_s,
        gather_s=timings.gather_s,
        wire_s=timings.wire_s,
        commit_s=timings.commit_s,
        transfer_s=timings.transfer_s,
        scatter_s=timings.scatter_s,
        step_wait_s=timings.step_wait_s,
        handoff_s=timings.handoff_s,
        first_token_s=timings.first_token_s,
        total_s=timings.total_s,
        num_decode_cached_tokens=timings.num_decode_cached_tokens,
        transfer_bytes=timings.transfer_bytes,
        num_attempts=timings.num_attempts,
        prefill_node=timings.prefill_node,
        decode_node=timings.decode_node,
    )
