"""Runs work that would block the event loop on a few threads beside it.

A thread helps only if the work lets other threads run: Python code does, every 5 ms, and so do `tokenizers`' batches.
One long call into C that keeps the interpreter's lock (`json.loads`, `json.dumps`) blocks the loop from any thread.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from baton.errors import Overloaded
from router.refusals import OnRefused, counted, turn, uncounted

T = TypeVar("T")

INLINE_SIZE = 1024
"""Work on so many characters runs on the event loop: it takes less than a millisecond."""
_LARGE = 65_536
_NUM_THREADS = 4
_NUM_LARGE = 2
"""At most so many threads have large work, so that other requests do not wait behind it."""
_MAX_WAIT_S = 60.0


class Offload:
    """A bounded pool: at most `max_size` characters or bytes of work are waiting or under way; now it is `size`."""

    def __init__(self, max_size: int, on_refused: OnRefused = uncounted) -> None:
        self._max_size = max_size
        self._on_refused = on_refused
        self.size = 0
        self._threads = ThreadPoolExecutor(_NUM_THREADS, "offload")
        self._large = asyncio.Semaphore(_NUM_LARGE)

    async def run(self, work: Callable[[], T], size: int) -> T:
        """Returns or raises what `work` does, which handles `size` characters or bytes. Raises Overloaded.

        If the caller is cancelled, the work ends by itself and counts until then.
        """
        if size <= INLINE_SIZE:
            return work()
        if self.size and self.size + size > self._max_size:
            raise counted(Overloaded(f"texts of {self.size} characters are being worked on"), self._on_refused)
        self.size += size
        return await asyncio.shield(asyncio.create_task(self._run(work, size)))

    async def in_thread(self, work: Callable[[], T]) -> T:
        """Returns or raises what `work` does. Never refused: for the answers of requests that were admitted."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def close(self, wait: bool = False) -> None:
        """Drop work that has not begun. wait: return when the threads have ended."""
        self._threads.shutdown(wait=wait, cancel_futures=True)

    async def _run(self, work: Callable[[], T], size: int) -> T:
        try:
            if size <= _LARGE:
                return await self.in_thread(work)
            async with turn(self._large, _MAX_WAIT_S, "long texts have kept others waiting", self._on_refused):
                return await self.in_thread(work)
        finally:
            self.size -= size


class Pauses:
    """For a loop that must run on the event loop: awaiting it lets others run after each 5 ms."""

    def __init__(self) -> None:
        self._since = time.monotonic()

    async def __call__(self) -> None:
        if time.monotonic() - self._since > 0.005:
            await asyncio.sleep(0)
            self._since = time.monotonic()
