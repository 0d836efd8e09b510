"""What goes into one step of an engine and what comes out."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Protocol

from baton.messages import TokenLogprobs
from baton.sampling import FinishReason
from engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Chunk:
    """Compute the KV of `sequence.tokens[start : start + length]`; all KV before `start` exists."""

    sequence: Sequence
    start: int
    length: int

    @property
    def end(self) -> int:
        return self.start + self.length

    @property
    def samples_token(self) -> bool:
        """Whether it reaches the sequence's last token, so that its logits choose the next."""
        return self.end == self.sequence.num_tokens


@dataclass(frozen=True, slots=True)
class Choice:
    """A chosen token, and its logprobs if they were asked for."""

    token: int
    logprobs: TokenLogprobs | None = None


class ModelRunner(Protocol):
    """Computes batches over a pool of KV blocks that it owns. Block tables say where; it never chooses."""

    def run(self, chunks: Seq[Chunk]) -> list[list[Choice]]:
        """Compute the chunks' KV in one batch. Per chunk: [] unless it reaches its sequence's last token, else one
        Choice for each of the sequence's `samples`, drawn with seed `sampling.seed + sample`."""

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        """Copy the KV of whole blocks, (source, destination) each, before the next `run`."""


@dataclass(frozen=True, slots=True)
class SampledToken:
    """Token `index` of the output of sample `sample`. `finish`: this token ended the sample (an EOS is reported too).

    `sequence` is the sample's own sequence; of a hand_off prompt it is the parked one, whose tokens stay the prompt's.
    """

    sequence: Sequence
    sample: int
    index: int
    token: int
    logprobs: TokenLogprobs | None = None
    finish: FinishReason | None = None
    stop_token_id: int | None = None


@dataclass(slots=True)
class StepResult:
    """All that one step did. Each list is in batch order."""

    started: list[Sequence] = field(default_factory=list)  # scheduled for the first time
    advanced: list[Sequence] = field(default_factory=list)  # had KV of their prompt computed
    sampled: list[SampledToken] = field(default_factory=list)
    parked: list[Sequence] = field(default_factory=list)  # prompt done, blocks held until `release`
    preempted: list[Sequence] = field(default_factory=list)  # lost their blocks; will be computed anew
    elapsed_s: float = 0.0  # that computing took
    num_tokens: int = 0  # computed; 0: nothing could run, so wait for an event instead of stepping again
