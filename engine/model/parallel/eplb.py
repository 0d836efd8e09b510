"""Expert parallel load balancing: rank 0 counts which experts tokens choose, and decides which experts move.

    every step_interval steps   read the load of the last window_size steps, as the router chose
    at each step from then on   find a better placement for one layer; if there is one, move its weights before the step

A layer's placement changes together with its weights, so two layers may be in different rebalances at any time.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from engine.model.parallel.expert_placement import Placement, rebalanced
from engine.model.parallel.expert_slots import ExpertSlots

log = logging.getLogger(__name__)

Counts = npt.NDArray[np.int64]
"""[num_layers, num_experts]: how many tokens chose each expert."""


class Change(NamedTuple):
    """A layer's new placement. num_slots: how many slots get another expert."""

    layer: int
    placement: Placement
    num_slots: int


class LoadWindow:
    """How much a growing total has gained over the last `window` steps, read at every `interval`-th step. Keeps the
    total as it was at the beginning of each open window. total: reads the total; on a GPU, that waits for the launched
    steps."""

    def __init__(self, total: Callable[[], Counts], window: int, interval: int) -> None:
        self._total, self._window, self._interval = total, window, interval
        self._began: deque[Counts] = deque()
        self._num_steps = 0

    def step(self) -> Counts | None:
        """Count one step. Returns the window's gain if a window ends with this step. The first window may be shorter
        than `window`."""
        self._num_steps += 1
        if (self._num_steps + self._window) % self._interval == 0:
            self._began.append(self._total())
        if self._num_steps % self._interval:
            return None
        return self._total() - self._began.popleft() if self._num_steps > self._window else self._total()


class BalanceLog:
    """Logs every `interval` steps how balanced the ranks were since the last line: the mean over the maximum of their
    token counts; 1 is best. On a GPU, that waits for the launched steps."""

    def __init__(self, slots: Sequence[ExpertSlots], interval: int) -> None:
        self._slots, self._interval = slots, interval
        self._num_steps = 0
        self._last = np.zeros(slots[0].num_ranks if slots else 1, np.int64)

    def step(self) -> None:
        """Count one step; call it before each."""
        self._num_steps += 1
        if self._num_steps % self._interval:
            return
        total = np.sum([slots.rank_totals() for slots in self._slots], axis=0)
        gained, self._last = total - self._last, total
        if gained.any():
            log.info("experts balancedness=%.3f steps=%d", gained.mean() / gained.max(), self._interval)


class Eplb:
    """Decides on rank 0 when experts move. slots: rank 0's, of all layers. total: reads how many tokens have chosen
    each expert. log_every: the interval of `BalanceLog`; 0: no log. Only the thread that computes may call this; any
    thread may read `num_rebalances`."""

    def __init__(
        self,
        total: Callable[[], Counts],
        slots: Sequence[ExpertSlots],
        window_size: int,
        step_interval: int,
        log_every: int = 0,
    ) -> None:
        self._slots = slots
        self._balance_log = BalanceLog(slots, log_every) if log_every else None
        self._window = LoadWindow(total, window_size, step_interval)
        self._left: deque[tuple[int, npt.NDArray[np.int64]]] = deque()
        self._changes: list[tuple[Change, float]] = []
        self.num_rebalances = 0
        """How many rebalances have moved experts, in one layer or more."""

    def before_step(self) -> Change | None:
        """The change to make before the step, if any; the caller makes it at once. A rebalance ends before the next one
        begins."""
        if self._balance_log is not None:
            self._balance_log.step()
        due = self._window.step()
        if due is not None and not self._left:
            self._left.extend(enumerate(due))
        if not self._left:
            return None
        change = self._decide(*self._left.popleft())
        if not self._left and change is None:
            self._report()
        return change

    def _decide(self, layer: int, load: npt.NDArray[np.int64]) -> Change | None:
        slots = self._slots[layer]
        found = rebalanced(slots.placement, load[: slots.num_experts], slots.num_ranks)
        num_slots = int((found != slots.placement).sum())
        return Change(layer, found, num_slots) if num_slots else None

    def changed(self, change: Change, seconds: float) -> None:
        """Record that the change is made. seconds: how long it took; no step was computed meanwhile."""
        self.num_rebalances += not self._changes
        self._changes.append((change, seconds))
        if not self._left:
            self._report()

    def _report(self) -> None:
        if self._changes:
            log.info(
                "experts rebalanced layers=%d slots=%d seconds=%.3f longest_s=%.3f",
                len(self._changes),
                sum(change.num_slots for change, _ in self._changes),
                sum(seconds for _, seconds in self._changes),
                max(seconds for _, seconds in self._changes),
            )
            self._changes.clear()
