"""Writes the head of an answer together with what follows it, since each write to a socket wakes up its reader."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle


class HeldHead:
    """Stands in for the transport of one answer until its head is written, with the first of its body if that comes
    within the same turn of the event loop."""

    def __init__(self, cycle: RequestResponseCycle, loop: asyncio.AbstractEventLoop) -> None:
        self._cycle = cycle
        self._transport = cycle.transport
        self._loop = loop
        self._head = b""

    def write(self, data: bytes) -> None:
        if not self._cycle.response_started:  # `100 Continue`
            self._transport.write(data)
        elif self._head:
            self._cycle.transport = self._transport
            head, self._head = self._head, b""
            self._transport.write(head + data)
        else:
            self._head = data
            self._loop.call_soon(self.flush)

    def flush(self) -> None:
        """Idempotent."""
        if self._head:
            self.write(b"")

    def close(self) -> None:
        self.flush()
        self._transport.close()

    def is_closing(self) -> bool:
        return self._transport.is_closing()


def hold_head(cycle: RequestResponseCycle, loop: asyncio.AbstractEventLoop) -> None:
    cycle.transport = HeldHead(cycle, loop)  # type: ignore[assignment]  # as much of a transport as a cycle uses


def flush_head(cycle: RequestResponseCycle) -> None:
    """The answer is complete."""
    if isinstance(cycle.transport, HeldHead):
        cycle.transport.flush()
