"""Wraps each HTTP request: its id in headers and log lines, its one line in the log, and the last resort for errors."""

from __future__ import annotations

import logging
import time

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from baton.telemetry import rename_request, request_scope
from baton.telemetry.trace_context import HEADER as TRACE_HEADER
from baton.telemetry.trace_context import begin, trace_scope
from router.http.access import ALIVE
from router.http.errors.anthropic import in_messages_api
from router.request_ids import draw_request_id, is_usable_request_id

log = logging.getLogger(__name__)

HEADER = b"x-request-id"
_ANTHROPIC_HEADER = b"request-id"
_TRACE_HEADER = TRACE_HEADER.encode()
_QUIET = ALIVE | {"/debug/console", "/debug/requests", "/load", "/metrics"}
"""What programs ask for again and again: the console each second."""


class RequestScope:
    """Outermost ASGI application. Puts `request_id`, `is_named` (whether a header gave the id), `received`
    (`time.monotonic`), `owner` and `tenant` (b"" and None if there are no keys), `client` (an address, or with keys the
    owner) and `status` (the answer's; 0: it has not begun) into the request's state. The answer has the `traceparent`
    of a request with a trace: its caller's or, if the router records `traces`, one of its own."""

    def __init__(self, app: ASGIApp, traces: bool = False) -> None:
        self._app = app
        self._traces = traces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await self._websocket(scope, receive, send)
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        received = time.monotonic()
        address = scope["client"]
        named = traceparent = None
        for name, value in scope["headers"]:
            if name == HEADER and named is None:
                named = value.decode("latin-1")
            elif name == _TRACE_HEADER and traceparent is None:
                traceparent = value.decode("latin-1")
        usable = named if named is not None and is_usable_request_id(named) else None
        request_id = usable or draw_request_id()
        state = scope["state"] = {
            **scope.get("state", {}),
            "request_id": request_id,
            "is_named": usable is not None,
            "received": received,
            "owner": b"",
            "tenant": None,
            "client": address and address[0],
            "status": 0,
        }
        names = (HEADER, _ANTHROPIC_HEADER) if in_messages_api(scope["path"]) else (HEADER,)
        trace = begin(traceparent, sampled=self._traces) if self._traces or traceparent is not None else None
        own = () if trace is None else ((_TRACE_HEADER, trace.header.encode()),)

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                state["status"] = message["status"]
                final_id = state["request_id"].encode()
                message["headers"] = [*message.get("headers", ()), *[(name, final_id) for name in names], *own]
            await send(message)

        with request_scope(request_id), trace_scope(trace):
            try:
                await self._app(scope, receive, send_named)
            except Exception:
                log.exception("internal error in %s %s", scope["method"], scope["path"])
            level = logging.DEBUG if scope["path"] in _QUIET else logging.INFO
            took_ms = (time.monotonic() - received) * 1e3
            log.log(level, "%s %s status=%d took_ms=%.1f", scope["method"], scope["path"], state["status"], took_ms)

    async def _websocket(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Its requests have ids and lines of their own."""
        request_id = draw_request_id()
        address = scope["client"]
        scope["state"].update(request_id=request_id, owner=b"", tenant=None, client=address and address[0])
        with request_scope(request_id):
            try:
                await self._app(scope, receive, send)
            except Exception:
                log.exception("internal error in websocket %s", scope["path"])


def request_id_of(request: Request, in_body: str | None) -> str:
    """The request's id once its body is known: the header's, else the body's, else the one drawn. The answer's header
    and the log have it too."""
    state = request.state
    if in_body is not None and not state.is_named:
        state.request_id = in_body
        rename_request(in_body)
    return str(state.request_id)
