"""When is a copy on the device done? The engine's thread must not wait for it, and may be busy by then."""

from __future__ import annotations

import contextlib
import queue
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

Mark = Any
"""A point in the device's work, as `CopyStream.mark` gave it."""


class CopyStream:
    """Copies beside the steps that a device computes, on a stream of its own; on a CPU in their midst.

    `after` is called when a copy is done: on a thread of this object's, which ends with it, or at once on a CPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        on_gpu = device.type == "cuda"
        self._stream: Any = torch.cuda.Stream(device, priority=-1) if on_gpu else None  # type: ignore[no-untyped-call]
        self._copies: queue.SimpleQueue[tuple[Any, Callable[[], None]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def mark(self) -> Mark:
        """All work queued so far on the current stream."""
        if self._stream is None:
            return None
        event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    @contextlib.contextmanager
    def beside_steps(self, after: Callable[[], None], not_before: Mark = None) -> Iterator[None]:
        """What is queued within waits for `not_before` and earlier copies, but not for the steps under way; steps that
        are launched later wait for it. Then `after` is called, and what it refers to lives until then."""
        if self._stream is None:
            yield
            after()
            return
        with torch.cuda.stream(self._stream):
            if not_before is not None:
                self._stream.wait_event(not_before)
            yield
            done: Any = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            done.record(self._stream)
        torch.cuda.current_stream(self._device).wait_event(done)
        self._copies.put((done, after))
        if self._thread is None:
            self._thread = threading.Thread(
                target=_watch, args=(self._device, self._copies), name="kv-copies", daemon=True
            )
            self._thread.start()
            weakref.finalize(self, self._copies.put, None)


def _watch(device: torch.device, copies: queue.SimpleQueue[tuple[Any, Callable[[], None]] | None]) -> None:
    torch.cuda.set_device(device)  # a thread begins with the first, and would make a context there
    while (copy := copies.get()) is not None:
        done, after = copy
        done.synchronize()
        after()
        del copy, done, after  # what they refer to need not live until the next copy
