"""SIGHUP, where nohup started the tests: it is ignored then, also by what they start."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def heard() -> Iterator[None]:
    """Processes that are started meanwhile hear it. On the main thread."""
    ours = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, ours)
