"""Answers prompts with a running router, over its gRPC API.

gRPC, not HTTP: it sends the ids and logprobs of tokens as numbers, and streams whose early end aborts the request.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import grpc
import grpc.aio

from baton import wire
from baton.address import HostPort
from baton.errors import (
    PARAM_KEY,
    BatonError,
    CacheExhausted,
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    NodeUnavailable,
    Overloaded,
    RequestCancelled,
)
from baton.node_info import GenerationDefaults
from baton.prompt_logprobs import PromptLogprobs
from baton.regular_files import read_regular
from baton.rpc.channels import CHANNEL_OPTIONS
from baton.rpc.streams import connection_lost
from baton.v1 import generation_pb2 as pb
from baton.v1 import generation_pb2_grpc
from baton_llm.backend import CLOSED
from baton_llm.prompts import Chat, Encoded, Input
from baton_llm.sampling_params import SamplingParams
from router.api_keys import check_key
from router.text.answer import Delta
from router.text.generation_request import SEED_SPACE, GenerationRequest
from router.text.prompt_logprobs import ScoredPrompt

_MAX_IN_FLIGHT = 256
_CONNECT_S = 10.0
_CALL_S = 60.0
"""For calls that generate nothing."""
_ERRORS: dict[str, type[BatonError]] = {
    "UNAUTHENTICATED": InvalidRequest,
    "NOT_FOUND": InvalidRequest,
    **{
        kind.grpc_status: kind
        for kind in (CacheExhausted, Overloaded, InvalidRequest, DeadlineExceeded, NodeUnavailable, RequestCancelled)
    },
}


class RemoteBackend:
    """`router`: HOST:PORT of a router's gRPC API. `model`: the name that it must serve; None: whatever it serves.
    `ssl_ca_certs`: PEM file with the authorities to trust; None: no TLS."""

    max_in_flight = _MAX_IN_FLIGHT

    def __init__(self, router: str, model: str | None, api_key: str | None, ssl_ca_certs: str | Path | None) -> None:
        """Raises ValueError, OSError."""
        try:
            self._address = HostPort.parse(router)
        except ValueError as error:
            raise ValueError(f"router: {error}") from None
        self._model = model or ""
        self._metadata = _authorization(api_key.strip()) if api_key is not None else ()
        self._authorities = _read_authorities(Path(ssl_ca_certs)) if ssl_ca_certs is not None else None
        self._channel: grpc.aio.Channel | None = None
        self._stopped = False

    async def start(self) -> None:
        """Raises NodeUnavailable if the router cannot be reached or serves no model yet, InvalidRequest for a model
        that it does not serve."""
        address = str(self._address)
        if self._authorities is None:
            self._channel = grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
        else:
            credentials = grpc.ssl_channel_credentials(self._authorities)
            self._channel = grpc.aio.secure_channel(address, credentials, options=CHANNEL_OPTIONS)
        self._stub: Any = generation_pb2_grpc.GenerationStub(self._channel)  # type: ignore[no-untyped-call]
        try:
            served = await self._stub.ListModels(
                pb.ListModelsRequest(), timeout=_CONNECT_S, metadata=self._metadata, wait_for_ready=True
            )
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                raise NodeUnavailable(f"no router answers at {address} within {_CONNECT_S:g} s") from None
            _raise(error)
        if self._model and self._model not in [model.id for model in served.models]:
            raise self._unknown(served)

    async def encode(self, prompt: Input, params: SamplingParams | None) -> Encoded:
        """The router tokenizes, and checks the rest when it gets the request."""
        if isinstance(prompt, str):
            return Encoded(prompt, await self._tokenize(pb.TokenizeRequest(model=self._model, prompt=prompt)))
        if isinstance(prompt, Chat):
            chat = pb.TokenizeRequest(model=self._model, chat=pb.Chat(json=prompt.json))
            token_ids = await self._tokenize(chat)
            ids = pb.DetokenizeRequest(model=self._model, token_ids=wire.pack_tokens(token_ids))
            return Encoded((await self._call(self._stub.Detokenize, ids)).text, token_ids)
        token_ids = prompt
        if any(not 0 <= token < 2**32 for token in token_ids):
            raise InvalidRequest("token ids must be 0 or more, and below 2^32", "prompt")
        return Encoded(None, token_ids)

    async def generate(self, request: GenerationRequest, take: Callable[[Sequence[Delta]], None]) -> int:
        scored = "num_prompt_logprobs" in request.sampling
        pieces: list[PromptLogprobs] = []
        with self._errors():
            call = self._stub.Generate(_message(request, self._model), metadata=self._metadata)
            try:
                async for answer in call:
                    match answer.WhichOneof("event"):
                        case "prompt_logprobs":
                            pieces.append(wire.read_prompt_logprobs(answer.prompt_logprobs))
                        case "delta":
                            delta = _delta(answer.delta)
                            if scored:
                                scored = False
                                delta = delta._replace(prompt=_scored(request, pieces))
                            take([delta])
                        case "finished":
                            return int(answer.finished.usage.num_cached_tokens)
            finally:
                call.cancel()
        raise InternalError("the router ended the stream without an end")

    def token_text(self, token_id: int) -> str | None:
        return None

    async def defaults(self) -> GenerationDefaults:
        served = await self._call(self._stub.ListModels, pb.ListModelsRequest())
        found = [model for model in served.models if self._model in ("", model.id)]
        if len(found) != 1:
            raise self._unknown(served)
        return wire.read_generation_defaults(found[0].generation_defaults)

    def tokenizer(self) -> Any:
        raise NotImplementedError("the router has the tokenizer: HTTP has /tokenize for it, and gRPC Tokenize")

    async def stop(self) -> None:
        self._stopped = True
        if self._channel is not None:
            await self._channel.close(None)

    def close(self) -> None:
        """There are no threads of its own."""

    def _unknown(self, served: pb.ListModelsResponse) -> InvalidRequest:
        names = ", ".join(model.id for model in served.models)
        wanted = f"not {self._model}" if self._model else "of which `model` must name one"
        return InvalidRequest(f"the router at {self._address} serves {names}, {wanted}", "model")

    async def _tokenize(self, request: pb.TokenizeRequest) -> tuple[int, ...]:
        answer = await self._call(self._stub.Tokenize, request)
        return wire.unpack_tokens(answer.token_ids)

    async def _call(self, method: Any, request: Any) -> Any:
        with self._errors():
            return await method(request, timeout=_CALL_S, metadata=self._metadata)

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        """Around a call to the router. `stop` closes the channel, which refuses calls and cancels those under way, but
        not the tasks that wait for them: left as it is, such a cancellation would end the caller's other prompts, too,
        and lose their answers."""
        if self._stopped:
            raise RequestCancelled(CLOSED)
        try:
            yield
        except grpc.aio.AioRpcError as error:
            _raise(error)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._stopped and task is not None and not task.cancelling():
                raise RequestCancelled(CLOSED) from None
            raise


def _authorization(key: str) -> tuple[tuple[str, str], ...]:
    """The metadata with that key; none for an empty one. Raises ValueError."""
    try:
        return (("authorization", f"Bearer {check_key(key)}"),) if key else ()
    except ValueError as error:
        raise ValueError(f"api_key: {error}") from None


def _read_authorities(path: Path) -> bytes:
    """Raises OSError, and ValueError for a file without certificates, with which gRPC would try to connect in vain."""
    read = read_regular(path)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(path)
    except ssl.SSLError as error:
        raise ValueError(f"ssl_ca_certs: {path} holds no certificates: {error.reason}") from None
    return read


def _raise(error: grpc.aio.AioRpcError) -> NoReturn:
    if lost := connection_lost(error):
        raise NodeUnavailable(f"the router: {lost}") from None
    kind, text = _ERRORS.get(error.code().name, InternalError), error.details() or error.code().name
    if kind is InvalidRequest:
        beside: Any = error.trailing_metadata() or ()
        raise InvalidRequest(text, dict(beside).get(PARAM_KEY)) from None
    raise kind(text) from None


def _message(request: GenerationRequest, model: str) -> pb.GenerateRequest:
    [prompt] = request.prompts
    assert not isinstance(prompt, str)
    sampling = dict(request.sampling)
    logprobs = sampling.pop("num_logprobs", None)
    prompt_logprobs = sampling.pop("num_prompt_logprobs", None)
    if "seed" in sampling:  # an int64 there, of which the router takes the remainder by 2^64
        sampling["seed"] = (sampling["seed"] + SEED_SPACE // 2) % SEED_SPACE - SEED_SPACE // 2
    if "structured_outputs" in sampling:
        sampling["structured_outputs"] = wire.write_structured(sampling["structured_outputs"])
    if "logits_processors" in sampling:
        sampling["logits_processors"] = wire.write_processors(sampling["logits_processors"])
    return pb.GenerateRequest(
        model=model,
        prompt_tokens=pb.TokenIds(ids=wire.pack_tokens(prompt)),
        n=request.n,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        stop=request.stop,
        include_stop_str_in_output=request.include_stop_str_in_output,
        skip_special_tokens=request.skip_special_tokens,
        spaces_between_special_tokens=request.spaces_between_special_tokens,
        bad_words=request.bad_words,
        priority=request.priority,
        cache_salt=request.cache_salt,
        **sampling,
    )


def _scored(request: GenerationRequest, pieces: Sequence[PromptLogprobs]) -> ScoredPrompt:
    """Raises InternalError if the pieces are not those of the prompt."""
    [prompt] = request.prompts
    assert not isinstance(prompt, str)
    ends = [1, *(piece.end_index for piece in pieces)]
    if [piece.first_index for piece in pieces] != ends[:-1] or ends[-1] != len(prompt):
        raise InternalError("the router's prompt_logprobs are not those of the prompt's tokens")
    return ScoredPrompt(prompt, tuple(pieces))


def _delta(delta: pb.GenerationDelta) -> Delta:
    kind = delta.WhichOneof("stop_reason")
    return Delta(
        index=delta.index,
        text=delta.text,
        token_ids=wire.unpack_tokens(delta.token_ids),
        logprobs=wire.read_logprobs(delta.logprobs),
        finish_reason=wire.read_finish_reason(delta.finish_reason) if delta.finish_reason else None,
        stop=getattr(delta, kind) if kind else None,
    )
