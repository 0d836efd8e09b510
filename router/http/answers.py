"""JSON answers that may be long."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from fastapi.responses import JSONResponse, Response

from router.offload.threads import INLINE_SIZE, Offload

_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))


async def json_response(make: Callable[[], Any], size: int, offload: Offload) -> Response:
    """The answer that `make` returns, of about `size` numbers or characters. A long one is made on another thread."""
    if size <= INLINE_SIZE:
        return JSONResponse(make())
    return raw_json_response(await offload.in_thread(lambda: dump_json(make())))


def raw_json_response(body: bytes) -> Response:
    return Response(body, media_type="application/json")


def dump_json(content: Any) -> bytes:
    """The same as `json.dumps`, but slower, in Python: on another thread it does not block the event loop."""
    return "".join(_ENCODER.iterencode(content)).encode()
