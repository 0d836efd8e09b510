"""Circuit breakers: what fails again and again gets no requests for a while, and then one, as a trial.

    closed --MAX_FAILURES in a row--> open --its time is up--> half open --the trial works---> closed
                                        ^                          |
                                        '------- it fails ---------'   for twice as long

One mechanism for nodes and for pairs of nodes. Envoy's outlier detection counts consecutive failures in the same way
(`consecutive_5xx`, `base_ejection_time`); like its panic threshold, placement uses nodes that are out if there is no
other (`router.placement.placement`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

MAX_FAILURES = 3
"""In a row, after which something is out. A single failure may be the death of a node that the router has yet to
notice."""
WINDOW_S = 60.0
"""A failure that comes so long after the last one begins a new row."""
FIRST_OUT_S = 5.0
LAST_OUT_S = 60.0
TRIAL_S = 5.0
"""How long others wait for the result of a trial; then the next request is one as well."""

Key = TypeVar("Key")
Pair = tuple[str, str]
"""The incarnations of a prefill node and a decode node."""


@dataclass(slots=True)
class _Breaker:
    num_failures: int = 0
    last_failure: float = 0.0
    reason: str = ""
    out_s: float = 0.0  # how long it is open this time; 0: it is closed
    until: float = 0.0  # when it is open no longer, or the trial counts as lost
    on_trial: bool = False


class CircuitBreakers(Generic[Key]):
    """One for each key that has failed lately. Times are those of the caller's clock."""

    def __init__(self) -> None:
        self._breakers: dict[Key, _Breaker] = {}

    def __len__(self) -> int:
        return len(self._breakers)

    def failed(self, key: Key, reason: str, now: float) -> None:
        if key not in self._breakers:
            self._forget_old(now)
        breaker = self._breakers.setdefault(key, _Breaker())
        if not breaker.out_s and now - breaker.last_failure > WINDOW_S:
            breaker.num_failures = 0
        breaker.num_failures += 1
        breaker.last_failure = now
        breaker.reason = reason
        if breaker.num_failures >= MAX_FAILURES and (breaker.on_trial or breaker.until <= now):
            breaker.out_s = min(2 * breaker.out_s, LAST_OUT_S) or FIRST_OUT_S
            breaker.until = now + breaker.out_s
            breaker.on_trial = False

    def worked(self, key: Key) -> None:
        self._breakers.pop(key, None)

    def placed(self, key: Key, now: float) -> None:
        """A request goes there: the trial, if it is time for one."""
        breaker = self._breakers.get(key)
        if breaker is not None and breaker.out_s and breaker.until <= now:
            breaker.on_trial = True
            breaker.until = now + TRIAL_S

    def forget(self, gone: Callable[[Key], bool]) -> None:
        """Keys that stand for nothing any more."""
        for key in list(filter(gone, self._breakers)):
            del self._breakers[key]

    def is_out(self, key: Key, now: float) -> bool:
        breaker = self._breakers.get(key)
        return breaker is not None and now < breaker.until

    def why_out(self, key: Key, now: float) -> str | None:
        """Why it is out, for people. None: it is not out."""
        return self._breakers[key].reason if self.is_out(key, now) else None

    def _forget_old(self, now: float) -> None:
        """Those that have not failed for long: addresses come and go."""
        for key, breaker in list(self._breakers.items()):
            if breaker.until <= now and now - breaker.last_failure > WINDOW_S + LAST_OUT_S:
                del self._breakers[key]
