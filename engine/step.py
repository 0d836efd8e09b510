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
    """Compute the KV of a sequence's tokens [start, start + length), which are its queries in the step's attention. All
    KV before `start` exists, or is computed by a step launched earlier. The last token may be one that such a step
    samples: then only the runner knows its value.

    `num_logits`: the logits of so many of its last tokens each choose the token that follows. 0: the chunk ends before
    the sequence does. 1: its last token is the sequence's. More: behind that come the sequence's draft tokens.
    A chunk of a sequence that only generates, a decode, has logits of all of its tokens.
    """

    sequence: Sequence
    start: int
    length: int
    num_logits: int

    @classmethod
    def of(cls, sequence: Sequence, start: int, length: int) -> Chunk:
        """As the sequence stands now."""
        num_logits = start + length - len(sequence.tokens) - sequence.num_pending_tokens + 1
        return cls(sequence, start, length, num_logits if num_logits > 0 else 0)

    @property
    def end(self) -> int:
        return self.start + self.length

    @property
    def samples_token(self) -> bool:
        """Whether it reaches the sequence's last token."""
        return self.num_logits > 0

    @property
    def draft_tokens(self) -> tuple[int, ...]:
        """What its last tokens are, if the guess is right: behind the sequence's own."""
        return self.sequence.draft_tokens[: self.num_logits - 1] if self.num_logits > 1 else ()


@dataclass(frozen=True, slots=True)
class Choice:
    """A chosen token, and its logprobs if they were asked for."""

    token: int
    logprobs: TokenLogprobs | None = None


class LaunchedStep(Protocol):
    """A step that the runner computes, or has computed."""

    def is_done(self) -> bool:
        """Whether `wait` would return at once."""

    def num_layers_done(self) -> int:
        """The first so many layers have all KV of the step's chunks. May be told in groups of layers, or only when the
        step is done."""

    def wait(self) -> list[list[Choice]]:
        """Wait for its end. What each chunk chose, drawn with seed `sampling.seed + sample`:

        - [] without logits; and for a sequence that sits the step out, whose last token is computed once more then.
        - One Choice for each of the sequence's `samples`, where there are several.
        - Else the tokens that follow the sequence's, in order: all draft tokens that are what the logits before them
          choose, and what the logits behind these choose; so 1 to `num_logits`.
        """


class ModelRunner(Protocol):
    """Computes batches over a pool of KV blocks that it owns. Block tables say where; it never chooses.

    What is launched takes effect in order of the calls; the host may be ahead of it. Whoever waits for nothing but an
    event of its own is woken when a step, or a group of its layers, is done.
    """

    def launch(self, chunks: Seq[Chunk]) -> LaunchedStep:
        """Begin to compute the chunks' KV, in one batch."""

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        """Copy the KV of whole blocks, (source, destination) each."""

    def forget(self, sequence: Sequence) -> None:
        """The sequence is in no later step, unless it starts anew. Once more does nothing."""


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
    """What the step that retired did, if one did. Each list is in batch order; of tokens that one sample got together,
    `sampled` has the first one first. A prompt to hand off whose tokens are sampled is parked, with its blocks held
    until `release`."""

    advanced: list[Sequence] = field(default_factory=list)  # had KV of their prompt computed
    sampled: list[SampledToken] = field(default_factory=list)
    num_tokens: int = 0  # computed by the step that retired
    again: bool = False  # go on at once; False: nothing could be done before an event or the end of a step
