"""What a piece of work may cost."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from node.garbage import uncollected


@contextmanager
def takes_less_than(seconds: float) -> Iterator[None]:
    """Of this thread's CPU time. Garbage is not collected meanwhile: that goes through all that this process has, and
    may take most of a second."""
    with uncollected():
        began = time.thread_time()
        yield
        taken_s = time.thread_time() - began
    assert taken_s < seconds
