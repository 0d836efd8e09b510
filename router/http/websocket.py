"""Serves requests that come as messages over a WebSocket: one after another, each answered with messages."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from starlette.datastructures import State
from starlette.websockets import WebSocket, WebSocketDisconnect

from baton.errors import BatonError, InvalidRequest, Overloaded, RequestCancelled
from baton.rpc.silence import until_silent
from baton.telemetry import request_scope
from router.generation import Generation
from router.http.errors import body_of
from router.http.event_stream import EventShape
from router.http.limits import Bodies, HttpLimits
from router.request_ids import draw_request_id
from router.text.answer import Delta

log = logging.getLogger(__name__)

NORMAL = 1000
POLICY_VIOLATION = 1008
SERVICE_RESTART = 1012
TRY_AGAIN_LATER = 1013
"""Codes of closes."""
_MAX_WAITING = 4
"""Messages that may wait behind the one being answered."""
_DATA = b"data: "


@dataclass(slots=True)
class WebSocketState:
    """What connection and application tell each other. `busy`: an answer is under way. `closing`: no other request will
    be answered."""

    busy: bool = False
    closing: bool = False


class Requests(Protocol):
    """Requests of one kind."""

    async def start(self, state: State, message: bytes) -> tuple[Generation, EventShape]:
        """Start the request of a message, with a state like that of an HTTP request. Raises BatonError."""
        ...

    def refusal(self, body: dict[str, Any], status: int) -> dict[str, Any]:
        """The message in place of an answer. `body` and `status`: of the same refusal over HTTP."""
        ...


class Session:
    """One client's WebSocket, open for at most `websocket_idle_s` of `limits` without a request."""

    def __init__(self, websocket: WebSocket, requests: Requests, limits: HttpLimits) -> None:
        self._websocket = websocket
        self._requests = requests
        self._idle_s = limits.websocket_idle_s
        self._inbox = _Inbox(websocket, limits.bodies)
        self._state: WebSocketState = websocket.state.websocket

    async def run(self) -> None:
        await self._websocket.accept()
        reading = asyncio.create_task(self._inbox.read())
        try:
            with contextlib.suppress(WebSocketDisconnect):
                await self._websocket.close(*await self._serve())
        finally:
            reading.cancel()
            self._inbox.drop()

    async def _serve(self) -> tuple[int, str]:
        """Answer requests until there will be no more; returns code and reason. Raises WebSocketDisconnect."""
        while (message := await self._inbox.next(self._idle_s)) is not None:
            self._state.busy = True
            await self._answer(message)
            self._state.busy = False
            if self._state.closing:
                return SERVICE_RESTART, "the server stops"
        return self._inbox.refusal or (NORMAL, f"no request for {self._idle_s:g} s")

    async def _answer(self, message: bytes) -> None:
        began = time.monotonic()
        request_id = draw_request_id()
        own = self._websocket.state
        client = {"owner": own.owner, "tenant": own.tenant, "client": own.client}
        state = State({"request_id": request_id, "received": began, **client})
        with request_scope(request_id):
            status = await self._run(state, message)
            took_ms = (time.monotonic() - began) * 1e3
            log.info("websocket %s status=%d took_ms=%.1f", self._websocket.scope["path"], status, took_ms)

    async def _run(self, state: State, message: bytes) -> int:
        try:
            generation, events = await self._requests.start(state, message)
        except BatonError as error:
            return await self._refuse(error)
        with self._inbox.closing(generation):
            try:
                deltas = await generation.next()
            except BatonError as error:
                return await self._refuse(error)
            try:
                await self._stream(generation, events, deltas)
                tail, status = events.end(), 200
            except BatonError as error:
                tail, status = events.error(body_of(error, self._websocket.scope)), error.http_status
            await self._send(tail)
            return status

    async def _stream(self, generation: Generation, events: EventShape, deltas: list[Delta]) -> None:
        await self._send(events.begin())
        while True:
            done = generation.done
            for delta in deltas:
                await self._send(events.delta(delta))
            if done:
                return
            deltas = await generation.next()

    async def _send(self, body: bytes) -> None:
        """Server-sent events, as messages: the data of each. Waits for a client that does not read."""
        for line in body.split(b"\n"):
            if line.startswith(_DATA):
                await self._websocket.send_text(line.removeprefix(_DATA).decode())

    async def _refuse(self, error: BatonError) -> int:
        if isinstance(error, RequestCancelled):  # the client has left
            return error.http_status
        content = self._requests.refusal(body_of(error, self._websocket.scope), error.http_status)
        await self._websocket.send_text(json.dumps(content, ensure_ascii=False, separators=(",", ":")))
        return error.http_status


def streamed(content: dict[str, Any]) -> dict[str, Any]:
    """The body of a request for a stream: there is nothing else over a WebSocket. Raises InvalidRequest."""
    if content.get("stream") is False:
        raise InvalidRequest("Over a WebSocket everything is streamed: `stream` cannot be false.", "stream")
    return {**content, "stream": True}


class _Inbox:
    """Takes messages when they come, so that a client that leaves is noticed while its request runs. Those that wait
    count as `bodies`. `refusal`: with what code and reason the client is sent away; None: it is not."""

    def __init__(self, websocket: WebSocket, bodies: Bodies) -> None:
        self._websocket = websocket
        self._bodies = bodies
        self._waiting = deque[bytes]()
        self._news = asyncio.Event()
        self._leave: Callable[[], None] | None = None
        self._has_left = False
        self.refusal: tuple[int, str] | None = None

    async def read(self) -> None:
        """Until the client leaves, or sends too much."""
        while (message := await self._websocket.receive())["type"] != "websocket.disconnect":
            text = message.get("text")
            self.refusal = self._keep(message["bytes"] if text is None else text.encode())
            if self.refusal:
                break
            self._news.set()
        self._has_left = not self.refusal
        self._news.set()
        if self._leave is not None:
            self._leave()

    async def next(self, timeout_s: float) -> bytes | None:
        """None if nothing came for so long, or too much. Raises WebSocketDisconnect."""
        try:
            async with until_silent(timeout_s):
                while not (self._waiting or self._has_left or self.refusal):
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError:
            return None
        if self._has_left:
            raise WebSocketDisconnect
        return None if self.refusal else self._taken()

    def drop(self) -> None:
        """Forget what waits."""
        while self._waiting:
            self._taken()

    def _keep(self, message: bytes) -> tuple[int, str] | None:
        """Have a message wait; returns why not."""
        if len(self._waiting) >= _MAX_WAITING:
            return POLICY_VIOLATION, f"more than {_MAX_WAITING} requests are waiting"
        try:
            self._bodies.take(len(message))
        except Overloaded as error:
            return TRY_AGAIN_LATER, error.message
        self._waiting.append(message)
        return None

    def _taken(self) -> bytes:
        message = self._waiting.popleft()
        self._bodies.give_back(len(message))
        return message

    @contextlib.contextmanager
    def closing(self, generation: Generation) -> Iterator[None]:
        """Within the context, the generation is closed as soon as the client leaves; at its end, in any case."""
        self._leave = generation.close
        try:
            if self._has_left or self.refusal:
                generation.close()
            yield
        finally:
            self._leave = None
            generation.close()
