"""Reads request bodies within limits, and validates them with errors that name the field."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException

from baton.errors import InvalidRequest, RequestCancelled
from router.http.access import header_of
from router.http.errors import describe_validation
from router.http.limits import Bodies
from router.http.parse import parse_json
from router.offload.threads import Offload

B = TypeVar("B", bound=BaseModel)

_INLINE_BYTES = 8192
"""Larger bodies are parsed on another thread. This one takes half a millisecond, as text or as token ids."""

_MAX_DIGITS = 19
"""Of a number of 64 bits. (`int` refuses thousands of zeros.)"""


class BodyReader:
    """Reads bodies within the limits of `bodies`."""

    def __init__(self, bodies: Bodies, offload: Offload) -> None:
        self._bodies = bodies
        self._offload = offload

    async def read(self, request: Request, kind: type[B]) -> B:
        """The body as `kind`, whatever its content type says. Raises InvalidRequest, Overloaded, HTTPException 413, or
        RequestCancelled if the client leaves before it has sent everything."""
        announced = header_of(request.scope, b"content-length") or "0"  # digits: the parser has seen to it
        if len(announced) > _MAX_DIGITS or int(announced) > self._bodies.max_bytes:
            raise self._too_large()
        body, more = bytearray(), True
        try:
            while more:
                message = await request.receive()
                if message["type"] == "http.disconnect":
                    raise RequestCancelled("the client left before all of its request had come")
                piece, more = message.get("body", b""), message.get("more_body", False)
                if len(body) + len(piece) > self._bodies.max_bytes:
                    raise self._too_large()
                self._bodies.take(len(piece))
                body += piece
            return await self.parsed(lambda: validate(bytes(body), kind), len(body))
        finally:
            self._bodies.give_back(len(body))

    async def parsed(self, parse: Callable[[], B], num_bytes: int) -> B:
        """What `parse` makes of so many bytes, on another thread if they are many. Raises what it raises, or
        Overloaded."""
        return parse() if num_bytes <= _INLINE_BYTES else await self._offload.run(parse, num_bytes)

    def _too_large(self) -> HTTPException:
        most = self._bodies.max_bytes
        return HTTPException(413, f"The request body is larger than {most} bytes (--max-body-bytes).")


def validate(body: bytes, kind: type[B]) -> B:
    """Raises InvalidRequest."""
    return validate_fields(parse_object(body), kind)


def parse_object(body: bytes) -> dict[str, Any]:
    """Raises InvalidRequest."""
    content = parse_json(body)
    if not isinstance(content, dict):
        raise InvalidRequest("The request body must be a JSON object.")
    return content


def validate_fields(content: dict[str, Any], kind: type[B]) -> B:
    """Raises InvalidRequest."""
    try:
        return kind.model_validate(content)
    except ValidationError as error:
        raise describe_validation(error) from None
