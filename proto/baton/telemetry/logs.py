"""Log lines: one event per line, `key=value`, each with the ids of the node and the request.

    2026-01-31T12:00:00.123Z level=info node_id=decode-0 request_id=r-17 logger=decode_node.server handoff open peer=p-1

A traceback follows its line, indented: no line of it can pass for an event.

Code logs through stdlib module loggers. The request's id comes from `request_scope` (coroutines of one request) or, if
one thread serves many requests, from `extra={"request_id": ...}`. `json_logs` writes the same as JSON.
"""

from __future__ import annotations

import contextvars
import logging
import sys
from typing import TextIO

from baton.log_levels import LogLevels
from baton.process.patient_writer import PatientWriter
from baton.telemetry.json_logs import JsonFormatter, LogFormat, moment

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


def configure_logging(
    levels: LogLevels, node_id: str, stream: TextIO | None = None, log_format: LogFormat = "text"
) -> None:
    """Send all loggers of the process to `stream` (default: stderr). Replaces any previous configuration."""
    handler = _Handler(stream or sys.stderr)
    if log_format == "json":
        handler.setFormatter(JsonFormatter(node_id))
        handler.addFilter(_name_request)
    else:
        handler.setFormatter(_LineFormatter(node_id))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    levels.apply()
    logging.captureWarnings(True)
    # our lines name no thread, process or place in the code: without them, a line takes half the time
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    logging._srcfile = None  # see "Optimization" in Python's documentation of logging


class _Handler(logging.Handler):
    """Says with the next line that is written how many were lost, since nobody read them or the disk was full."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self._out = PatientWriter(stream)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._out.write_or_count(self._line(record), lambda count: self._line(_lost(count)))
        except Exception:  # noqa: BLE001 - what cannot be formatted is told as by all handlers
            self.handleError(record)

    def _line(self, record: logging.LogRecord) -> str:
        return self.format(record) + "\n"


def _lost(count: int) -> logging.LogRecord:
    text = "log lines lost=%d: nobody read them, or the disk was full"
    return logging.LogRecord(__name__, logging.WARNING, "", 0, text, (count,), None)


def _name_request(record: logging.LogRecord) -> bool:
    """Give a record the id of the request in whose scope it was logged."""
    if getattr(record, "request_id", None) is None:
        known = _request_id.get()
        record.request_id = None if known == NO_REQUEST else known
    return True


class _LineFormatter(logging.Formatter):
    def __init__(self, node_id: str) -> None:
        super().__init__()
        self._node_id = node_id

    def format(self, record: logging.LogRecord) -> str:
        request_id = getattr(record, "request_id", None) or _request_id.get()
        line = (
            f"{moment(record.created)} level={record.levelname.lower()} node_id={self._node_id}"
            f" request_id={_one_line(request_id)} logger={record.name} {_one_line(record.getMessage())}"
        )
        if record.exc_info:
            line += "".join(f"\n  {_one_line(part)}" for part in self.formatException(record.exc_info).splitlines())
        return line


def _one_line(text: object) -> str:
    """Escape unprintable characters, so that a client's text cannot forge log lines."""
    line = str(text)
    return line if line.isprintable() else "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in line)
