"""Log lines: one event per line, `key=value`, each with the ids of the node and the request.

    2026-01-31T12:00:00.123Z level=info node_id=decode-0 request_id=r-17 logger=decode_node.server handoff open peer=p-1

Code logs through stdlib module loggers. The request's id comes from `request_scope` (coroutines of one request) or, if
one thread serves many requests, from `extra={"request_id": ...}`.
"""

from __future__ import annotations

import contextvars
import logging
import sys
from datetime import UTC, datetime
from typing import TextIO

NO_REQUEST = "-"

_request_id: contextvars.ContextVar[str] = contextvars.ContextVar("request_id", default=NO_REQUEST)


class request_scope:  # noqa: N801  (a function to its callers, which `contextmanager` makes three times as slow)
    """Lines logged inside, including by tasks started inside, carry `request_id`."""

    def __init__(self, request_id: str) -> None:
        self._wanted = request_id

    def __enter__(self) -> None:
        self._token = _request_id.set(self._wanted)

    def __exit__(self, *error: object) -> None:
        _request_id.reset(self._token)


def rename_request(request_id: str) -> None:
    """Lines logged from here on to the end of the request's scope carry this `request_id`."""
    _request_id.set(request_id)


def configure_logging(level: int, node_id: str, stream: TextIO | None = None) -> None:
    """Send all loggers of the process to `stream` (default: stderr). Replaces any previous configuration."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(_LineFormatter(node_id))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
    logging.captureWarnings(True)
    # our lines name no thread, process or place in the code: without them, a line takes half the time
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    logging._srcfile = None  # see "Optimization" in Python's documentation of logging


class _LineFormatter(logging.Formatter):
    def __init__(self, node_id: str) -> None:
        super().__init__()
        self._node_id = node_id
        self._second = 0
        self._date = ""

    def format(self, record: logging.LogRecord) -> str:
        second = int(record.created)
        if second != self._second:
            self._second, self._date = second, datetime.fromtimestamp(second, UTC).strftime("%Y-%m-%dT%H:%M:%S")
        request_id = getattr(record, "request_id", None) or _request_id.get()
        milliseconds = int(record.created % 1 * 1000)
        line = (
            f"{self._date}.{milliseconds:03d}Z level={record.levelname.lower()} node_id={self._node_id}"
            f" request_id={_one_line(request_id)} logger={record.name} {_one_line(record.getMessage())}"
        )
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


def _one_line(text: object) -> str:
    """Escape unprintable characters, so that a client's text cannot forge log lines."""
    line = str(text)
    return line if line.isprintable() else "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in line)
