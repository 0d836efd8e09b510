"""A thread with an asyncio event loop, on which requests run beside the caller."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")

STOP_S = 10.0


class Background:
    """Runs from its construction to `close`. The thread is a daemon: it never keeps a process from ending."""

    def __init__(self) -> None:
        self._started: Future[asyncio.AbstractEventLoop] = Future()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()), name="baton-llm", daemon=True)
        self._thread.start()
        self.loop = self._started.result(STOP_S)

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run it on the loop. To cancel the future cancels the work."""
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def close(self) -> None:
        """Cancel what still runs, and end the thread. Not on the thread itself. Idempotent."""
        if self._thread.is_alive():
            self.loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(STOP_S)

    async def _main(self) -> None:
        self._stop = asyncio.Event()
        self._started.set_result(asyncio.get_running_loop())
        await self._stop.wait()
