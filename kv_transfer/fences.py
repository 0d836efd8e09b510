"""When is a copy on the device done? The engine's thread must not wait for it, and may be asleep by then."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any, Protocol

import torch


class Fence(Protocol):
    """Work handed to the device. `query` says whether it is done, and never waits."""

    def query(self) -> bool: ...


class _Passed:
    def query(self) -> bool:
        return True


PASSED: Fence = _Passed()


class Fences:
    """Makes fences on a device; `wake` is called, on a thread of this object's, after each has passed.

    On a CPU every fence has passed when it is made, and nobody is woken.
    """

    def __init__(self, device: torch.device, wake: Callable[[], None]) -> None:
        self._device = device
        self._wake = wake
        self._events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def record(self) -> Fence:
        """Passes once all work queued so far on the current stream is done."""
        if self._device.type != "cuda":
            return PASSED
        event: Any = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        self._events.put(event)
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="kv-fences", daemon=True)
            self._thread.start()
        return PASSED if event.query() else event

    def _watch(self) -> None:
        while True:
            self._events.get().synchronize()
            self._wake()
