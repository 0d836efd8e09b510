"""A way from an answer to its connection that takes no coroutine, and tells without a task that the client has left.

ASGI's `send` goes through each layer of the application, and waits there. For one event that costs more than all else
that the router does for a token. So `router.http.connection` offers this beside it, as an extension of the scope.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from typing import Any

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

_EXTENSION = "baton.body_writer"


class BodyWriter:
    """Writes pieces of an answer's body, between its start and its end, which go through `send`."""

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._on_resumed: Callable[[], None] | None = None
        self._on_left: Callable[[], None] | None = None

    @property
    def is_paused(self) -> bool:
        """Whether the client lags behind with reading: nothing should be written until `on_resumed` is called."""
        return self._cycle.flow.write_paused

    def on_resumed(self, call: Callable[[], None]) -> None:
        self._on_resumed = call

    def on_left(self, call: Callable[[], None]) -> None:
        """Have it called once if the client leaves before the answer's end; at once, if it has left."""
        self._on_left = call
        if self._cycle.disconnected:
            call()

    def resumed(self) -> None:
        """For the connection."""
        if self._on_resumed is not None:
            self._on_resumed()

    def left(self) -> None:
        """For the connection."""
        if self._on_left is not None:
            self._on_left()

    def write(self, piece: bytes) -> None:
        """A piece that is not empty. It goes nowhere if the client has left."""
        if not self._cycle.disconnected:
            self._cycle.transport.write(b"%x\r\n%b\r\n" % (len(piece), piece))


def offer(cycle: RequestResponseCycle) -> BodyWriter:
    """Put one into the scope of a request that begins."""
    scope: MutableMapping[str, Any] = cycle.scope  # type: ignore[assignment]  # a TypedDict there
    writer = BodyWriter(cycle)
    scope.setdefault("extensions", {})[_EXTENSION] = writer
    return writer


def body_writer_of(scope: MutableMapping[str, Any]) -> BodyWriter | None:
    """None: the application runs in another server."""
    writer: BodyWriter | None = scope.get("extensions", {}).get(_EXTENSION)
    return writer
