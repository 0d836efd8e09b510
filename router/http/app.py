"""Puts the HTTP application together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fastapi import APIRouter, FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

import baton
from baton.errors import BatonError
from router.api_keys import ApiKeys
from router.http import docs_page, errors, openapi
from router.http.access import ALIVE, RefuseOrigins, RequireKey
from router.http.admin import AdminRoutes
from router.http.anthropic.routes import MessagesRoutes
from router.http.console import page
from router.http.direct import DirectRoutes
from router.http.generate import GenerateRoutes
from router.http.responses_api.routes import ResponsesRoutes
from router.http.root_path import RootPath
from router.http.scope import RequestScope
from router.http.sglang.routes import SglangRoutes
from router.http.status import StatusRoutes
from router.http.tokenizer_info import TokenizerInfoRoutes
from router.http.tokens.routes import TokensRoutes

_READABLE_HEADERS = ("x-request-id", "request-id", "retry-after", "traceparent")
"""Headers of an answer that web pages may read, beside those that are always readable."""


@dataclass(frozen=True, slots=True)
class Access:
    """Who has access: clients with one of `keys` (None: all clients), and web pages of `origins`. `open_paths` need no
    key, as those for load balancers."""

    keys: ApiKeys | None = None
    protect_metrics: bool = False
    origins: Sequence[str] = ()
    methods: Sequence[str] = ("*",)
    headers: Sequence[str] = ("*",)
    credentials: bool = False
    open_paths: frozenset[str] = frozenset()

    def guard(self, app: ASGIApp) -> ASGIApp:
        """CORS comes outside the keys, because pages ask before they send a key and must be able to read a refusal."""
        if self.keys is not None:
            metrics = frozenset[str]() if self.protect_metrics else frozenset({"/metrics"})
            app = RequireKey(app, self.keys, ALIVE | self.open_paths | metrics)
        if not self.origins:
            return app
        return CORSMiddleware(
            app, self.origins, self.methods, self.headers, self.credentials, expose_headers=_READABLE_HEADERS
        )


def create_app(
    generate: GenerateRoutes,
    messages: MessagesRoutes,
    responses: ResponsesRoutes,
    tokens: TokensRoutes,
    sglang: SglangRoutes,
    websockets: Sequence[APIRouter],
    tokenizer_info: TokenizerInfoRoutes,
    status: StatusRoutes,
    admin: AdminRoutes,
    access: Access,
    traces: bool = False,
    console: bool = False,
    root_path: str = "",
) -> ASGIApp:
    """FastAPI's documentation pages are off, because they fetch scripts from elsewhere and cannot see what the routes
    read; `docs_page` is instead of them. Redirects for missing slashes are off, because they would repeat the host that
    the client named."""
    app = FastAPI(title="baton", version=baton.__version__, openapi_url=None, redirect_slashes=False)
    app.include_router(generate.routes)
    app.include_router(messages.routes)
    app.include_router(responses.routes)
    app.include_router(tokens.routes)
    app.include_router(sglang.routes)
    for routes in websockets:
        app.include_router(routes)
    app.include_router(tokenizer_info.routes)
    app.include_router(status.routes)
    app.include_router(admin.routes)
    app.include_router(openapi.routes(root_path))
    app.include_router(docs_page.routes())
    if console:
        app.include_router(page.routes())
    app.add_exception_handler(BatonError, errors.on_baton_error)
    app.add_exception_handler(HTTPException, errors.on_http_exception)
    app.add_exception_handler(Exception, errors.on_exception)
    posts = {**generate.posts, **messages.posts, **responses.posts, **tokens.posts, **sglang.posts}
    direct = DirectRoutes(RefuseOrigins(app, access.origins), posts)  # none of these paths is a WebSocket's
    whole = RequestScope(access.guard(direct), traces)
    return RootPath(whole, root_path) if root_path else whole
