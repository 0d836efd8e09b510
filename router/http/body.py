"""Request bodies: bounded, and validated with errors that name the field."""

from __future__ import annotations

import asyncio
from typing import TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from baton.errors import InvalidRequest, RequestCancelled
from router.admission import Admission
from router.http.errors import describe_validation
from router.http.parse import parse_json
from router.offload import Offload

B = TypeVar("B", bound=BaseModel)

_PATIENCE = 8
"""So many times the limit is read and thrown away: a client that is cut off while it sends does not see why."""
_INLINE_BYTES = 8192
"""Larger bodies are parsed on another thread: half a millisecond, as text or as token ids."""
_BODY_TIMEOUT_S = 120.0


class BodyReader:
    """Reads bodies of at most `max_bytes`; what is coming in counts at `admission`."""

    def __init__(self, max_bytes: int, admission: Admission, offload: Offload) -> None:
        self._max_bytes = max_bytes
        self._admission = admission
        self._offload = offload

    async def read(self, request: Request, kind: type[B]) -> B:
        """The body as `kind`, whatever its content type says. Raises InvalidRequest, Overloaded, HTTPException 413 or
        408, or RequestCancelled for a client that leaves before it has said all."""
        body = bytearray()
        try:
            async with asyncio.timeout(_BODY_TIMEOUT_S):
                size = await self._receive(request, body)
            if size > self._max_bytes:
                raise HTTPException(413, f"The request body is larger than {self._max_bytes} bytes (--max-body-bytes).")
            if size <= _INLINE_BYTES:
                return validate(bytes(body), kind)
            return await self._offload.run(lambda: validate(bytes(body), kind), size)
        except ClientDisconnect:
            raise RequestCancelled("the client left before all of its request had come") from None
        except TimeoutError:
            raise HTTPException(408, f"The request body has not come within {_BODY_TIMEOUT_S:g} s.") from None
        finally:
            self._admission.receive(-len(body))

    async def _receive(self, request: Request, body: bytearray) -> int:
        """Fill `body`, each of whose bytes is counted. Returns the size that it had; too large, it is not kept."""
        size = 0
        async for piece in request.stream():
            size += len(piece)
            if size <= self._max_bytes:
                self._admission.receive(len(piece))
                body += piece
            elif size > _PATIENCE * self._max_bytes:
                break
        return size


def validate(body: bytes, kind: type[B]) -> B:
    """Raises InvalidRequest."""
    content = parse_json(body)
    if not isinstance(content, dict):
        raise InvalidRequest("The request body must be a JSON object.")
    try:
        return kind.model_validate(content)
    except ValidationError as error:
        raise describe_validation(error) from None
