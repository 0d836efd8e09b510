"""Gives every failure the form of its API: OpenAI's, `{"error": {"message", "type", "param", "code"}}`, or Anthropic's
below `/v1/messages`. `error_body` chooses, by the path alone, so that failures before the route have the same form."""

from __future__ import annotations

from collections.abc import MutableMapping
from http import HTTPStatus
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.routing import BaseRoute, Match

from baton.errors import BatonError, InternalError, InvalidRequest
from router.api_keys import InvalidApiKey
from router.http.errors.anthropic import in_messages_api, messages_error
from router.http.errors.responses_api import PreviousResponseNotFound
from router.requests.admission import retry_after_s
from router.text.generation_request import ContextTooLong
from router.text.models import UnknownModel

_METHODS = ("DELETE", "GET", "HEAD", "PATCH", "POST", "PUT")
_RETRYABLE = (429, 503)
_CODES: dict[type[BatonError], str] = {
    UnknownModel: "model_not_found",
    ContextTooLong: "context_length_exceeded",
    InvalidApiKey: "invalid_api_key",
    PreviousResponseNotFound: "previous_response_not_found",
}


Scope = MutableMapping[str, Any]
"""ASGI's scope of the request that failed: its path decides the form."""


def error_body(
    scope: Scope, status: int, message: str, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    if in_messages_api(scope.get("path", "")):
        return messages_error(status, message, scope.get("state", {}).get("request_id"))
    return {"error": {"message": message, "type": _type_of(status), "param": param, "code": code}}


def _type_of(status: int) -> str:
    if status == 429:
        return "rate_limit_error"
    return "invalid_request_error" if status < 500 else "server_error"


def body_of(error: BatonError, scope: Scope) -> dict[str, Any]:
    code = _CODES.get(type(error)) or error.code_name
    param = error.param if isinstance(error, InvalidRequest) else None
    return error_body(scope, error.http_status, error.message, param, code)


def response_to(error: BatonError, scope: Scope) -> JSONResponse:
    """The error's HTTP status, with Retry-After if a retry may succeed, and WWW-Authenticate if a key is missing."""
    headers = {}
    if error.http_status in _RETRYABLE:
        headers["retry-after"] = str(retry_after_s(error))
    elif error.http_status >= 500:
        headers["x-should-retry"] = "false"  # OpenAI's clients come again after any 5xx, with what two nodes died of
    if error.http_status == 401:
        headers["www-authenticate"] = "Bearer"
    return JSONResponse(body_of(error, scope), error.http_status, headers)


def describe_validation(error: ValidationError) -> InvalidRequest:
    """The first problem of a body, in one sentence that names the field."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    text = first["msg"].removeprefix("Value error, ")
    where = ".".join(str(part) for part in first["loc"])
    return InvalidRequest(f"{where}: {text}" if where else text, str(first["loc"][0]) if first["loc"] else None)


async def on_baton_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, BatonError)
    return response_to(error, request.scope)


async def on_http_exception(request: Request, error: Exception) -> JSONResponse:
    """Unknown paths and methods, for which Starlette only repeats the status, and what says more itself, as of bodies
    that are too large. Avoids `request.url`, since Host may be garbage."""
    assert isinstance(error, HTTPException)
    message = error.detail
    if message == HTTPStatus(error.status_code).phrase:
        path = request.scope["path"]
        unknown = {404: f"There is nothing at {path}.", 405: f"{request.method} is not allowed at {path}."}
        message = unknown.get(error.status_code, message)
    body = error_body(request.scope, error.status_code, message)
    headers = {"allow": _allowed(request)} if error.status_code == 405 else error.headers
    return JSONResponse(body, error.status_code, headers)


def _allowed(request: Request) -> str:
    """The methods of the path. Starlette names those of its first route only."""
    routes: list[BaseRoute] = request.app.routes
    scopes = {method: {**request.scope, "method": method} for method in _METHODS}
    full = (m for m, scope in scopes.items() if any(route.matches(scope)[0] is Match.FULL for route in routes))
    return ", ".join(full)


async def on_exception(request: Request, error: Exception) -> JSONResponse:
    """Our own mistake. Logged where the request's id is known."""
    return response_to(InternalError(f"internal error: {type(error).__name__}"), request.scope)
