"""W3C trace context: the header `traceparent`, by which spans of several services become one trace.

https://www.w3.org/TR/trace-context/: version 00 is `00-{trace id}-{parent span id}-{flags}`, in lower-case hexadecimal
digits. Later versions may append fields, which are ignored.
"""

from __future__ import annotations

import contextvars
import re
import secrets
from dataclasses import dataclass

HEADER = "traceparent"
_current: contextvars.ContextVar[TraceContext | None] = contextvars.ContextVar("trace", default=None)
_FORM = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_SAMPLED = 1


@dataclass(frozen=True, slots=True)
class TraceContext:
    """`span_id`: of this request's own span; `parent_id`: of the caller's, 0 if it sent none. `sampled`: whether spans
    are to be recorded."""

    trace_id: int
    span_id: int
    parent_id: int = 0
    sampled: bool = True

    @property
    def header(self) -> str:
        """The `traceparent` of this request, for those that it is passed on to."""
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-{int(self.sampled):02x}"


def begin(given: str | None, sampled: bool = True) -> TraceContext:
    """The context of a request with that header. One that is absent or malformed begins a new trace, as the standard
    asks for; `sampled`: whether new ones are recorded."""
    found = _FORM.fullmatch(given.strip()) if given else None
    if found is None or found[1] == "ff" or (found[1] == "00" and found[5]):
        return TraceContext(_draw(128), draw_span_id(), sampled=sampled)
    trace_id, parent_id = int(found[2], 16), int(found[3], 16)
    if not trace_id or not parent_id:
        return TraceContext(_draw(128), draw_span_id(), sampled=sampled)
    return TraceContext(trace_id, draw_span_id(), parent_id, bool(int(found[4], 16) & _SAMPLED))


def _draw(bits: int) -> int:
    """Never 0, which stands for no id."""
    return secrets.randbits(bits) or 1


class trace_scope:  # noqa: N801  (a function to its callers, which `contextmanager` makes three times as slow)
    """What runs inside, and tasks that are started inside, serve a request of that trace."""

    def __init__(self, trace: TraceContext | None) -> None:
        self._trace = trace

    def __enter__(self) -> None:
        self._token = _current.set(self._trace)

    def __exit__(self, *error: object) -> None:
        _current.reset(self._token)


def current_trace() -> TraceContext | None:
    return _current.get()


def draw_span_id() -> int:
    return _draw(64)
