"""Access to the HTTP API: if there are keys, nobody gets in without one."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router.api_keys import ApiKeys, InvalidApiKey
from router.http.errors import error_body, response_to

_HEADER = b"authorization"
_ANTHROPIC_HEADER = b"x-api-key"
_POLICY_VIOLATION = 1008
"""The code of a WebSocket's close."""
ADMIN = "/admin/"
"""Paths below it have keys of their own."""
ALIVE = frozenset({"/health", "/health_generate", "/ping", "/ready"})
"""Paths for load balancers and orchestrators."""


class RequireKey:
    """ASGI middleware. Puts `owner` and `tenant` of ApiKeys, and the owner as `client`, into the request's state."""

    def __init__(self, app: ASGIApp, keys: ApiKeys, open_paths: frozenset[str] = ALIVE) -> None:
        self._app = app
        self._keys = keys
        self._open_paths = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        if scope["type"] not in ("http", "websocket") or path in self._open_paths or path.startswith(ADMIN):
            await self._app(scope, receive, send)
            return
        authorization = authorization_of(scope)
        try:
            owner = self._keys.owner(authorization)
        except InvalidApiKey as error:
            await response_to(error, scope)(scope, receive, send)
            return
        scope["state"].update(owner=owner, tenant=self._keys.tenant(owner), client=owner)

        async def receive_while_valid() -> Message:
            """A WebSocket may outlive its key."""
            message = await receive()
            try:
                self._keys.owner(authorization)
            except InvalidApiKey as error:
                await send({"type": "websocket.close", "code": _POLICY_VIOLATION, "reason": error.message})
                return {"type": "websocket.disconnect", "code": _POLICY_VIOLATION}
            return message

        await self._app(scope, receive_while_valid if scope["type"] == "websocket" else receive, send)


class RefuseOrigins:
    """ASGI middleware. Refuses WebSockets of web pages from other origins than these: browsers open them for any page,
    and ask nobody (CORS does not cover them)."""

    def __init__(self, app: ASGIApp, allowed: Sequence[str]) -> None:
        self._app = app
        self._allowed = frozenset(allowed)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket" and "*" not in self._allowed:
            origin = header_of(scope, b"origin")
            if origin is not None and origin not in self._allowed:
                message = f"The origin {origin[:256]!r} is not allowed (--allowed-origins)."
                await JSONResponse(error_body(scope, 403, message), 403)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def authorization_of(scope: Scope) -> str:
    """The header `Authorization`, or in its absence the key of `x-api-key`, which Anthropic's clients send."""
    given, key = header_of(scope, _HEADER), header_of(scope, _ANTHROPIC_HEADER)
    return f"Bearer {key}" if given is None and key is not None else given or ""


def header_of(scope: Scope, wanted: bytes) -> str | None:
    """The first header of that name, in small letters; None: there is none."""
    for name, value in scope["headers"]:
        if name == wanted:
            return str(value, "latin-1")
    return None
