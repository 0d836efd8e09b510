"""The routes of tokens: answers, and what chats and completions become as requests of tokens."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import Response

from baton.errors import InvalidRequest
from router.http.answers import dump_json, raw_json_response
from router.http.body import BodyReader
from router.http.chunks import ChunkEvents
from router.http.errors.names import rename_field
from router.http.generate import GenerateRoutes
from router.http.limits import HttpLimits
from router.http.logprobs import prompt_shape
from router.http.responses import EventResponse, WholeResponse
from router.http.schemas import ChatRequest, CompletionRequest
from router.http.scope import request_id_of
from router.http.tokens.rendered import check_renderable, rendered
from router.http.tokens.schemas import TokensRequest
from router.http.tokens.shape import TokensShape
from router.requests.admission import Admitted
from router.service import Service
from router.text.call_plan import NO_CALLS
from router.text.constraints import naming_constraint
from router.text.generation_request import GenerationRequest

PATH = "/inference/v1/generate"
RENDERED_CHAT = "/v1/chat/completions/render"
RENDERED_COMPLETION = "/v1/completions/render"
_NAMES = {"prompt": "token_ids"}


class TokensRoutes:
    """`generate`: the routes of chats."""

    def __init__(self, service: Service, limits: HttpLimits, generate: GenerateRoutes) -> None:
        self._service = service
        self._generate = generate
        self._keep_alive_s = limits.keep_alive_s
        self._bodies = BodyReader(limits.bodies, service.offload)
        self.routes = APIRouter()
        self.posts = {PATH: self.tokens}
        self.routes.add_api_route(PATH, self.tokens, methods=["POST"])
        self.routes.add_api_route(RENDERED_CHAT, self.render_chat, methods=["POST"])
        self.routes.add_api_route(RENDERED_COMPLETION, self.render_completion, methods=["POST"])

    async def tokens(self, request: Request) -> Response:
        body = await self._bodies.read(request, TokensRequest)
        body.check()
        model = self._service.model(body.model)
        body = body.with_num_logprobs(model)
        state = request.state
        wanted = body.wanted(request_id_of(request, body.request_id))
        try:
            with (
                self._service.admit(model, [len(body.token_ids)], wanted.n) as admitted,
                naming_constraint(NO_CALLS, body.constraint),
            ):
                generation = await self._service.generate(
                    model, (wanted,), state.received, admitted, state.client, state.tenant
                )
        except InvalidRequest as error:
            rename_field(error, _NAMES)
            raise
        prompts = prompt_shape(model.tokenizer, body.sampling.prompt_logprobs)
        shape = TokensShape(wanted.request_id, model, body.sampling.num_top, prompts)
        if body.stream:
            events = ChunkEvents(generation, shape, self._generate.forced_options or body.stream_options)
            return EventResponse(generation, events, self._keep_alive_s)
        return WholeResponse(generation, shape, self._service.offload)

    async def render_chat(self, request: Request) -> Response:
        body = await self._bodies.read(request, ChatRequest)
        body.check()
        check_renderable(body)
        model = self._service.models.get(body.model)
        body = body.with_num_logprobs(model)
        request_id = f"chatcmpl-{request_id_of(request, body.request_id)}"

        async def render(wanted: GenerationRequest, _: Admitted) -> bytes:
            (tokens,) = await self._service.tokenize(model, wanted)
            return await self._service.offload.run(
                lambda: dump_json(rendered(request_id, model, body, wanted, tokens)), len(tokens)
            )

        answer, _, _ = await self._generate.with_chat(request_id, model, body, render)
        return raw_json_response(answer)

    async def render_completion(self, request: Request) -> Response:
        body = await self._bodies.read(request, CompletionRequest)
        body.check()
        check_renderable(body)
        model = self._service.models.get(body.model)
        body = body.with_num_logprobs(model)
        request_id = f"cmpl-{request_id_of(request, body.request_id)}"
        wanted = body.wanted(request_id)
        with self._service.admit(model, [len(prompt) for prompt in wanted.prompts]):
            prompts = await self._service.tokenize(model, wanted)

            def answer() -> bytes:
                named = enumerate(prompts)
                return dump_json([rendered(f"{request_id}-{i}", model, body, wanted, tokens) for i, tokens in named])

            return raw_json_response(await self._service.offload.run(answer, sum(map(len, prompts))))
