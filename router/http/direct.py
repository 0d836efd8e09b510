"""Calls the handlers of the busiest paths past the framework.

FastAPI takes a request through nine layers, matches its path against each route's pattern and looks for parameters that
our handlers do not have: a quarter of what a request costs the router. Its routes for these paths remain, for other
methods, and errors have the same handlers.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from fastapi import Request
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from baton.errors import BatonError
from router.http.errors import on_baton_error, on_exception, on_http_exception

Handler = Callable[[Request], Awaitable[Response]]


class DirectRoutes:
    """ASGI middleware within a RequestScope. `posts`: handlers of POST requests, by path."""

    def __init__(self, app: ASGIApp, posts: Mapping[str, Handler]) -> None:
        self._app = app
        self._posts = posts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        handler = self._posts.get(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
        if handler is None:
            await self._app(scope, receive, send)
            return
        request = Request(scope, receive, send)
        try:
            try:
                response = await handler(request)
            except BatonError as error:
                response = await on_baton_error(request, error)
            except HTTPException as error:
                response = await on_http_exception(request, error)
            await response(scope, receive, send)
        except Exception as error:
            if not scope["state"]["status"]:
                await (await on_exception(request, error))(scope, receive, send)
            raise  # logged where the request's id is known
