"""What a piece of work may cost."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from node.garbage import uncollected


@contextmanager
def takes_less_than(seconds: float, clock: Callable[[], float] = time.thread_time) -> Iterator[None]:
    """Of this thread's CPU time, or of all threads' (`time.process_time`) where others do the work. Garbage is not
    collected meanwhile: that goes through all that this process has, and may take most of a second."""
    with uncollected():
        began = clock()
        yield
        taken_s = clock() - began
    assert taken_s < seconds
