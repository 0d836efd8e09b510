"""Log lines as JSON objects, one a line, for programs that collect them (`--log-format json`).

    {"time": "2026-01-31T12:00:00.123Z", "level": "info", "node_id": "router-8000", "request_id": "r-17", ...}

Every line has the fields above, `logger` and `message`; `trace_id`, if it is about a request with one; `exception`; and
what the code passes as `extra={"fields": ...}`: values, or a function that makes them only if they are written.
"""

from __future__ import annotations

import functools
import json
import logging
from datetime import UTC, datetime
from typing import Any, Literal

from baton.telemetry.trace_context import current_trace

LogFormat = Literal["text", "json"]


def moment(seconds: float) -> str:
    """The time of day, in UTC, to the millisecond."""
    return f"{_second(int(seconds))}.{int(seconds % 1 * 1000):03d}Z"


@functools.lru_cache(maxsize=1)
def _second(second: int) -> str:
    """Many lines fall into one second, and to write it takes longer than the rest of a line."""
    return datetime.fromtimestamp(second, UTC).strftime("%Y-%m-%dT%H:%M:%S")


class JsonFormatter(logging.Formatter):
    """`request_id` says of which request a record is."""

    def __init__(self, node_id: str) -> None:
        super().__init__()
        self._node_id = node_id

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": moment(record.created),
            "level": record.levelname.lower(),
            "node_id": self._node_id,
            "request_id": getattr(record, "request_id", None),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if (trace := current_trace()) is not None:
            line["trace_id"] = f"{trace.trace_id:032x}"
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        fields = getattr(record, "fields", None)
        if fields is not None:
            line |= fields() if callable(fields) else fields
        return json.dumps(line, default=str)
