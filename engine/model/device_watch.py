"""Reports when a GPU has passed a point in its stream, so that the engine's thread need not wait for it."""

from __future__ import annotations

import contextlib
import queue
import threading
import weakref
from collections.abc import Callable
from typing import Protocol

import torch


class DeviceWatch:
    """Calls `wake`, on a thread of its own, after each event passed to `add`, in order.

    An event that ends in a device error wakes too: the woken thread gets the error when it next queries the device.
    """

    def __init__(self, device: torch.device, wake: Callable[[], None]) -> None:
        self._device = device
        self._wake = wake
        self._events: queue.SimpleQueue[torch.cuda.Event | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def add(self, event: torch.cuda.Event) -> None:
        """`event` must already be recorded in a stream."""
        self._events.put(event)
        if self._thread is None:
            self._thread = threading.Thread(
                target=_watch, args=(self._device, self._events, self._wake), name="device-watch", daemon=True
            )
            self._thread.start()
            weakref.finalize(self, self._events.put, None)


def _watch(device: torch.device, events: queue.SimpleQueue[torch.cuda.Event | None], wake: Callable[[], None]) -> None:
    """Until None comes. It does not refer to its DeviceWatch, which may therefore be collected."""
    torch.cuda.set_device(device)  # a thread starts on the first GPU, and would create a context there
    while (event := events.get()) is not None:
        with contextlib.suppress(RuntimeError):
            event.synchronize()
        wake()


class SeesLayers(Protocol):
    """Called as the launch of a step passes each layer."""

    def written(self, layer: int) -> None:
        """All work that writes the KV of layer `layer`, counted from 0, is queued on the current stream."""


class LayerMarks:
    """The points in a step where layer groups end. ends: the last layer of each group, counted from 1."""

    def __init__(self, ends: tuple[int, ...]) -> None:
        self._ends = frozenset(ends)
        self._passed: list[tuple[int, torch.cuda.Event]] = []

    @property
    def events(self) -> list[torch.cuda.Event]:
        return [event for _, event in self._passed]

    def written(self, layer: int) -> None:
        """See SeesLayers."""
        if layer + 1 in self._ends:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
            self._passed.append((layer + 1, event))

    def num_done(self) -> int:
        """How many layers have their KV."""
        passed = (end for end, event in self._passed if event.query())  # type: ignore[no-untyped-call]
        return max(passed, default=0)
