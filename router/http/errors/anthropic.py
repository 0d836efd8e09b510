"""Anthropic's form of a failure: `{"type": "error", "error": {"type", "message"}, "request_id"}`."""

from __future__ import annotations

from typing import Any

PATH = "/v1/messages"

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}


def in_messages_api(path: str) -> bool:
    """Whether the path is one of the Messages API, or would be if it existed."""
    return path == PATH or path.startswith(f"{PATH}/")


def messages_error(status: int, message: str, request_id: str | None) -> dict[str, Any]:
    error = {"type": _type_of(status), "message": message}
    return {"type": "error", "error": error, "request_id": request_id}


def _type_of(status: int) -> str:
    return _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
