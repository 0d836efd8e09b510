"""When to launch the next step: late enough for new requests to join it, but before the device goes idle.

    step N begins                                    due        N ends, N+1 begins
    |--- new requests join N+1 -----------------------|-- launch --|
                                             0.95 x expected - margin

If N+1 is launched as soon as N begins, requests that arrive while N runs cannot join it: they wait for the rest of N
and all of N+1. If it is launched too late, the device idles for as long as a turn of the loop takes, since the end of N
starts one. So if nothing is known, a step is launched at once, and the expected time of a step is a lower bound.

A launch costs more if requests join the step, or if it has prompts. The cost of each kind is tracked separately:
otherwise a few launches with newcomers would make all others early, and requests that arrive in between would wait for
one more step. A request that arrives when only a launch without newcomers would still be in time joins nevertheless,
and the device idles for the difference.

The margin covers the cost of most of the last launches, not of the most expensive one: it delays the start of the step
for every request that joins it. With 5 ms steps and launches of 0.7 ms, of which some take twice that, the time between
launch and start falls from 2.4 to 1.7 ms, and the device idles for 6 us a step instead of 2 (computed, not measured).
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from typing import NamedTuple

from engine.step_size import StepSize

SHARE = 0.95
"""The next step is launched after this share of the expected time, less the margin."""
SLACK_S = 0.0004
"""Added to the cost of a launch to give the margin, since the start of a step is noticed a little late."""
NUM_COSTS = 32
"""How many launches of each kind have their costs remembered."""
QUANTILE = 0.9
"""The share of these launches for which the margin suffices. The slack covers most of the others."""
NUM_REMEMBERED = 3
"""The expected time is the shortest of this many steps. A step looks too short if its start was noticed late, and too
long if its end was."""
ALIKE = 0.9
"""Remembered steps are compared with if their lower bounds are at least this share of the best one: a step with a long
context, which was there for a moment, says little about those without it."""


class LaunchKind(NamedTuple):
    """What the cost of a launch depends on. newcomers: sequences have been started or adopted since the last one."""

    prompts: bool = False
    newcomers: bool = False


class Pace:
    """Tracks steps from launch to end. All times are in seconds, by the caller's clock.

    predict_least: the least time that a step with prompts is predicted to take, or None. Without it, a small chunk late
    in a prompt is compared with a large early one in each of their numbers, and the lower bound is far too low.
    """

    def __init__(self, predict_least: Callable[[StepSize], float | None] = lambda _: None) -> None:
        self._predict_least = predict_least
        self.busy_since: float | None = None
        """When the device started the oldest step in flight. None: none is in flight."""
        self._in_flight: deque[StepSize | None] = deque()  # None: its time is not to be learned
        self._decodes: deque[tuple[StepSize, float]] = deque(maxlen=NUM_REMEMBERED)
        self._mixed: deque[tuple[StepSize, float]] = deque(maxlen=NUM_REMEMBERED)
        self._costs: defaultdict[LaunchKind, deque[float]] = defaultdict(lambda: deque(maxlen=NUM_COSTS))
        self._cost_s: defaultdict[LaunchKind, float] = defaultdict(float)  # the quantile of each

    def launch_at(self, kind: LaunchKind) -> float | None:
        """When to launch the step after the oldest one in flight, if no request joins it before. None: at once."""
        if self.busy_since is None or (expected_s := self._expected_s()) is None:
            return None
        wait_s = SHARE * expected_s - SLACK_S - self._margin_s(kind)
        return self.busy_since + wait_s if wait_s > 0 else None

    def _margin_s(self, kind: LaunchKind) -> float:
        """What most launches of this kind cost."""
        return max(self._cost_s[kind], self._cost_s[LaunchKind(kind.prompts)])

    def idle_s(self, now: float, kind: LaunchKind, *, idle: bool) -> float:
        """How long the device will probably idle before a step of this kind whose launch begins now. 0: it will not,
        or nothing is known. idle: the step in flight is done."""
        if self.busy_since is None or (expected_s := self._expected_s()) is None:
            return 0.0
        end = self.busy_since + expected_s
        return max(0.0, now + self._margin_s(kind) - (end if idle else max(end, now)))

    def launched(
        self,
        size: StepSize,
        decided: float,
        now: float,
        *,
        idle: bool,
        newcomers_since: float | None = None,
        waited_s: float = 0.0,
    ) -> None:
        """Record a launch. decided: when its turn began. now: when the device had something to compute; what the launch
        does after that delays no step. idle: the step before it, if there is one in flight, was done by then.
        newcomers_since: when the first newcomer arrived; None: there are none. waited_s: how long the launch waited for
        other data parallel nodes. That is not a cost: else each node would launch before the others."""
        kind = LaunchKind(size.has_prompts, newcomers_since is not None)
        due, known_s = self.launch_at(kind), self._cost_s[kind]
        if due is not None and newcomers_since is not None and newcomers_since > due:
            due = None  # the launch could not begin before they came
        cost_s = now - waited_s - (decided if due is None else min(decided, due))
        if due is not None and idle and waited_s < SLACK_S:  # the launch waited too long
            cost_s = max(cost_s, known_s) + SLACK_S
        costs = self._costs[kind]
        costs.append(cost_s)
        self._cost_s[kind] = sorted(costs)[int(QUANTILE * len(costs))]
        if not self._in_flight:
            self.busy_since = now
        elif idle:
            self._learn_most(now)
            self._in_flight[-1] = None
        self._in_flight.append(size)

    def retired(self, now: float) -> float | None:
        """Record the end of the oldest step. Returns how long it took; None if that is unknown."""
        size, took_s = self._in_flight.popleft(), None
        if size is not None and self.busy_since is not None:
            took_s = now - self.busy_since
            self._known(size).append((size, took_s))
        self.busy_since = now if self._in_flight else None
        return took_s

    def _learn_most(self, now: float) -> None:
        """The only step in flight has ended at an unknown time, at the latest `now`: learn that as an upper bound."""
        size, expected_s = self._in_flight[-1], self._expected_s()
        if size is not None and self.busy_since is not None and now - self.busy_since < (expected_s or 0.0):
            self._known(size).append((size, now - self.busy_since))

    def _known(self, size: StepSize) -> deque[tuple[StepSize, float]]:
        """The remembered steps of its kind, and how long each took."""
        return self._mixed if size.has_prompts else self._decodes

    def _expected_s(self) -> float | None:
        """A lower bound of the oldest step's time, from the remembered steps. None: nothing is known."""
        if (size := self._in_flight[0]) is None:
            return None
        known = [(size.least_share(other), took_s) for other, took_s in self._known(size) or self._decodes]
        most = max((share for share, _ in known), default=0.0)
        least_s = min((took_s * share for share, took_s in known if share >= ALIKE * most), default=None)
        if least_s is None or not size.has_prompts:
            return least_s
        return max(least_s, self._predict_least(size) or 0.0)
