"""When to launch the next step: late enough that newcomers join it, before the device runs dry.

    step N begins                                    due        N ends, N+1 begins
    |--- newcomers join N+1 --------------------------|-- launch --|
                                              0.9 x expected - margin

Launched as soon as N begins, N+1 is closed to who comes while N runs: he waits for the rest of N and all of N+1. Too
early costs him that; too late leaves the device idle, for everybody. So each doubt is settled by launching at once, and
each error falls on the early side.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from engine.step import Chunk

SHARE = 0.9
"""Of the expected time, after which the next step is launched; less the margin."""
SLACK_S = 0.001
"""The margin, beside twice what a launch costs: a thread is not always woken at the moment."""
NUM_REMEMBERED = 3
"""The shortest of so many steps is what is expected: one whose start was noticed late looks short, one whose end was,
long."""
FORGETTING = 1 / 32
"""Share by which the cost of a launch falls towards that of the latest; it rises at once."""


@dataclass(frozen=True, slots=True)
class StepSize:
    """Of a step that computes one token for each of its sequences; `num_context_tokens`: of all of them."""

    num_seqs: int
    num_context_tokens: int

    @classmethod
    def of(cls, chunks: Iterable[Chunk]) -> StepSize | None:
        """None: some chunk has more than one token, and how long that takes is another matter."""
        num_seqs = num_context_tokens = 0
        for chunk in chunks:
            if chunk.length > 1:
                return None
            num_seqs += 1
            num_context_tokens += chunk.end
        return cls(num_seqs, num_context_tokens)

    def least_share(self, other: StepSize) -> float:
        """At least so much of the other's time does this one take, whatever a sequence and its context cost: a step
        takes a + b x sequences + c x context tokens, with none of them negative."""
        return min(1.0, self.num_seqs / other.num_seqs, self.num_context_tokens / other.num_context_tokens)


class Pace:
    """Follows steps from launch to end. All times are seconds of one clock, the caller's."""

    def __init__(self) -> None:
        self.busy_since: float | None = None
        """Since when the oldest step in flight is being computed. None: none is in flight."""
        self._in_flight: deque[StepSize | None] = deque()  # None: not to be learned from
        self._took: deque[tuple[StepSize, float]] = deque(maxlen=NUM_REMEMBERED)
        self._cost_s = 0.0

    @property
    def launch_at(self) -> float | None:
        """When to launch a step behind the oldest one in flight. None: at once."""
        if self.busy_since is None or not self._took or (size := self._in_flight[0]) is None:
            return None
        expected_s = min(took_s * size.least_share(known) for known, took_s in self._took)
        wait_s = SHARE * expected_s - SLACK_S - 2 * self._cost_s
        return self.busy_since + wait_s if wait_s > 0 else None

    def launched(self, size: StepSize | None, decided: float, now: float, idle: bool) -> None:
        """A step has been launched. decided: when its turn began. idle: the one before it, if there is one in flight,
        was done before the device had this one."""
        due = self.launch_at
        if size is not None:
            cost_s = now - (decided if due is None else min(decided, due))
            if due is not None and idle:  # it was waited for too long
                cost_s = max(cost_s, self._cost_s) + SLACK_S
            self._cost_s = max(cost_s, self._cost_s + (cost_s - self._cost_s) * FORGETTING)
        if not self._in_flight:
            self.busy_since = now
        elif idle:
            self._in_flight[-1] = None  # it ended nobody knows when
        self._in_flight.append(size)

    def retired(self, now: float) -> None:
        """The oldest step has ended."""
        size = self._in_flight.popleft()
        if size is not None and self.busy_since is not None:
            self._took.append((size, now - self.busy_since))
        self.busy_since = now if self._in_flight else None
