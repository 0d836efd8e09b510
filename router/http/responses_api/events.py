"""Streamed responses: numbered events, from `response.created` to `response.completed`, `incomplete` or `failed`."""

from __future__ import annotations

import json
from typing import Any

from router.http.responses_api.output import Event
from router.http.responses_api.shape import ResponseShape
from router.http.responses_api.store import ResponseSaver
from router.text.answer import Delta

_CODES = {"rate_limit_error": "rate_limit_exceeded", "invalid_request_error": "invalid_prompt"}
"""Of a response that failed, by the type of its error; otherwise it is `server_error`."""


class ResponseEvents:
    """One response. `saver` gets it at its end; None: it is not kept."""

    keep_alive = b": keep-alive\n\n"

    def __init__(self, shape: ResponseShape, saver: ResponseSaver | None) -> None:
        self._shape = shape
        self._saver = saver
        self._num_events = 0

    def begin(self) -> bytes:
        begun = self._shape.begun()
        events = ({"type": f"response.{kind}", "response": begun} for kind in ("created", "in_progress"))
        return b"".join(map(self._write, events))

    def delta(self, delta: Delta) -> bytes:
        return b"".join(map(self._write, self._shape.read(delta)))

    def end(self) -> bytes:
        return self._last(self._shape.ended())

    def error(self, body: dict[str, Any]) -> bytes:
        """A failure ends the response, which is not kept."""
        self._saver = None
        return self._last(self._shape.failed(failure_of(body)))

    def _last(self, response: dict[str, Any]) -> bytes:
        if self._saver is not None:
            self._saver.keep(dump_response(response))
        return self._write({"type": f"response.{response['status']}", "response": response})

    def _write(self, event: Event) -> bytes:
        """An event, whose name is its type."""
        numbered = {"type": event["type"], "sequence_number": self._num_events, **event}
        self._num_events += 1
        return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), dump_response(numbered))


def failure_of(body: dict[str, Any]) -> dict[str, Any]:
    """What a response says of the failure that would otherwise have had this body."""
    error = body["error"]
    return {"code": _CODES.get(error["type"], "server_error"), "message": error["message"]}


def dump_response(content: Any) -> bytes:
    return json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode()
