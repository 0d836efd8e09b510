"""Detects a silent peer, or a client that does not go on, with a clock that runs only while this process is listening.

A process that stalled (a blocked event loop, a stopped or swapped-out process) received nothing, and must not conclude
that its peers are silent. Silence is therefore counted in slices, each of which counts once however long it took. After
a stall of a minute, a peer has been silent for one more slice, and its messages of that minute are read before the next
slice ends (the local health awareness of Lifeguard, Dadgar, Phillips and Currey 2018, arXiv 1707.00788).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

NUM_SLICES = 10


class SilenceWatch:
    """Calls `silent` once `heard` has not been called for NUM_SLICES slices. `was_heard`: asked at the end of each
    slice, about a peer whose signs of life nobody is told of. Asyncio thread only."""

    def __init__(
        self, limit_s: float, silent: Callable[[], object], was_heard: Callable[[], bool] = lambda: False
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._silent: Callable[[], object] | None = silent
        self._was_heard = was_heard
        self._slice_s = limit_s / NUM_SLICES
        self._num_silent = 0
        self._timer = self._loop.call_later(self._slice_s, self._slice_ended)

    def heard(self) -> None:
        """The peer sent something. Called for each message, at almost no cost."""
        self._num_silent = 0

    def limit(self, limit_s: float) -> None:
        """From the next slice on, wait for so many seconds."""
        self._slice_s = limit_s / NUM_SLICES

    def cancel(self) -> None:
        """Idempotent. Also forgets `silent`, which may know the task that watches. A task that ends with an error would
        else be in a cycle with its own traceback, and keep the call that it reads, with its connection, until garbage
        is collected."""
        self._timer.cancel()
        self._silent = None

    def _slice_ended(self) -> None:
        self._num_silent = 0 if self._was_heard() else self._num_silent + 1
        if self._num_silent < NUM_SLICES:
            self._timer = self._loop.call_later(self._slice_s, self._slice_ended)
        elif self._silent is not None:
            self._silent()


@contextlib.asynccontextmanager
async def until_silent(limit_s: float) -> AsyncIterator[SilenceWatch]:
    """Raises TimeoutError in the body when `heard` was not called for `limit_s` seconds, counting only time in which
    this process was listening."""
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(None) as timeout:
        watch = SilenceWatch(limit_s, lambda: timeout.reschedule(loop.time()))
        try:
            yield watch
        finally:
            watch.cancel()
