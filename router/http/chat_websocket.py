"""Chats over a WebSocket: each message is the body of a request; what is answered are the chunks of its stream, and
`[DONE]`. A refusal is OpenAI's error, and ends the answer."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.datastructures import State
from starlette.websockets import WebSocket

from router.generation import Generation
from router.http.body import BodyReader, parse_object, validate_fields
from router.http.chunks import ChunkEvents, event
from router.http.event_stream import EventShape
from router.http.generate import GenerateRoutes, chat_shape
from router.http.limits import HttpLimits
from router.http.schemas import ChatRequest
from router.http.websocket import Session, streamed
from router.service import Service

PATHS = ("/v1/chat/completions", "/ws/chat")


class ChatWebSocket:
    def __init__(self, generate: GenerateRoutes, limits: HttpLimits, service: Service) -> None:
        self._generate = generate
        self._service = service
        self._limits = limits
        self._bodies = BodyReader(limits.bodies, service.offload)
        self.routes = APIRouter()
        for path in PATHS:
            self.routes.add_api_websocket_route(path, self.serve)

    async def serve(self, websocket: WebSocket) -> None:
        await Session(websocket, self, self._limits).run()

    async def start(self, state: State, message: bytes) -> tuple[Generation, EventShape]:
        body = await self._bodies.parsed(
            lambda: validate_fields(streamed(parse_object(message)), ChatRequest), len(message)
        )
        body.check()
        model = self._service.model(body.model)
        body = body.with_num_logprobs(model)
        request_id = body.request_id or state.request_id
        generation, reading, prompt = await self._generate.start_chat(state, request_id, model, body)
        shape = chat_shape(generation, model, body, reading, prompt)
        options = self._generate.forced_options or body.stream_options
        return generation, _Messages(generation, shape, options)

    def refusal(self, body: dict[str, Any], status: int) -> dict[str, Any]:
        return body


class _Messages(ChunkEvents):
    """The chunks of an answer that an error ends: a `[DONE]` would be taken for the end of the next answer."""

    def error(self, body: dict[str, Any]) -> bytes:
        return event(body)
