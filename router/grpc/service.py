"""The public gRPC API: `baton.v1.Generation`, with the same meaning as the HTTP API."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Awaitable, Callable, Hashable, Iterable, Sequence
from typing import Any, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import Message

from baton import wire
from baton.errors import PARAM_KEY, BatonError, InternalError, InvalidRequest, RequestCancelled
from baton.rpc.aborting import abort
from baton.rpc.silence import until_silent
from baton.sampling import NAMES
from baton.telemetry import request_scope
from baton.telemetry.trace_context import HEADER as TRACE_HEADER
from baton.telemetry.trace_context import begin, trace_scope
from baton.v1 import generation_pb2 as pb
from router.api_keys import ApiKeys
from router.generation import Generation
from router.grpc.requests import parse_request
from router.http.chat_prompt import chat_prompt, read_chat
from router.http.schemas import Chat, size_of_prompt
from router.limits import MAX_COUNTED_CHARS, MAX_NAME_CHARS, MAX_ROLE_CHARS
from router.request_ids import usable_request_id
from router.requests.admission import retry_after_s
from router.requests.request_state import RequestTimings
from router.service import MESSAGE_SIZE, Service
from router.text.answer import Delta
from router.text.generation_request import GenerationRequest, check_answer, check_num_tokens, encode
from router.text.models import ServedModel

log = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]
R = TypeVar("R")
M = TypeVar("M", bound=Message)

SERVICE = pb.DESCRIPTOR.services_by_name["Generation"].full_name

_ABORT_S = 1.0
_MAX_DETAILS_BYTES = 4096
"""Of an error's message, as gRPC sends it. A client takes 8 KiB of metadata in all; with more, the call ends with
RESOURCE_EXHAUSTED there, whatever its status was."""


class GenerationService:
    """A server adds `handlers`. Requests come as bytes and are parsed here, within limits. `write_timeout_s`: how long
    each message may wait for its client to read before the call ends. `traces`: they are recorded."""

    def __init__(
        self, service: Service, keys: ApiKeys | None = None, write_timeout_s: float = 30.0, traces: bool = False
    ) -> None:
        self._service = service
        self._keys = keys
        self._write_timeout_s = write_timeout_s
        self._traces = traces

    def handlers(self) -> grpc.GenericRpcHandler[Any, Any]:
        methods: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            "Generate": grpc.unary_stream_rpc_method_handler(
                self.generate, response_serializer=pb.GenerateResponse.SerializeToString
            ),
            "ListModels": grpc.unary_unary_rpc_method_handler(
                self.list_models, response_serializer=pb.ListModelsResponse.SerializeToString
            ),
            "Tokenize": grpc.unary_unary_rpc_method_handler(
                self.tokenize, response_serializer=pb.TokenizeResponse.SerializeToString
            ),
            "Detokenize": grpc.unary_unary_rpc_method_handler(
                self.detokenize, response_serializer=pb.DetokenizeResponse.SerializeToString
            ),
        }
        return grpc.method_handlers_generic_handler(SERVICE, methods)

    async def generate(self, data: bytes, context: Context) -> None:
        """Sends GenerationStarted, deltas, GenerationFinished, or an error status. The call's own deadline counts
        too."""
        received = time.monotonic()
        request = await _answered("Generate", context, lambda: self._parse(pb.GenerateRequest, data), received, False)
        metadata = dict(context.invocation_metadata() or ())
        request_id = usable_request_id(request.request_id or str(metadata.get("x-request-id", "")))

        async def run() -> None:
            own = () if trace is None else ((TRACE_HEADER, trace.header),)
            await context.send_initial_metadata((("x-request-id", request_id), *own))
            model = self._service.model(request.model)
            prompt = await self._prompt(request, model)
            with self._service.admit(model, [prompt.size], request.n or 1) as admitted:
                wanted = _generation_request(
                    request, request_id, await prompt.read(self._service), context.time_remaining()
                )
                client: Hashable = context.peer().rpartition(":")[0]
                tenant = None
                if self._keys is not None:
                    client = owner = self._keys.owner(authorization_of(context.invocation_metadata()))
                    tenant = self._keys.tenant(owner)
                generation = await self._service.generate(model, (wanted,), received, admitted, client, tenant)
            try:
                await self._send(generation, model, context)
            finally:
                generation.close()

        given = metadata.get(TRACE_HEADER)
        trace = begin(str(given) if given else None, sampled=self._traces) if given or self._traces else None
        with request_scope(request_id), trace_scope(trace):
            await _answered("Generate", context, run, received)

    async def list_models(self, data: bytes, context: Context) -> pb.ListModelsResponse:
        async def run() -> pb.ListModelsResponse:
            served = self._service.models.served()
            return pb.ListModelsResponse(models=map(_described, served))

        return await _answered("ListModels", context, run, time.monotonic())

    async def tokenize(self, data: bytes, context: Context) -> pb.TokenizeResponse:
        async def run() -> pb.TokenizeResponse:
            request = await self._parse(pb.TokenizeRequest, data)
            model = self._service.models.get(request.model)
            prompt = await self._prompt(request, model)
            with self._service.admit(model, [prompt.size]):
                text = str(await prompt.read(self._service))
                special = request.add_special_tokens if request.HasField("add_special_tokens") else prompt.special

                def answer() -> pb.TokenizeResponse:
                    ids = wire.pack_tokens(encode(text, model, special, MAX_COUNTED_CHARS))
                    return pb.TokenizeResponse(token_ids=ids, max_model_len=model.max_model_len)

                return await self._service.offload.run(answer, len(text))

        return await _answered("Tokenize", context, run, time.monotonic())

    async def detokenize(self, data: bytes, context: Context) -> pb.DetokenizeResponse:
        async def run() -> pb.DetokenizeResponse:
            request = await self._parse(pb.DetokenizeRequest, data)
            model = self._service.models.get(request.model)

            def answer() -> pb.DetokenizeResponse:
                tokens = wire.unpack_tokens(request.token_ids)
                check_answer(tokens, model)
                return pb.DetokenizeResponse(text=model.tokenizer.decode(tokens, skip_special_tokens=False))

            size = len(request.token_ids) // 4
            with self._service.admit(model, [size]):
                return await self._service.offload.run(answer, size)

        return await _answered("Detokenize", context, run, time.monotonic())

    async def _prompt(self, request: pb.GenerateRequest | pb.TokenizeRequest, model: ServedModel) -> _Prompt:
        """Raises InvalidRequest or Overloaded."""
        text, chat = request.chat.json, None
        if text and request.chat.messages:
            raise InvalidRequest("a chat has either messages or json", "chat")
        if text:
            chat = await self._service.offload.run(lambda: read_chat(text), len(text))
        return _Prompt(request, model, chat)

    async def _parse(self, kind: type[M], data: bytes) -> M:
        return await self._service.offload.run(lambda: parse_request(kind, data), len(data))

    async def _send(self, generation: Generation, model: ServedModel, context: Context) -> None:
        """Raises RequestCancelled when the client does not read."""
        usage, rid = generation.usage, generation.request_id

        async def write(response: pb.GenerateResponse) -> None:
            await write_in_time(context, response, self._write_timeout_s)

        started = pb.GenerationStarted(num_prompt_tokens=usage.num_prompt_tokens, model=model.name)
        await write(pb.GenerateResponse(request_id=rid, started=started))
        told_prompt = False  # once, for all answers
        while not generation.done:
            for delta in await generation.next():
                if delta.prompt is not None and not told_prompt:
                    told_prompt = True
                    for piece in delta.prompt.pieces:
                        written = wire.write_prompt_logprobs(piece)
                        await write(pb.GenerateResponse(request_id=rid, prompt_logprobs=written))
                await write(pb.GenerateResponse(request_id=rid, delta=_delta(delta)))
        finished = pb.GenerationFinished(usage=_usage(generation), timings=_timings(generation.timings))
        await write(pb.GenerateResponse(request_id=rid, finished=finished))


async def write_in_time(context: Context, response: pb.GenerateResponse, limit_s: float) -> None:
    """Raises RequestCancelled when the client does not read."""
    try:
        async with until_silent(limit_s):
            await context.write(response)
    except TimeoutError:
        raise RequestCancelled(f"the client did not read for {limit_s:g} s") from None


class _Prompt:
    """The input of a request. `size`: characters, or tokens; `special`: whether a text gets special tokens by default.
    chat: what the chat's JSON says. Raises InvalidRequest."""

    def __init__(self, request: pb.GenerateRequest | pb.TokenizeRequest, model: ServedModel, chat: Chat | None) -> None:
        self._request = request
        self._model = model
        self._chat = chat
        self._kind = request.WhichOneof("input")
        self.special = self._kind == "prompt"
        match self._kind:
            case "prompt":
                self.size = len(request.prompt)
            case "chat" if chat is not None:
                self.size = size_of_prompt(chat)
            case "chat":
                _check_messages(request.chat.messages)
                self.size = sum(len(message.content) + MESSAGE_SIZE for message in request.chat.messages)
            case "prompt_tokens":
                assert isinstance(request, pb.GenerateRequest)
                self.size = len(request.prompt_tokens.ids) // 4
                check_num_tokens(self.size, model, "prompt_tokens")
            case _:
                raise InvalidRequest("there is no input: give a prompt, prompt_tokens or a chat", "input")

    async def read(self, service: Service) -> str | tuple[int, ...]:
        """The text, the rendered chat, or the token ids."""
        request = self._request
        if self._chat is not None:
            return await chat_prompt(service, self._model, self._chat, self.size)
        if self._kind == "chat":
            messages = request.chat.messages
            return await service.render_chat(self._model, lambda: [_message(m) for m in messages], self.size)
        if self._kind == "prompt":
            return request.prompt
        assert isinstance(request, pb.GenerateRequest)
        return wire.unpack_tokens(request.prompt_tokens.ids, "prompt_tokens")


def _check_messages(messages: Sequence[pb.ChatMessage]) -> None:
    for message in messages:
        if len(message.role) > MAX_ROLE_CHARS or len(message.name) > MAX_NAME_CHARS:
            raise InvalidRequest(
                f"a message's role must have at most {MAX_ROLE_CHARS} characters, its name {MAX_NAME_CHARS}", "chat"
            )


def _generation_request(
    request: pb.GenerateRequest, request_id: str, prompt: str | tuple[int, ...], left_s: float | None
) -> GenerationRequest:
    """Raises InvalidRequest. `left_s`: until the call's own deadline."""
    sampling: dict[str, Any] = {said.name: value for said, value in request.ListFields() if said.name in NAMES}
    if request.HasField("logprobs"):
        sampling["num_logprobs"] = request.logprobs
    if request.HasField("prompt_logprobs"):
        sampling["num_prompt_logprobs"] = request.prompt_logprobs
    if request.HasField("structured_outputs"):
        sampling["structured_outputs"] = wire.read_structured(request.structured_outputs)
    if request.logits_processors:
        sampling["logits_processors"] = wire.read_processors(request.logits_processors)
    timeouts = [request.timeout_s] if request.HasField("timeout_s") else []  # first: min() keeps NaN there
    timeouts += [left_s] if left_s is not None else []
    return GenerationRequest(
        request_id=request_id,
        prompts=(prompt,),
        add_special_tokens=request.WhichOneof("input") == "prompt",
        n=request.n or request.beam_width or 1,
        sampling=sampling,
        stop=tuple(dict.fromkeys(request.stop)),
        bad_words=tuple(dict.fromkeys(request.bad_words)),
        include_stop_str_in_output=request.include_stop_str_in_output,
        skip_special_tokens=request.skip_special_tokens if request.HasField("skip_special_tokens") else True,
        spaces_between_special_tokens=request.spaces_between_special_tokens
        if request.HasField("spaces_between_special_tokens")
        else True,
        truncate_prompt_tokens=request.truncate_prompt_tokens if request.HasField("truncate_prompt_tokens") else None,
        timeout_s=min(timeouts, default=None),
        cache_salt=request.cache_salt,
        priority=request.priority,
    )


async def _answered(
    method: str, context: Context, run: Callable[[], Awaitable[R]], received: float, is_last: bool = True
) -> R:
    """What `run` returns; its errors become the call's status. Logged if that ends the call, or if `is_last`."""
    error: BatonError
    try:
        result = await run()
    except BatonError as named:
        error = named.with_traceback(None)  # which has this frame, and so the error, and the request with it
    except Exception as unnamed:  # a request's boundary
        error = InternalError(f"internal error: {type(unnamed).__name__}")
        if context.cancelled():
            error = RequestCancelled("the client went away")
        else:
            log.exception("internal error in %s", method)
    except asyncio.CancelledError:  # how grpc.aio ends the call of a client that has left
        _log_end(method, RequestCancelled.grpc_status, received)
        raise
    else:
        if is_last:
            _log_end(method, "OK", received)
        return result
    _log_end(method, error.grpc_status, received)
    try:
        async with asyncio.timeout(_ABORT_S):
            await abort(context, grpc.StatusCode[error.grpc_status], _details(error), _beside(error))
    except (TimeoutError, grpc.aio.InternalError):  # the client does not read earlier messages, or has left
        raise asyncio.CancelledError from None


def _details(error: BatonError) -> str:
    """As much of its message as a client takes. gRPC sends a percent sign, and each byte that is not printable ASCII,
    as three."""
    sizes = (
        1 if " " <= char <= "~" and char != "%" else 3 * len(char.encode(errors="replace")) for char in error.message
    )
    num_fit = sum(1 for _ in itertools.takewhile(_MAX_DETAILS_BYTES.__ge__, itertools.accumulate(sizes)))
    return error.message[:num_fit]


def _beside(error: BatonError) -> tuple[tuple[str, str], ...]:
    """What the call's trailing metadata says of an error."""
    param = error.param if isinstance(error, InvalidRequest) else None
    named = ((PARAM_KEY, param),) if param and param.isascii() and param.isprintable() else ()
    return (*named, ("retry-after", str(retry_after_s(error)))) if error.retryable else named


def authorization_of(metadata: Iterable[Any] | None) -> str:
    """The call's metadata that corresponds to HTTP's header of that name; empty if there is none."""
    return str(dict(metadata or ()).get("authorization", ""))


def _log_end(method: str, status: str, received: float) -> None:
    log.info("grpc %s status=%s took_ms=%.1f", method, status, (time.monotonic() - received) * 1e3)


def _described(model: ServedModel) -> pb.Model:
    defaults = wire.write_generation_defaults(model.defaults)
    return pb.Model(
        id=model.name,
        max_model_len=model.max_model_len,
        generation_defaults=defaults,
        max_logprobs=model.max_logprobs,
    )


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
    return pb.Timings(**{name: getattr(timings, name) for name in pb.Timings.DESCRIPTOR.fields_by_name})
