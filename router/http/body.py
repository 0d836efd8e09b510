"""Request bodies: bounded, and validated with errors that name the field."""

from __future__ import annotations

from typing import TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from baton.errors import RequestCancelled
from router.http.errors import describe_validation
from router.http.limits import Bodies

B = TypeVar("B", bound=BaseModel)

_MAX_DIGITS = 19
"""Of 64 bits. `int` refuses thousands of zeros."""


async def read_body(request: Request, kind: type[B], bodies: Bodies) -> B:
    """The body as `kind`, whatever its content type says. Raises InvalidRequest, Overloaded, HTTPException 413, or
    RequestCancelled for a client that leaves before it has said all."""
    announced = request.headers.get("content-length", "0")  # digits: the parser has seen to it
    if len(announced) > _MAX_DIGITS or int(announced) > bodies.max_bytes:
        raise _too_large(bodies)
    body = bytearray()
    with bodies.reading() as take:
        try:
            async for piece in request.stream():
                if len(body) + len(piece) > bodies.max_bytes:
                    raise _too_large(bodies)
                take(len(piece))
                body += piece
        except ClientDisconnect:
            raise RequestCancelled("the client left before all of its request had come") from None
        try:
            return kind.model_validate_json(bytes(body))
        except ValidationError as error:
            raise describe_validation(error) from None


def _too_large(bodies: Bodies) -> HTTPException:
    return HTTPException(413, f"The request body is larger than {bodies.max_bytes} bytes.")
