"""Request bodies: bounded, and validated with errors that name the field."""

from __future__ import annotations

from typing import TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from baton.errors import RequestCancelled
from router.http.errors import describe_validation

B = TypeVar("B", bound=BaseModel)

_PATIENCE = 8
"""So many times the limit is read and thrown away: a client that is cut off while it sends does not see why."""


async def read_body(request: Request, kind: type[B], max_bytes: int) -> B:
    """The body as `kind`, whatever its content type says. Raises InvalidRequest, HTTPException 413, or RequestCancelled
    for a client that leaves before it has said all."""
    body = bytearray()
    size = 0
    try:
        async for piece in request.stream():
            size += len(piece)
            if size <= max_bytes:
                body += piece
            elif size > _PATIENCE * max_bytes:
                break
    except ClientDisconnect:
        raise RequestCancelled("the client left before all of its request had come") from None
    if size > max_bytes:
        raise HTTPException(413, f"The request body is larger than {max_bytes} bytes.")
    try:
        return kind.model_validate_json(bytes(body))
    except ValidationError as error:
        raise describe_validation(error) from None
