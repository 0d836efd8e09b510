"""Server-sent events of one generation, written as its deltas come.

No task wakes up for a token: the generation calls `_deliver` in its turn, which renders what has come and writes it.
The task sleeps until the end, but for signs of life.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Protocol

from router.generation import Generation
from router.http.body_writer import BodyWriter
from router.text.answer import Delta


class EventShape(Protocol):
    """One request's answer as server-sent events, each function giving none or more of them. `keep_alive` is what is
    sent while there is nothing else."""

    keep_alive: bytes

    def begin(self) -> bytes: ...

    def delta(self, delta: Delta) -> bytes: ...

    def end(self) -> bytes:
        """After the last delta of all answers, when usage and timings are final."""
        ...

    def error(self, body: dict[str, Any]) -> bytes:
        """In place of `end`, if the generation fails."""
        ...


class EventStream:
    """Writes the events of `shape` but for the tail, until the generation is over."""

    def __init__(self, generation: Generation, shape: EventShape, writer: BodyWriter) -> None:
        self._generation = generation
        self._shape = shape
        self._writer = writer
        self._loop = asyncio.get_running_loop()
        self._over: asyncio.Future[None] = self._loop.create_future()
        self._written_at = 0.0
        self._keep_alive_s = 0.0
        self._timer: asyncio.TimerHandle
        self.rest = b""
        """What came last, with the generation's end. The caller writes it with the tail: one write for both."""

    async def run(self, deltas: Sequence[Delta], keep_alive_s: float) -> None:
        """Begin with `deltas`; if there are none, with a sign of life. Raises what the generation fails with."""
        head = self._shape.begin()
        body = b"".join(map(self._shape.delta, deltas))
        if not deltas and not self._generation.is_over:
            body = self._shape.keep_alive
        if self._generation.is_over:
            self.rest = head + body
            self._generation.raise_error()
            return
        self._keep_alive_s, self._written_at = keep_alive_s, self._loop.time()
        self._write(head + body)
        self._writer.on_resumed(self._generation.tell)
        self._generation.listen(self._deliver)
        self._timer = self._loop.call_at(self._written_at + keep_alive_s, self._watch)
        try:
            await self._over
        finally:
            self._generation.listen(None)
            self._timer.cancel()
        self._generation.raise_error()

    def _deliver(self) -> None:
        """Write what has come, unless the client lags behind: then it waits until the connection is writable again."""
        if self._over.done() or self._writer.is_paused:
            return
        try:
            deltas = self._generation.take_waiting()
            body = self._shape.delta(deltas[0]) if len(deltas) == 1 else b"".join(map(self._shape.delta, deltas))
            if self._generation.is_over:
                self.rest = body
                self._over.set_result(None)
            else:
                self._write(body)
        except Exception as error:  # noqa: BLE001  (raised in the task, which is the request's boundary)
            self._over.set_exception(error)

    def _watch(self) -> None:
        """Show a sign of life if nothing was written for long, and look again when there may have to be one."""
        now = self._loop.time()
        if now >= self._written_at + self._keep_alive_s:
            self._written_at = now
            if not self._writer.is_paused:
                self._write(self._shape.keep_alive)
        self._timer = self._loop.call_at(self._written_at + self._keep_alive_s, self._watch)

    def _write(self, body: bytes) -> None:
        if body:
            self._written_at = self._loop.time()
            self._writer.write_piece(body)
