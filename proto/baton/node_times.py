"""What nodes report of their work on an attempt beside its results: durations by their own clocks.

Clocks of two machines are never compared. What happened to a prompt counts from when this node received it, and what
happened while it generated counts from the tokens before. Both travel in messages that end a node's work anyway.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

NUM_GAPS = 4
"""How many of a request's longest gaps are reported."""


@dataclass(frozen=True, slots=True)
class PromptTimes:
    """Of the node that computes the prompt. `*_s`: seconds since it received the request; 0: did not happen.

    `started_s`: the first chunk was scheduled. `computed_s`: the first token was sampled. `num_chunks`: computed one
    after the other. The rest is about the handoff: `granted_s`: the decode node's Grant was here; `first_part_s`,
    `last_part_s`: the first part of the KV was ready to leave, and the last one had left; `num_held_blocks`: those
    that the decode node had already, so that they did not travel.
    """

    started_s: float
    computed_s: float
    num_chunks: int = 0
    granted_s: float = 0.0
    first_part_s: float = 0.0
    last_part_s: float = 0.0
    num_parts: int = 0
    num_held_blocks: int = 0

    @property
    def prefill_s(self) -> float:
        """First chunk scheduled to first token."""
        return max(0.0, self.computed_s - self.started_s)


class Gap(NamedTuple):
    """`step`: the one after the gap, counted from 0 at the first step of the request on this node."""

    step: int
    gap_s: float


@dataclass(frozen=True, slots=True)
class DecodeTimes:
    """Of the node that generates: its steps with the request, the time from the first to the last of them, and the
    longest gaps between two neighbouring ones, the longest first."""

    num_steps: int
    decode_s: float
    longest: tuple[Gap, ...] = ()


class StepGaps:
    """Collects DecodeTimes: one comparison for each step, and no memory for those that are not among the longest."""

    __slots__ = ("_bar", "_began", "_last", "_longest", "_num_steps")

    def __init__(self) -> None:
        self._num_steps = 0
        self._began = self._last = 0.0
        self._bar = 0.0
        self._longest: list[Gap] = []

    def step(self, now: float) -> None:
        """A step with the request has ended. Once more at the same time counts as the same step: it had two samples."""
        if not self._num_steps:
            self._began = self._last = now
        elif now == self._last:
            return
        gap_s, self._last = now - self._last, now
        if gap_s > self._bar:
            self._keep(Gap(self._num_steps, gap_s))
        self._num_steps += 1

    def _keep(self, gap: Gap) -> None:
        self._longest.append(gap)
        if len(self._longest) > NUM_GAPS:
            self._longest.remove(min(self._longest, key=lambda kept: kept.gap_s))
        if len(self._longest) == NUM_GAPS:
            self._bar = min(kept.gap_s for kept in self._longest)

    def times(self) -> DecodeTimes | None:
        """None: there was no step."""
        if not self._num_steps:
            return None
        longest = sorted(self._longest, key=lambda gap: -gap.gap_s)
        return DecodeTimes(self._num_steps, self._last - self._began, tuple(longest))
