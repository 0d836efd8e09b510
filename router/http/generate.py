"""The routes that need the model: chats, completions, models, tokens."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Any, TypeVar

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from starlette.datastructures import State

from baton.errors import InvalidRequest
from router.generation import Generation
from router.http.answers import dump_json, raw_json_response
from router.http.best_of import BestOfShape
from router.http.body import BodyReader
from router.http.chat_prompt import chat_prompt
from router.http.chunks import ChunkEvents
from router.http.errors.names import rename_field
from router.http.limits import HttpLimits
from router.http.logprobs import ChatLogprobs, CompletionLogprobs, prompt_shape, token_text
from router.http.responses import EventResponse, WholeResponse
from router.http.schemas import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationFields,
    StreamOptions,
    TokenizeRequest,
    size_of_prompt,
)
from router.http.scope import request_id_of
from router.http.shapes import ChatShape, CompletionShape, Shape, prompt_ids
from router.http.tools import call_plan
from router.limits import MAX_COUNTED_CHARS, MAX_ECHO_CHARS
from router.requests.admission import Admitted
from router.service import Service
from router.text.answer_reader import AnswerReading, Parsers
from router.text.call_plan import NO_CALLS
from router.text.constraints import constrained, naming_constraint
from router.text.generation_request import GenerationRequest, check_answer, encode, num_kept_tokens, prompt_tokens
from router.text.models import ServedModel
from router.text.thinking_budget import with_thinking_budget

T = TypeVar("T")

_WITH_USAGE = StreamOptions(include_usage=True, continuous_usage_stats=True)


class GenerateRoutes:
    """`parsers`: for the answers to chats. `forces_usage`: all streams have the usage in each chunk; `forced_options`
    then come before those of requests."""

    def __init__(self, service: Service, limits: HttpLimits, parsers: Parsers, forces_usage: bool = False) -> None:
        self._service = service
        self._parsers = parsers
        self.forced_options = _WITH_USAGE if forces_usage else None
        self._limits = limits
        self._bodies = BodyReader(limits.bodies, service.offload)
        self._started = int(time.time())
        self.routes = APIRouter()
        self.posts = {"/v1/chat/completions": self.chat, "/v1/completions": self.completion}
        for path, handler in self.posts.items():
            self.routes.add_api_route(path, handler, methods=["POST"])
        self.routes.add_api_route("/v1/models", self.models, methods=["GET", "HEAD"])
        self.routes.add_api_route("/v1/models/", self.models, methods=["GET", "HEAD"])
        self.routes.add_api_route("/v1/models/{name:path}", self.model, methods=["GET", "HEAD"])
        self.routes.add_api_route("/tokenize", self.tokenize, methods=["POST"])
        self.routes.add_api_route("/detokenize", self.detokenize, methods=["POST"])

    async def chat(self, request: Request) -> Response:
        body = await self._bodies.read(request, ChatRequest)
        body.check()
        model = self._service.model(body.model)
        body = body.with_num_logprobs(model)
        request_id = request_id_of(request, body.request_id)
        generation, reading, prompt = await self.start_chat(request.state, request_id, model, body)
        return self._response(generation, body, chat_shape(generation, model, body, reading, prompt))

    async def start_chat(
        self, state: State, request_id: str, model: ServedModel, body: ChatRequest
    ) -> tuple[Generation, AnswerReading | None, str]:
        """Start a chat that was checked, with the state of its HTTP request. Also says how its answers are read; None:
        as they are; and what the template made of it. Raises BatonError."""

        def start(wanted: GenerationRequest, admitted: Admitted) -> Awaitable[Generation]:
            return self._service.generate(model, (wanted,), state.received, admitted, state.client, state.tenant)

        return await self.with_chat(request_id, model, body, start)

    async def with_chat(
        self,
        request_id: str,
        model: ServedModel,
        body: ChatRequest,
        use: Callable[[GenerationRequest, Admitted], Awaitable[T]],
    ) -> tuple[T, AnswerReading | None, str]:
        """What `use` makes of the generation that a checked chat asks for, and the rest as `start_chat` says. Raises
        BatonError."""
        if body.tools:
            body = body.with_allowed_tools(self._parsers)
        parallel = body.parallel_tool_calls is not False
        backend = model.structured_outputs_backend
        plan = call_plan(self._parsers, body.tools, body.tool_choice, parallel, backend)
        if body.response_format and plan.is_forced:
            body = body.without_response_format()
        size = size_of_prompt(body)
        try:
            with self._service.admit(model, (size,), body.num_drawn) as admitted:
                if body.echo:
                    _check_echo(body.num_kept * len(body.echoed))
                prompt = await chat_prompt(self._service, model, body, size)
                reading = plan.reading(self._parsers, prompt, parallel, body.begun)
                wanted = body.wanted(request_id, prompt)
                with naming_constraint(plan, body.constraint):
                    wanted = constrained(wanted, plan, reading)
                    if body.thinking_token_budget not in (None, -1):
                        wanted = with_thinking_budget(wanted, body.thinking_token_budget, reading, model.tokenizer)
                    used = await use(wanted, admitted)
                return used, reading, prompt
        except InvalidRequest as error:
            rename_field(error, body.names)
            raise

    async def count_tokens(self, model: ServedModel, body: ChatRequest) -> int:
        """Those of the prompt of a chat that was checked, which may be longer than the context. Raises BatonError."""
        if body.tools:
            body = body.with_allowed_tools(self._parsers)
        size = size_of_prompt(body)
        with self._service.admit(model, (size,)):
            prompt = await chat_prompt(self._service, model, body, size)

            def count() -> int:
                return len(encode(prompt, model, bool(body.add_special_tokens), MAX_COUNTED_CHARS))

            return await self._service.offload.run(count, len(prompt))

    async def completion(self, request: Request) -> Response:
        body = await self._bodies.read(request, CompletionRequest)
        body.check()
        model = self._service.model(body.model)
        body = body.with_num_logprobs(model)
        wanted = body.wanted(request_id_of(request, body.request_id))
        with self._service.admit(model, [len(prompt) for prompt in wanted.prompts], wanted.n) as admitted:
            echoes = await self._echoes(model, wanted, body.num_kept) if body.echo else {}
            num_echoed = body.logprobs if body.echo else None
            logprobs = CompletionLogprobs(model.tokenizer, bool(body.return_tokens_as_token_ids), num_echoed)
            shown = None if body.logprobs is None else logprobs
            prompts = prompt_shape(model.tokenizer, body.prompt_logprobs)
            state = request.state
            with naming_constraint(NO_CALLS, body.constraint):
                generation = await self._service.generate(
                    model, (wanted,), state.received, admitted, state.client, state.tenant
                )
            ids = prompt_ids(generation, body.num_kept) if body.return_token_ids else None
            shape = CompletionShape(wanted.request_id, model, shown, ids, echoes, prompts)
            return self._response(generation, body, shape)

    async def models(self) -> JSONResponse:
        """In OpenAI's form and in Anthropic's: they have no name in common but `data` and `id`."""
        models = [self._described(model) for model in self._service.models.served()]
        whole = {"has_more": False, "first_id": models[0]["id"], "last_id": models[-1]["id"]}
        return JSONResponse({"object": "list", "data": models, **whole})

    async def model(self, name: str) -> JSONResponse:
        known = self._service.models.get(name).name
        return JSONResponse(
            next(self._described(model) for model in self._service.models.served() if model.name == known)
        )

    async def tokenize(self, request: Request) -> Response:
        body = await self._bodies.read(request, TokenizeRequest)
        body.check()
        model = self._service.models.get(body.model)
        size = len(body.text) if body.messages is None else size_of_prompt(body)
        special = body.messages is None if body.add_special_tokens is None else body.add_special_tokens
        with self._service.admit(model, (size,)):
            text = body.text if body.messages is None else await chat_prompt(self._service, model, body, size)

            def answer() -> bytes:
                tokens = encode(text, model, special, MAX_COUNTED_CHARS)
                texts = [token_text(model.tokenizer, token) for token in tokens] if body.return_token_strs else None
                count = {"count": len(tokens), "max_model_len": model.max_model_len}
                return dump_json({**count, "tokens": tokens, "token_strs": texts})

            try:
                return raw_json_response(await self._service.offload.run(answer, len(text)))
            except InvalidRequest as error:
                rename_field(error, body.names)
                raise

    async def detokenize(self, request: Request) -> Response:
        body = await self._bodies.read(request, DetokenizeRequest)
        body.check()
        model = self._service.models.get(body.model)

        def answer() -> bytes:
            check_answer(body.tokens, model)
            return dump_json({"prompt": model.tokenizer.decode(body.tokens, skip_special_tokens=False)})

        with self._service.admit(model, [len(body.tokens)]):
            return raw_json_response(await self._service.offload.run(answer, len(body.tokens)))

    def _response(self, generation: Generation, body: GenerationFields, shape: Shape) -> Response:
        if body.stream:
            events = ChunkEvents(generation, shape, self.forced_options or body.stream_options)
            return EventResponse(generation, events, self._limits.keep_alive_s)
        kept = BestOfShape(shape, body.num_drawn, body.num_kept) if body.keeps_best else shape
        return WholeResponse(generation, kept, self._service.offload)

    async def _echoes(self, model: ServedModel, wanted: GenerationRequest, num_each: int) -> dict[int, str]:
        """The text of the prompt, for each answer; `num_each`: to each prompt. Raises InvalidRequest or Overloaded."""
        most = num_kept_tokens(wanted, model)

        def texts() -> list[str]:
            return [_text_of(prompt, wanted, model, most) for prompt in wanted.prompts]

        prompts = await self._service.offload.run(texts, sum(map(len, wanted.prompts)))
        _check_echo(num_each * sum(map(len, prompts)))
        return {i * num_each + sample: text for i, text in enumerate(prompts) for sample in range(num_each)}

    def _described(self, model: ServedModel) -> dict[str, Any]:
        return {
            "id": model.name,
            "object": "model",
            "created": self._started,
            "owned_by": "baton",
            "root": model.name,
            "parent": None,
            "max_model_len": model.max_model_len,
            "type": "model",
            "display_name": model.name,
            "created_at": datetime.fromtimestamp(self._started, UTC).isoformat(),
        }


def _text_of(prompt: str | tuple[int, ...], wanted: GenerationRequest, model: ServedModel, most: int | None) -> str:
    """A prompt as text; of one that is cut to `most` tokens, the text of these. Raises InvalidRequest."""
    if most is None and isinstance(prompt, str):
        return prompt
    tokens = prompt_tokens(prompt, wanted, model, most)
    is_whole = most is None or len(tokens) < most
    return prompt if is_whole and isinstance(prompt, str) else model.tokenizer.decode(tokens)


def _check_echo(num_chars: int) -> None:
    """Raises InvalidRequest. num_chars: of all answers' echoes."""
    if num_chars > MAX_ECHO_CHARS:
        raise InvalidRequest(f"`echo` would repeat {num_chars} characters, of at most {MAX_ECHO_CHARS}.", "echo")


def chat_shape(
    generation: Generation, model: ServedModel, body: ChatRequest, reading: AnswerReading | None, prompt: str
) -> ChatShape:
    logprobs = ChatLogprobs(model.tokenizer, bool(body.return_tokens_as_token_ids)) if body.logprobs else None
    prompts = prompt_shape(model.tokenizer, body.prompt_logprobs)
    ids = generation.parts[0].request.prompt_tokens if body.return_token_ids else None
    with_reasoning = body.include_reasoning is not False
    text = prompt if body.return_prompt_text else None
    return ChatShape(generation.request_id, model, logprobs, ids, reading, body.echoed, prompts, with_reasoning, text)
