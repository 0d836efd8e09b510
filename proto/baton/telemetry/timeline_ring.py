"""The timelines of the last requests, in a bounded number of bytes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from itertools import islice

from baton.telemetry.timeline import Timeline


class TimelineRing:
    """Keeps the newest ones that fit into `max_bytes`, by `Timeline.size_bytes`; 0: none."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._kept: OrderedDict[str, tuple[Timeline, int]] = OrderedDict()  # with its size

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, timeline: Timeline) -> None:
        if not self._max_bytes:
            return
        if (old := self._kept.pop(timeline.request_id, None)) is not None:
            self._num_bytes -= old[1]
        num_bytes = timeline.size_bytes
        self._kept[timeline.request_id] = timeline, num_bytes
        self._num_bytes += num_bytes
        while self._num_bytes > self._max_bytes:
            _, oldest = self._kept.popitem(last=False)
            self._num_bytes -= oldest[1]

    def newest(self, number: int) -> list[Timeline]:
        """The newest first."""
        return list(islice(self._newest(), number))

    def find(self, request_id: str) -> list[Timeline]:
        """Those of that id: a timeline's own, or the one that the client knows, which several may share. The newest
        first."""
        if (found := self._kept.get(request_id)) is not None:
            return [found[0]]
        return [timeline for timeline in self._newest() if timeline.client_id == request_id]

    def _newest(self) -> Iterator[Timeline]:
        return (timeline for timeline, _ in reversed(self._kept.values()))
