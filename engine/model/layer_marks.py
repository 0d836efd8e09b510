"""Points that a GPU passes in a step: the ends of layers, after which their KV is complete."""

from __future__ import annotations

from typing import Protocol

import torch


class SeesLayers(Protocol):
    """Is called while a step is launched, after each layer."""

    def written(self, layer: int) -> None:
        """All work that writes the KV of `layer`, counted from 0, is queued on the current stream, or on another rank's
        for which that stream waits. -1: that of no layer."""


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
        """How many layers have complete KV."""
        passed = (end for end, event in self._passed if event.query())  # type: ignore[no-untyped-call]
        return max(passed, default=0)
