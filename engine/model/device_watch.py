"""When has a GPU come past a point in its work? The engine's thread has better things to do than to wait for it."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable
from typing import Protocol

import torch


class DeviceWatch:
    """Calls `wake`, on a thread of its own, after each event that it was given, in their order.

    Also after one that ends in an error of the device: whoever is woken meets it at its own next question.
    """

    def __init__(self, device: torch.device, wake: Callable[[], None]) -> None:
        self._device = device
        self._wake = wake
        self._events: queue.SimpleQueue[torch.cuda.Event] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def add(self, event: torch.cuda.Event) -> None:
        """`event` is recorded in a stream already."""
        self._events.put(event)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="device-watch", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        torch.cuda.set_device(self._device)  # a thread begins with the first, and would make a context there
        while True:
            with contextlib.suppress(RuntimeError):
                self._events.get().synchronize()
            self._wake()


class SeesLayers(Protocol):
    """Is told how far the launch of a step has come."""

    def written(self, layer: int) -> None:
        """All work that writes the KV of layer `layer`, counted from 0, is queued on the current stream."""


class LayerMarks:
    """Where in a step's work groups of layers end. ends: the layers after which a group is whole, counted from 1."""

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
        """Layers whose KV is there."""
        passed = (end for end, event in self._passed if event.query())  # type: ignore[no-untyped-call]
        return max(passed, default=0)
