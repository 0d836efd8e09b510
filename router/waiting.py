"""Requests that no node can take at the moment."""

from __future__ import annotations

from baton.errors import NodeUnavailable
from router.life import Unplaced


class WaitingForNode:
    """First come, first served; at most `limit`. Keeps `RequestLife.unplaced` of their requests up to date."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._tasks: dict[Unplaced, None] = {}

    def __len__(self) -> int:
        return len(self._tasks)

    def tasks(self) -> list[Unplaced]:
        return list(self._tasks)

    def add(self, task: Unplaced, why: str) -> None:
        """Raises NodeUnavailable if too many wait already; its text says `why` there is no node."""
        if len(self._tasks) >= self._limit:
            raise NodeUnavailable(f"{why}, and {self._limit} requests wait for one already")
        self._tasks[task] = None
        task.life.unplaced.append(task)

    def remove(self, task: Unplaced) -> None:
        """The task no longer waits."""
        del self._tasks[task]
        task.life.unplaced.remove(task)
