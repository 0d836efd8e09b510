"""The HTTP application, put together."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp

import baton
from baton.errors import BatonError
from router.http import errors, openapi
from router.http.generate import GenerateRoutes
from router.http.scope import RequestScope
from router.http.status import StatusRoutes


def create_app(generate: GenerateRoutes, status: StatusRoutes) -> ASGIApp:
    """Without FastAPI's pages of documentation: they fetch scripts from elsewhere, and the API is OpenAI's."""
    app = FastAPI(title="baton", version=baton.__version__, openapi_url=None)
    app.include_router(generate.routes)
    app.include_router(status.routes)
    app.include_router(openapi.routes())
    app.add_exception_handler(BatonError, errors.on_baton_error)
    app.add_exception_handler(HTTPException, errors.on_http_exception)
    app.add_exception_handler(Exception, errors.on_exception)
    return RequestScope(app)
