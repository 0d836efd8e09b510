"""Streams with something to write, oldest first: they write in turn, in slices between which the event loop goes on.

A stream that waits for its turn takes in further tokens meanwhile, and writes all of them at once. So a router that has
more to do than it can falls no further behind: it writes fewer and larger pieces.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable

SLICE_S = 0.002
"""New requests, and what nodes send, wait for no longer than this."""


class Deliveries:
    """For one event loop. The calls that are added must not raise."""

    def __init__(self) -> None:
        self._due: OrderedDict[Callable[[], None], None] = OrderedDict()
        self._scheduled = False

    def add(self, deliver: Callable[[], None]) -> None:
        """Call it soon: once, however often it is added until then."""
        self._due[deliver] = None
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._run)

    def discard(self, deliver: Callable[[], None]) -> None:
        """Do not call it after all, if it was added."""
        self._due.pop(deliver, None)

    def _run(self) -> None:
        due, until = self._due, time.monotonic() + SLICE_S
        while due:
            deliver, _ = due.popitem(last=False)
            deliver()
            if time.monotonic() >= until:
                break
        self._scheduled = bool(due)
        if due:
            asyncio.get_running_loop().call_soon(self._run)
