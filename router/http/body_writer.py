"""Between one answer and its connection: fewer writes to the socket, and a way for a body that takes no coroutine.

Each write to a socket wakes up its reader, so the head of an answer goes out with the first of its body. And ASGI's
`send` goes through each layer of the application, and waits there: for one event that costs more than all else that the
router does for a token. So `router.http.connection` offers a way past it, as an extension of the scope. It also tells,
without a task, that the client has left.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, MutableMapping
from typing import Any

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

_EXTENSION = "baton.body_writer"
_CONTINUE = b"HTTP/1.1 100 "
"""With this begins what a cycle may write before the head."""
_CHUNKED = b"transfer-encoding: chunked\r\n"
"""A cycle writes a body of unknown length in chunks. Clients of HTTP/1.0 do not know them, and must not get any (RFC
9112, section 6.1): for them the body ends with the connection, which a cycle closes."""


class BodyWriter:
    """Stands in for the transport of one answer, whose `cycle` begins, and is in its scope. The head is held back until
    something follows it, at most until the next turn of the event loop. `close`: closes the connection.

    It does not know the cycle, which knows it: each of the two would keep the other, and all of the request with them,
    until garbage is collected. So it forgets `close` with the end of the answer."""

    def __init__(self, cycle: RequestResponseCycle, loop: asyncio.AbstractEventLoop, close: Callable[[], None]) -> None:
        self._flow = cycle.flow
        self._transport = cycle.transport
        self._loop = loop
        self._close = close
        self._head = b""
        self._head_has_come = False
        self._has_left = False
        self._knows_chunks = cycle.scope.get("http_version") != "1.0"
        self._unchunks = False  # this answer, which a cycle writes in chunks
        self._on_resumed: Callable[[], None] | None = None
        self._on_left: Callable[[], None] | None = None
        scope: MutableMapping[str, Any] = cycle.scope  # type: ignore[assignment]  # a TypedDict there
        scope.setdefault("extensions", {})[_EXTENSION] = self
        cycle.transport = self  # type: ignore[assignment]  # as much of a transport as a cycle uses

    # ---- for the answer's body, between its start and its end, which go through `send` ----

    @property
    def is_paused(self) -> bool:
        """Whether the client lags behind with reading: nothing should be written until `on_resumed` is called. One that
        has left lags behind no more, so that what waits for it comes to its end."""
        return self._flow.write_paused and not self._has_left

    def on_resumed(self, call: Callable[[], None]) -> None:
        self._on_resumed = call

    def on_left(self, call: Callable[[], None]) -> None:
        """Have it called once if the client leaves before the answer's end; at once, if it has left."""
        self._on_left = call
        if self._has_left:
            call()

    def write_piece(self, piece: bytes) -> None:
        """A piece that is not empty. It goes nowhere if the client has left."""
        if not self._has_left:
            head, self._head = self._head, b""
            if self._unchunks:
                self._transport.write(head + piece)
                return
            self._transport.write(b"%b%x\r\n%b\r\n" % (head, len(piece), piece))

    # ---- for the cycle, as its transport ----

    def write(self, data: bytes) -> None:
        if not self._head_has_come and not data.startswith(_CONTINUE):
            self._unchunks = not self._knows_chunks and _CHUNKED in data
            self._head, self._head_has_come = data.replace(_CHUNKED, b"") if self._unchunks else data, True
            self._loop.call_soon(self.flush)
        else:
            head, self._head = self._head, b""
            self._transport.write(head + (_content(data) if self._unchunks else data))

    def close(self) -> None:
        self.flush()
        self._close()

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    # ---- for the connection ----

    def flush(self) -> None:
        """Write the head if it still waits for something to follow it. Idempotent."""
        if self._head:
            head, self._head = self._head, b""
            self._transport.write(head)

    def resumed(self) -> None:
        if self._on_resumed is not None:
            self._on_resumed()

    def left(self) -> None:
        self._has_left = True
        self._close = self._transport.close
        if self._on_left is not None:
            self._on_left()
        self.resumed()

    def end(self) -> None:
        """The answer is complete. Forgets whom to call, as a connection keeps its last answer's writer while idle."""
        self.flush()
        self._close = self._transport.close
        self._on_resumed = self._on_left = None


def _content(chunks: bytes) -> bytes:
    """Of what a cycle writes at once: one chunk, the last one, both or nothing."""
    size, _, rest = chunks.partition(b"\r\n")
    return rest[: int(size or b"0", 16)]


def body_writer_of(scope: MutableMapping[str, Any]) -> BodyWriter:
    """The writer of the answer to this request, which `router.http.connection` has put there."""
    writer: BodyWriter = scope["extensions"][_EXTENSION]
    return writer
