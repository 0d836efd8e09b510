"""One sequence of tokens on its way through an engine."""

from __future__ import annotations

import enum
from array import array
from collections.abc import Hashable, Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import InitVar, dataclass, field
from typing import Any

from baton.block_hash import BlockHash, next_hash, root_hash
from baton.messages import AttemptId
from baton.priority import due_s
from baton.sampling import SamplingParams
from engine.beams import BeamGroup
from engine.logits_processor import LogitsProcessorChain
from engine.token_matcher import TokenMatcher


class SequenceState(enum.Enum):
    """Where a sequence stands in its engine.

                                  <-----------resumed-----------.
        WAITING --admitted--> RUNNING --prompt done, hand_off--> PARKED
           ^                   |   |    or parked                  |
           `-----preempted-----'   `--last token, or released--.   | released
           |                                                   v   v
           `---------------------released------------------> FINISHED

    A waiting sequence holds no blocks; a running or parked one does; a finished one never does again. A prompt to hand
    off is never resumed.
    """

    WAITING = "waiting"
    RUNNING = "running"
    PARKED = "parked"
    FINISHED = "finished"


_MOVES = {
    SequenceState.WAITING: {SequenceState.RUNNING, SequenceState.FINISHED},
    SequenceState.RUNNING: {SequenceState.WAITING, SequenceState.PARKED, SequenceState.FINISHED},
    SequenceState.PARKED: {SequenceState.RUNNING, SequenceState.FINISHED},
    SequenceState.FINISHED: set[SequenceState](),
}


@dataclass(slots=True, eq=False)
class Sequence:
    """The tokens of one sample (of several, until they fork) and how far their KV has been computed.

    `tokens` is prompt + output, of which `output` is what there is at the beginning; only the engine appends to it.
    `samples` are the indexes of the request's answers that it stands for: several share one prefill, and fork at the
    first token.
    `hand_off`: park after the prompt, with its blocks held, instead of generating. `priority`: a lower one is admitted
    earlier and preempted later, see `baton.priority`. `arrived_s`: when it came to this node; it had waited elsewhere
    for `age_s` by then. `lane`: what it may have to wait for while it holds its blocks, see `engine.waiting_sequences`.
    `runs_ahead`: whether its next step may be launched before the host knows the tokens of the last one. False if the
    host contributes draft tokens or masks for the logits to the next step. `extensions`: what its steps carry besides
    tokens, by name, see `engine.model.extensions`. `matcher`: what its output must match; it has accepted the output so
    far. `processors`: see `engine.logits_processor`. `beams`: the group that it is a beam of. With any of these three,
    the sequence does not run ahead. `num_prompt_logprobs`: report logprobs of the prompt, with this many of the most
    likely tokens; None: do not. Forks and adopted sequences do not report them. If KV depends on `extensions`,
    `cache_salt` must differ from that of other sequences with the same tokens.
    """

    attempt_id: AttemptId
    samples: list[int]
    prompt_tokens: Seq[int]
    sampling: SamplingParams
    output: InitVar[Iterable[int]] = ()
    hand_off: bool = False
    cache_salt: str = ""
    arrived_s: float = 0.0
    age_s: float = 0.0
    priority: int = 0
    lane: Hashable = None
    runs_ahead: bool = True
    extensions: Mapping[str, Any] = field(default_factory=dict)
    matcher: TokenMatcher | None = None
    num_prompt_logprobs: int | None = None
    processors: LogitsProcessorChain | None = None
    beams: BeamGroup[Sequence] | None = None

    # Written by the engine only; others may read them (Engine.adopt has the exception, block_table).
    tokens: array[int] = field(init=False)  # of "I": a list of a long prompt's would be slow to make and to copy
    block_table: list[int] = field(default_factory=list)  # see `baton.table_shape`
    num_claimed_blocks: int = 0  # blocks that it will get with its next columns
    num_promised_columns: int = 0  # columns that it was admitted for; while it has fewer, each chunk brings its own
    num_computed_tokens: int = 0  # tokens whose KV exists
    num_launched_tokens: int = 0  # tokens whose KV exists or is being computed
    num_pending_tokens: int = 0  # tokens being sampled: not yet in `tokens`, but a later step may continue from them
    draft_tokens: tuple[int, ...] = ()  # guesses at what follows `tokens`, for the next step to verify
    num_scored_tokens: int = 0  # prompt tokens whose logits have given the logprobs of the tokens after them
    num_cached_tokens: int = 0  # the prefix hit when it was first scheduled
    started_s: float | None = None  # when it was first scheduled
    num_preemptions: int = 0
    stops: bool = False  # no further step samples its next token, see `LiveSequences.stop`
    state: SequenceState = SequenceState.WAITING
    _hashes: list[BlockHash] = field(default_factory=list)

    def __post_init__(self, output: Iterable[int]) -> None:
        self.tokens = array("I", self.prompt_tokens)
        self.tokens.extend(output)
        if self.matcher is not None or self.processors is not None or self.beams is not None:
            self.runs_ahead = False

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_output_tokens(self) -> int:
        return len(self.tokens) - len(self.prompt_tokens)

    @property
    def output_tokens(self) -> tuple[int, ...]:
        return tuple(self.tokens[len(self.prompt_tokens) :])

    @property
    def due_s(self) -> float:
        """When the sequence is due, which is its place in a queue."""
        return due_s(self.priority, self.arrived_s - self.age_s)

    @property
    def rank(self) -> tuple[float, int]:
        """Orders sequences that compete for blocks: the highest gives way first. Beams of a group are neighbours."""
        return self.due_s, self.beams.serial if self.beams else 0

    @property
    def generates(self) -> bool:
        """Whether its next token is appended to it: not so for a prompt to hand off, one about to fork, or a beam."""
        return not self.hand_off and len(self.samples) == 1 and self.beams is None

    @property
    def takes_drafts(self) -> bool:
        """Whether its next step may verify draft tokens: only the KV of its last token is missing, and the step is not
        launched ahead. Penalties, bad words and matchers rule this out, because they depend on tokens chosen
        earlier in the same step, which the sampler does not know."""
        stands = self.num_launched_tokens == self.num_computed_tokens == len(self.tokens) - 1
        generates = self.state is SequenceState.RUNNING and self.generates
        depends = self.sampling.depends_on_output or self.matcher is not None
        return stands and generates and not self.runs_ahead and not depends

    @property
    def takes_forced(self) -> bool:
        """Whether a token to which the matcher leaves no alternative may be appended without asking the sampler: not if
        the choice's logprobs are wanted, if the sampler counts tokens, or if it or a processor may forbid this one."""
        params = self.sampling
        forbids = params.min_tokens or params.bad_words_token_ids or params.allowed_token_ids or self.processors
        return self.matcher is not None and params.num_logprobs < 0 and not params.has_penalties and not forbids

    @property
    def awaits_matcher(self) -> bool:
        """Whether its matcher is still being compiled."""
        return self.matcher is not None and not self.matcher.ready

    @property
    def lacks_prompt_logprobs(self) -> bool:
        """Whether logprobs of its prompt are still to be reported. Its tokens must then all be computed: KV from the
        prefix cache has no logits."""
        return self.num_prompt_logprobs is not None and self.num_scored_tokens < len(self.prompt_tokens) - 1

    @property
    def in_flight(self) -> bool:
        """Whether a launched step that reads or writes its blocks has yet to retire."""
        return self.num_launched_tokens > self.num_computed_tokens

    def num_tokens_to_go(self, max_model_len: int) -> int:
        """How many tokens' KV the next step may compute, including draft tokens. 0: the next tokens are known only when
        a launched step retires, or the sequence waits for its matcher, or it is stopped. A stopped sequence still
        computes what may lie before its last token: after a preemption, or if several tokens came at once."""
        if self.awaits_matcher:
            return 0
        total = len(self.tokens) + self.num_pending_tokens
        if self.stops:
            return max(0, total - 1 - self.num_launched_tokens)
        if self.num_pending_tokens:
            num_output = total - len(self.prompt_tokens)
            if num_output >= self.sampling.max_tokens or total >= max_model_len:
                return 0  # the token being sampled is the last one, whatever it is
        return total + len(self.draft_tokens) - self.num_launched_tokens

    def rewind(self, num_computed_tokens: int) -> None:
        """Reset the sequence to KV of `num_computed_tokens` tokens in its blocks, with nothing in flight."""
        self.num_computed_tokens = self.num_launched_tokens = num_computed_tokens
        self.num_pending_tokens = 0
        self.draft_tokens = ()

    def move_to(self, state: SequenceState) -> None:
        """The only way to change the state."""
        assert state in _MOVES[self.state], f"{self.attempt_id}: {self.state.name} -> {state.name}"
        self.state = state

    def block_hashes(self, num_blocks: int, block_size: int) -> list[BlockHash]:
        """Hashes of the first `num_blocks` full blocks. Each is computed once."""
        assert num_blocks * block_size <= len(self.tokens)
        while len(self._hashes) < num_blocks:
            start = len(self._hashes) * block_size
            parent = self._hashes[-1] if self._hashes else root_hash(self.cache_salt)
            self._hashes.append(next_hash(parent, self.tokens[start : start + block_size]))
        return self._hashes[:num_blocks]

    def set_block_hashes(self, names: Iterable[BlockHash]) -> None:
        """Set hashes of its first full blocks that were computed elsewhere from the same tokens; computing them takes 2
        to 5 ms for 32,000 tokens."""
        self._hashes = list(names)

    def child(self, sample: int, output_tokens: tuple[int, ...], num_shared_blocks: int = 0) -> Sequence:
        """A sequence for one of the samples, with that output and no blocks.

        The first `num_shared_blocks` blocks have the same tokens as this sequence's, so it takes over their hashes.
        """
        child = Sequence(
            attempt_id=self.attempt_id,
            samples=[sample],
            prompt_tokens=self.prompt_tokens,
            sampling=self.sampling,
            output=output_tokens,
            cache_salt=self.cache_salt,
            arrived_s=self.arrived_s,
            age_s=self.age_s,
            priority=self.priority,
            runs_ahead=self.runs_ahead,
            extensions=self.extensions,
            matcher=self.matcher and self.matcher.fork(output_tokens[self.num_output_tokens :]),
            processors=self.processors,
            beams=self.beams,
            num_cached_tokens=self.num_cached_tokens,
            started_s=self.started_s,
        )
        child._hashes = self._hashes[:num_shared_blocks]
        return child
