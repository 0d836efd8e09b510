"""The Responses API over a WebSocket, as OpenAI's clients speak it in `client.responses.connect()`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter
from starlette.datastructures import State
from starlette.websockets import WebSocket

from baton.errors import InvalidRequest
from router.generation import Generation
from router.http.body import BodyReader, parse_object, validate_fields
from router.http.event_stream import EventShape
from router.http.limits import HttpLimits
from router.http.responses_api.routes import PATH, ResponsesRoutes
from router.http.responses_api.schemas import ResponsesRequest
from router.http.responses_api.store import ResponseStore
from router.http.websocket import Session, streamed
from router.offload.threads import Offload

_CREATE = "response.create"


class ResponsesWebSocket:
    def __init__(self, responses: ResponsesRoutes, limits: HttpLimits, offload: Offload) -> None:
        self._responses = responses
        self._limits = limits
        self._offload = offload
        self.routes = APIRouter()
        self.routes.add_api_websocket_route(PATH, self.serve)

    async def serve(self, websocket: WebSocket) -> None:
        bodies = BodyReader(self._limits.bodies, self._offload)
        last = ResponseStore(max_responses=1, max_bytes=self._limits.bodies.max_bytes)
        await Session(websocket, _Requests(self._responses, bodies, last), self._limits).run()


@dataclass(frozen=True, slots=True)
class _Requests:
    """Those of one socket. `response.create` begins a response; what is answered are the events of a stream. A refusal
    is an `error`. `last`: keeps the last response with `store` false, so that the next can go on from it."""

    responses: ResponsesRoutes
    bodies: BodyReader
    last: ResponseStore

    async def start(self, state: State, message: bytes) -> tuple[Generation, EventShape]:
        body = await self.bodies.parsed(lambda: _create(message), len(message))
        started = await self.responses.start(state, body.request_id or state.request_id, body, self.last)
        return started.generation, started.events()

    def refusal(self, body: dict[str, Any], status: int) -> dict[str, Any]:
        return {"type": "error", "status": status, **body}


def _create(message: bytes) -> ResponsesRequest:
    content = streamed(parse_object(message))
    kind = content.pop("type", None)
    if kind != _CREATE:
        shown = repr(kind[:64]) if isinstance(kind, str) else "unknown"
        raise InvalidRequest(f"A message of type {shown} is not supported here: '{_CREATE}' is.", "type")
    return validate_fields(content, ResponsesRequest)
