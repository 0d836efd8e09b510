"""Access to the HTTP API: if there are keys, nobody gets in without one."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from router.api_keys import ApiKeys, InvalidApiKey
from router.http.errors import response_to

_HEADER = b"authorization"
_ANTHROPIC_HEADER = b"x-api-key"
ALIVE = frozenset({"/health", "/ping", "/ready"})
"""Paths for load balancers and orchestrators."""


class RequireKey:
    """ASGI middleware. Puts `tenant` (see `router.api_keys.salted`) into the request's state."""

    def __init__(self, app: ASGIApp, keys: ApiKeys, open_paths: frozenset[str] = ALIVE) -> None:
        self._app = app
        self._keys = keys
        self._open_paths = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in self._open_paths:
            try:
                scope["state"]["tenant"] = self._keys.check(_authorization(scope))
            except InvalidApiKey as error:
                await response_to(error, scope)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _authorization(scope: Scope) -> str:
    """The header `Authorization`, or in its absence the key of `x-api-key`, which Anthropic's clients send."""
    given, key = _header(scope, _HEADER), _header(scope, _ANTHROPIC_HEADER)
    return f"Bearer {key}" if given is None and key is not None else given or ""


def _header(scope: Scope, wanted: bytes) -> str | None:
    return next((value.decode("latin-1") for name, value in scope["headers"] if name == wanted), None)
