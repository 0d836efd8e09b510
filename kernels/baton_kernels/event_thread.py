"""A thread that waits for points in a GPU's work, so that others need not."""

from __future__ import annotations

import atexit
import contextlib
import queue
import threading
import weakref
from collections.abc import Callable

import torch

END_S = 5.0
"""How long the end of the process waits for a thread to end: one that waits for a hung device never does."""

_Work = tuple[torch.cuda.Event, Callable[[], None]]
_running: weakref.WeakKeyDictionary[threading.Thread, queue.SimpleQueue[_Work | None]] = weakref.WeakKeyDictionary()


class EventThread:
    """Calls a function after each event passed to `add`, in order, on a thread of its own, which ends with this object.

    An event that ends in a device error counts as over: whoever is called gets the error when it next asks the device.
    """

    def __init__(self, device: torch.device, name: str) -> None:
        self._device = device
        self._name = name
        self._work: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def add(self, event: torch.cuda.Event, after: Callable[[], None]) -> None:
        """`event` must already be recorded in a stream. One thread at a time."""
        self._work.put((event, after))
        if self._thread is None:
            self._thread = threading.Thread(target=_run, args=(self._device, self._work), name=self._name, daemon=True)
            _running[self._thread] = self._work
            self._thread.start()
            weakref.finalize(self, self._work.put, None)


def _run(device: torch.device, work: queue.SimpleQueue[_Work | None]) -> None:
    """The thread's loop, until it gets None. It does not refer to its EventThread, which may therefore be collected."""
    torch.cuda.set_device(device)  # a new thread defaults to device 0, and would create a context there
    while (item := work.get()) is not None:
        event, after = item
        with contextlib.suppress(RuntimeError):
            event.synchronize()
        after()
        del item, event, after  # so that what they refer to need not live until the next event


@atexit.register
def _end_all() -> None:
    """End all threads: one that returns from a wait for the device after the interpreter has ended aborts the
    process."""
    for thread, work in list(_running.items()):
        work.put(None)
        thread.join(END_S)
