"""The routes that need the model: chats, completions, models, tokens."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from router.api_keys import salted
from router.ask import Ask
from router.generation import Generation
from router.http.body import read_body
from router.http.limits import Bodies
from router.http.logprobs import token_text
from router.http.responses import EventResponse, WholeResponse
from router.http.schemas import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationFields,
    TokenizeRequest,
)
from router.http.shapes import ChatShape, CompletionShape, Shape
from router.models import ServedModel
from router.service import Service


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """`keep_alive_s`: how often a comment goes out on a stream with nothing to say."""

    bodies: Bodies
    keep_alive_s: float = 5.0


class GenerateRoutes:
    def __init__(self, service: Service, limits: HttpLimits) -> None:
        self._service = service
        self._limits = limits
        self._started = int(time.time())
        self.routes = APIRouter()
        self.routes.add_api_route("/v1/chat/completions", self.chat, methods=["POST"])
        self.routes.add_api_route("/v1/completions", self.completion, methods=["POST"])
        self.routes.add_api_route("/v1/models", self.models, methods=["GET"])
        self.routes.add_api_route("/v1/models/{name:path}", self.model, methods=["GET"])
        self.routes.add_api_route("/tokenize", self.tokenize, methods=["POST"])
        self.routes.add_api_route("/detokenize", self.detokenize, methods=["POST"])

    async def chat(self, request: Request) -> Response:
        body = await read_body(request, ChatRequest, self._limits.bodies)
        body.check()
        model = self._service.models.get(body.model)
        prompt = self._chat_prompt(model, body)
        request_id = request.state.request_id
        shape = ChatShape(request_id, model, bool(body.logprobs), bool(body.return_token_ids))
        return await self._respond(request, model, body, body.ask(request_id, prompt), shape)

    async def completion(self, request: Request) -> Response:
        body = await read_body(request, CompletionRequest, self._limits.bodies)
        body.check()
        model = self._service.models.get(body.model)
        ask = body.ask(request.state.request_id)
        echoes = _echoes(model, ask) if body.echo else {}
        shape = CompletionShape(ask.request_id, model, body.logprobs is not None, bool(body.return_token_ids), echoes)
        return await self._respond(request, model, body, ask, shape)

    async def models(self) -> JSONResponse:
        return JSONResponse({"object": "list", "data": [self._described(self._service.models.get(None))]})

    async def model(self, name: str) -> JSONResponse:
        return JSONResponse(self._described(self._service.models.get(name)))

    async def tokenize(self, request: Request) -> JSONResponse:
        body = await read_body(request, TokenizeRequest, self._limits.bodies)
        model = self._service.models.get(body.model)
        text = body.text if body.messages is None else self._chat_prompt(model, body)
        special = body.messages is None if body.add_special_tokens is None else body.add_special_tokens
        [tokens] = await self._service.tokenize(model, [text], special)
        texts = [token_text(model.tokenizer, token) for token in tokens] if body.return_token_strs else None
        answer = {"count": len(tokens), "max_model_len": model.max_model_len, "tokens": tokens, "token_strs": texts}
        return JSONResponse(answer)

    async def detokenize(self, request: Request) -> JSONResponse:
        body = await read_body(request, DetokenizeRequest, self._limits.bodies)
        model = self._service.models.get(body.model)
        return JSONResponse({"prompt": model.tokenizer.decode(body.tokens, skip_special_tokens=False)})

    async def _respond(
        self, request: Request, model: ServedModel, body: GenerationFields, ask: Ask, shape: Shape
    ) -> Response:
        generation: Generation = await self._service.generate(
            model, salted(ask, request.state.tenant), request.state.received
        )
        if body.stream:
            return EventResponse(generation, shape, body.stream_options, self._limits.keep_alive_s)
        return WholeResponse(generation, shape)

    def _chat_prompt(self, model: ServedModel, body: ChatRequest | TokenizeRequest) -> str:
        messages = [message.plain() for message in body.messages or ()]
        begin = body.add_generation_prompt is not False
        return self._service.render_chat(model, messages, begin, body.chat_template_kwargs)

    def _described(self, model: ServedModel) -> dict[str, Any]:
        return {
            "id": model.name,
            "object": "model",
            "created": self._started,
            "owned_by": "baton",
            "root": model.name,
            "parent": None,
            "max_model_len": model.max_model_len,
        }


def _echoes(model: ServedModel, ask: Ask) -> dict[int, str]:
    """The prompts' texts, for each answer to them."""
    texts = [p if isinstance(p, str) else model.tokenizer.decode(p) for p in ask.prompts]
    return {i * ask.n + sample: text for i, text in enumerate(texts) for sample in range(ask.n)}
