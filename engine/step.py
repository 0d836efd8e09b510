"""The inputs and outputs of one engine step."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Protocol

from baton.messages import TokenLogprobs
from baton.prompt_logprobs import PromptLogprobs
from baton.sampling import FinishReason
from engine.beams import BeamGroup
from engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Chunk:
    """The tokens [start, start + length) of a sequence: the step computes their KV, and they are its queries in
    attention. All KV before `start` exists, or is computed by a step launched earlier. The last token may be one that
    such a step samples; then only the runner knows its value.

    `num_logits`: how many of its last tokens need logits, each to choose the token that follows. 0: the chunk ends
    before the sequence's last token. 1: it ends with that token. More: the sequence's draft tokens follow that token. A
    chunk of a sequence that only generates, a decode, has logits for all of its tokens.
    """

    sequence: Sequence
    start: int
    length: int
    num_logits: int

    @classmethod
    def of(cls, sequence: Sequence, start: int, length: int) -> Chunk:
        """The chunk for the sequence's current tokens."""
        num_logits = start + length - len(sequence.tokens) - sequence.num_pending_tokens + 1
        return cls(sequence, start, length, num_logits if num_logits > 0 else 0)

    @property
    def end(self) -> int:
        return self.start + self.length

    @property
    def is_decode(self) -> bool:
        """Whether all its tokens have logits: they belong to the sequence's answer, or are just the last token of its
        prompt."""
        return self.length == self.num_logits

    @property
    def samples_token(self) -> bool:
        """Whether the chunk reaches the sequence's last token."""
        return self.num_logits > 0

    @property
    def scored_positions(self) -> range:
        """Its positions whose logits give logprobs of the prompt, each for the token after it. Empty unless the
        sequence asks for them."""
        seq = self.sequence
        if not seq.lacks_prompt_logprobs:
            return range(0)
        first = max(self.start, seq.num_scored_tokens)
        return range(first, max(first, min(self.end, len(seq.prompt_tokens) - 1)))

    @property
    def draft_tokens(self) -> tuple[int, ...]:
        """The draft tokens at its end, after the sequence's own tokens."""
        return self.sequence.draft_tokens[: self.num_logits - 1] if self.num_logits > 1 else ()


@dataclass(frozen=True, slots=True)
class Choice:
    """A chosen token, and its logprobs if they were asked for. `failure`: why the token must not count and its request
    must end."""

    token: int
    logprobs: TokenLogprobs | None = None
    failure: str | None = None


class LaunchedStep(Protocol):
    """A step that the runner computes, or has computed."""

    def is_done(self) -> bool:
        """Whether `wait` would return at once."""

    def num_layers_done(self) -> int:
        """How many layers, counted from the first, have all KV of the step's chunks. May advance by groups of layers,
        or only when the step is done."""

    def wait(self) -> list[list[Choice]]:
        """Wait for its end. Returns the choices of each chunk, drawn with seed `sampling.seed + sample`:

        - [] without logits, or if the runner skips the sequence in this step; its last token is then computed again.
        - One Choice for each of the sequence's `samples`, if it has several.
        - Otherwise the tokens that follow the sequence's, in order: each draft token that equals the choice before it,
          up to the first that does not, and one more choice after these; so 1 to `num_logits`.
        """

    def prompt_logprobs(self) -> list[tuple[Sequence, PromptLogprobs]]:
        """After `wait`: the logprobs of the prompts' tokens after the chunks' `scored_positions`, in their order."""


Begun = Callable[[float], None]
"""Called when a launch has begun a step, with the seconds that it waited for other data parallel nodes before."""


class ModelRunner(Protocol):
    """Computes batches over a pool of KV blocks that it owns. Block tables name the blocks; the runner never picks one.

    Launches take effect in the order of the calls; the host may run ahead of them. A runner that computes on a device
    of its own wakes the loop of the engine's thread when a step, or a group of its layers, is done.
    """

    @property
    def only_launches(self) -> bool:
        """Whether `launch` returns before the device has begun. If False, it takes as long as the step itself, or as
        its first stage."""

    def launch(self, chunks: Seq[Chunk], begun: Begun = lambda waited_s: None) -> LaunchedStep:
        """Start to compute the chunks in one batch. begun: called once, as soon as the device has something to compute;
        the launch may go on while it does."""

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        """Copy the KV of whole blocks, (source, destination) each."""

    def forget(self, sequence: Sequence) -> None:
        """Drop the sequence's state: it is in no later step, unless it starts anew. Idempotent."""


@dataclass(frozen=True, slots=True)
class SampledToken:
    """Token `index` of the output of sample `sample`. `finish`: this token ended the sample (an EOS is reported too).
    `error`: why its matcher accepts no further token. Such a token may be a wrong one, so it is not in a `StepResult`.

    `sequence` is the sample's own sequence; for a hand_off prompt it is the parked one, whose `tokens` stay those of
    the prompt.
    """

    sequence: Sequence
    sample: int
    index: int
    token: int
    logprobs: TokenLogprobs | None = None
    finish: FinishReason | None = None
    stop_token_id: int | None = None
    error: str | None = None


@dataclass(slots=True)
class StepResult:
    """What the retired step did, if one retired. Each list is in batch order; if a sample got several tokens, `sampled`
    has them in order. A prompt to hand off is parked once its first tokens are sampled, and holds its blocks until
    `release`."""

    advanced: list[Sequence] = field(default_factory=list)  # sequences that had KV of their prompt computed
    searched: list[BeamGroup[Sequence]] = field(default_factory=list)  # beam searches that have ended
    failed: list[tuple[Sequence, str]] = field(default_factory=list)  # those without a next token, and why: must end
    sampled: list[SampledToken] = field(default_factory=list)
    prompt_logprobs: list[tuple[Sequence, PromptLogprobs]] = field(default_factory=list)  # to report before `sampled`
    num_tokens: int = 0  # tokens that the retired step computed
    device_s: float = 0.0  # how long a device computed it beside this thread; 0: that is unknown, or none did
    again: bool = False  # compute again at once; False: nothing to do before an event or the end of a step
