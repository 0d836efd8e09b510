"""The state of a request in the router: its samples, its attempts on nodes, and the events that its client gets."""

from __future__ import annotations

import copy
import dataclasses
import enum
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from baton.block_hash import BlockHash
from baton.errors import (
    BatonError,
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    NodeUnavailable,
    PeerLost,
    TransferError,
)
from baton.messages import (
    Adopted,
    AttemptId,
    DecodeTarget,
    HandedOff,
    Prefill,
    Sample,
    SampleEnd,
    Tokens,
)
from baton.prompt_logprobs import PromptLogprobs
from baton.sampling import SamplingParams
from baton.telemetry.timeline import AttemptTimeline, Timeline
from router.requests.request_record import UNPREPARED, Preparation, RequestRecord
from router.versions import ModelVersion


class AttemptState(enum.Enum):
    """The state of one attempt. UNPLACED: no node can take it at the moment.

        (UNPLACED) --a node comes--> QUEUED

        QUEUED --Started--> PREFILLING --first token--> HANDING_OFF --Adopted--> DECODING --End--> (gone)
           |                    |                            |                      |
           `--------------------+--- node lost, error -------+----------------------'--> next attempt, or the end

    Messages of two nodes may overtake each other, so Adopted can come in any of the first three states. Without a
    handoff (decode node alone, or all samples ended on token 0) HANDING_OFF or DECODING may be skipped. If the decode
    node streams the first token, the client gets an attempt's tokens in DECODING, or when their sample ends.
    """

    UNPLACED = "unplaced"
    QUEUED = "queued"
    PREFILLING = "prefilling"
    HANDING_OFF = "handing_off"
    DECODING = "decoding"


FirstToken = Literal["prefill", "decode"]
"""Which node's message lets the client have the first token. With the prefill node's, it comes at once and the handoff
is a gap behind it; with the decode node's, the handoff is part of the time to the first token."""


class RoutedRequest(NamedTuple):
    """A request of the front ends: token ids in, `n` samples out. `sampling.seed` has already been drawn.

    `block_hashes`: of the prompt's full blocks, as the nodes compute them. `version`: whose tokens the prompt is made
    of; None: any node's. `preparation`: what was done before, for its timeline."""

    request_id: str
    prompt_tokens: tuple[int, ...]
    n: int
    sampling: SamplingParams
    deadline_s: float
    cache_salt: str = ""
    priority: int = 0
    block_hashes: tuple[BlockHash, ...] = ()
    version: ModelVersion | None = None
    preparation: Preparation = UNPREPARED

    @property
    def has_prefill(self) -> bool:
        """Whether there is anything for a prefill node: the last token of a beam search's prompt is the decode
        node's."""
        return not self.sampling.beam_width or len(self.prompt_tokens) > 1


@dataclass(slots=True)
class RequestTimings:
    """Durations in seconds, each by one process's own clock, of the attempt that got furthest. `first_token_s`: until
    the client got a token, 0 if it never did; `expected_first_token_s`: what the first attempt's
    placement expected of it. The durations of the handoff are those of `HandedOff` and `Adopted`."""

    queue_s: float = 0.0
    prefill_s: float = 0.0
    gather_s: float = 0.0
    wire_s: float = 0.0
    commit_s: float = 0.0
    transfer_s: float = 0.0
    scatter_s: float = 0.0
    step_wait_s: float = 0.0
    handoff_s: float = 0.0
    first_token_s: float = 0.0
    expected_first_token_s: float = 0.0
    total_s: float = 0.0
    num_cached_tokens: int = 0
    num_decode_cached_tokens: int = 0
    transfer_bytes: int = 0
    num_attempts: int = 0
    num_moves: int = 0
    prefill_node: str = ""
    decode_node: str = ""

    def handed_off(self, message: HandedOff) -> None:
        self.prefill_s, self.gather_s, self.wire_s = message.prefill_s, message.gather_s, message.wire_s

    def adopted(self, message: Adopted) -> None:
        self.commit_s, self.transfer_s, self.scatter_s = message.commit_s, message.transfer_s, message.scatter_s
        self.step_wait_s, self.handoff_s = message.step_wait_s, message.handoff_s
        self.num_decode_cached_tokens = message.num_cached_tokens
        self.transfer_bytes = message.transfer_bytes


@dataclass(frozen=True, slots=True)
class RequestEnd:
    """The only end of a request. `error` None: every sample ended by itself."""

    error: BatonError | None
    timings: RequestTimings
    timeline: Timeline | None = field(default=None, compare=False)


SampleEvent = Tokens | SampleEnd
RequestEvent = PromptLogprobs | SampleEvent | RequestEnd
"""What nodes tell is passed on as it is, where all of it is new."""


@dataclass(slots=True)
class SampleState:
    """One sample: tokens accepted in order, and items that came too early from the other node.

    Accepted tokens survive their attempt, even while they are `held` back from the client: the next attempt continues
    after them, and the client gets both when a decode node goes on, or before the request's end.
    """

    index: int
    tokens: list[int] = field(default_factory=list)
    ended: bool = False
    early: list[SampleEvent] = field(default_factory=list)
    held: list[SampleEvent] = field(default_factory=list)  # accepted, but not emitted to the client yet


@dataclass(slots=True)
class Attempt:
    """One attempt at some samples of a request, placed on a prefill and a decode node, or on a decode node alone.

    `prefill` is the incarnation that got the Prefill message; `decode` is None when that node decodes too. `deadline_s`
    is the one in the message. `num_tokens`: to be computed before it generates, its prompt's and those of its output
    that were generated elsewhere. `prefill_s`: what these were expected to take; `num_promised`: blocks that the node
    that generates will give it; `num_answers`: that go on there; `num_cached`: of its tokens, as the node found when it
    began.

    `target`: the decode node that the attempt is to move to, as long as the one that generates has not handed it over.
    Then that one takes the place of `prefill`, and the target that of `decode`. `visited`: where it has been before.
    """

    id: AttemptId
    samples: list[SampleState]
    prefill: str
    decode: str | None
    deadline_s: float
    record: AttemptTimeline
    prefill_s: float = 0.0
    num_promised: int = 0
    num_answers: int = 0
    num_tokens: int = 0
    state: AttemptState = AttemptState.QUEUED
    num_cached: int | None = None
    prefilled: bool = False  # its prompt no longer occupies the prefill node
    handed_off: bool = False
    end_waits: bool = False  # D's End came while tokens of P are still under way
    target: str | None = None
    target_lost: bool = False
    num_moves: int = 0  # that were asked for
    ask_at: float = 0.0  # not before then
    visited: frozenset[str] = frozenset()

    def sample(self, index: int) -> SampleState | None:
        """None: this attempt is not about that sample."""
        first = self.samples[0]  # nearly always the only one
        return first if first.index == index else next((s for s in self.samples if s.index == index), None)

    @property
    def unfinished(self) -> list[SampleState]:
        return [s for s in self.samples if not s.ended]

    @property
    def generates_on(self) -> str:
        return self.decode or self.prefill

    def may_go_to(self, incarnation: str) -> bool:
        """Whether the attempt has never been on that node, whose late messages would count again."""
        return incarnation not in self.visited and incarnation not in self.placed_on

    @property
    def placed_on(self) -> tuple[str, ...]:
        """The incarnations that will hold its prompt's blocks."""
        return (self.prefill, self.decode) if self.decode else (self.prefill,)

    @property
    def awaits_decode(self) -> bool:
        """Whether a handoff is to come and the decode node has not gone on yet."""
        return self.decode is not None and self.state is not AttemptState.DECODING

    def nodes(self) -> list[str]:
        """The incarnations that may still hold something of this attempt."""
        prefill = [] if self.handed_off else [self.prefill]
        return prefill + [incarnation for incarnation in (self.decode, self.target) if incarnation]

    def depends_on(self, incarnation: str, has_stopped: bool = False) -> bool:
        """Whether the attempt is lost with that node. The prefill node matters until it has sent HandedOff and the
        decode node has sent Adopted. If it has stopped after its work, and not died, HandedOff is enough: its parts
        have left, and the decode node says if one has not come."""
        if incarnation == self.decode:
            return True
        if incarnation != self.prefill or (has_stopped and self.handed_off):
            return False
        return not self.handed_off or self.state is not AttemptState.DECODING or any(s.early for s in self.samples)

    def fails_to_move(self, error: BatonError) -> bool:
        """Whether the error is of its KV's way to the target, which a prefill node's has behind it, or of the target:
        the node that generates is available, or would not say so."""
        return self.target is not None and isinstance(error, TransferError | NodeUnavailable)

    def suspects(self, error: BatonError, speaker: str) -> set[str]:
        """The nodes that the next attempt should avoid. A node that lost its peer blames the peer. Otherwise a decode
        node speaks for itself, and a prefill node for both, since it passes on a decode node's refusal."""
        if self.target is not None and self.fails_to_move(error):
            return {self.target}
        both = {self.prefill, self.decode or self.prefill}
        if isinstance(error, PeerLost):
            return both - {speaker} or both
        return {speaker} if speaker == self.decode else both


@dataclass(slots=True, eq=False)
class Unplaced:
    """Samples of a request that wait for a node: their next attempt, and why the previous one failed. `cause`: of
    which kind that was, for metrics; empty: there was none."""

    request_state: RequestState
    samples: list[SampleState]
    key: str
    attempt: int
    error: BatonError | None = None
    cause: str = ""

    def refused(self, error: BatonError) -> BatonError:
        """What ends it if the nodes that there are refuse it. Of a later attempt this is not the client's mistake: a
        node that is gone had taken it."""
        if not self.attempt or self.error is None:
            return error
        kind = NodeUnavailable if isinstance(error, InvalidRequest) else type(error)
        return kind(f"{self.error.message}; {error.message}")


@dataclass(slots=True)
class RequestState:
    """A live request: its samples, and the attempts that will finish those that have not ended."""

    request: RoutedRequest
    arrived: float
    deadline: float
    samples: list[SampleState]
    attempts: dict[AttemptId, Attempt] = field(default_factory=dict)
    unplaced: list[Unplaced] = field(default_factory=list)
    timings: RequestTimings = field(default_factory=RequestTimings)
    avoid: set[str] = field(default_factory=set)  # nodes that failed it
    blamed: set[str] = field(default_factory=set)  # those of them that a peer took for lost
    lost: dict[str, str] = field(default_factory=dict)  # nodes that were lost while they ran it, and how
    client_has_token: bool = False
    num_scored: int = 0  # tokens of the prompt whose logprobs its client has
    version: ModelVersion | None = None  # that of its nodes, from its first placement on
    record: RequestRecord = field(default_factory=RequestRecord)

    def __post_init__(self) -> None:
        self.version = self.request.version

    @property
    def has_begun(self) -> bool:
        """Whether a part of its answer is there, so that another model must not go on with it."""
        return self.num_scored > 0 or any(sample.tokens or sample.ended for sample in self.samples)

    def clear_blame(self, incarnation: str) -> None:
        """The node lives: the request has not ended it."""
        self.lost.pop(incarnation, None)
        self.blamed.discard(incarnation)

    @property
    def lacks_prompt_logprobs(self) -> bool:
        """Whether logprobs of the prompt are still to come."""
        if self.request.sampling.num_prompt_logprobs is None:
            return False
        return self.num_scored < len(self.request.prompt_tokens) - 1

    def take_prompt_logprobs(self, piece: PromptLogprobs) -> PromptLogprobs | None:
        """What is new of a piece, now taken; None: nothing. Raises InternalError if the piece was not asked for, or
        leaves tokens out."""
        known = 1 + self.num_scored - piece.first_index
        asked = self.request.sampling.num_prompt_logprobs
        if asked is None or piece.num_top > asked or piece.end_index > len(self.request.prompt_tokens) or known < 0:
            raise InternalError(
                f"logprobs of tokens {piece.first_index} to {piece.end_index - 1} of the prompt, {piece.num_top} for "
                f"each, do not follow those of {self.num_scored}, with {asked} wanted"
            )
        if known >= piece.num_tokens:
            return None
        self.num_scored = piece.end_index - 1
        return piece.without_first(known)

    def prefill(self, attempt: Attempt, decode: DecodeTarget | None, now: float) -> Prefill:
        return Prefill(
            attempt_id=attempt.id,
            target_incarnation=attempt.prefill,
            prompt_tokens=self.request.prompt_tokens,
            samples=tuple(Sample(s.index, tuple(s.tokens)) for s in attempt.samples),
            sampling=self._sampling,
            deadline_s=self.deadline - now,
            decode=decode,
            cache_salt=self.request.cache_salt,
            priority=self.request.priority,
            age_s=now - self.arrived,
        )

    @property
    def _sampling(self) -> SamplingParams:
        """Those of the next attempt: logprobs of the prompt are computed again only if some have not come."""
        sampling = self.request.sampling
        if sampling.num_prompt_logprobs is None or self.lacks_prompt_logprobs:
            return sampling
        return dataclasses.replace(sampling, num_prompt_logprobs=None)

    def overdue(self, why_not_ready: str | None) -> BatonError:
        """What ends a request whose time is up: it is the nodes' fault if there was none to run it. `why_not_ready`
        None: there are nodes."""
        waited = f"within {self.request.deadline_s:g} s"
        if self.attempts or not self.unplaced:
            return DeadlineExceeded(f"not finished {waited}")
        error = self.unplaced[0].error
        if why_not_ready is None and error is None:
            return DeadlineExceeded(f"no room on the decode nodes {waited}")
        why = [error.message] if error else []
        why += [why_not_ready] if why_not_ready else []
        return NodeUnavailable(f"no node could take it {waited}: {'; '.join(why)}")

    def end(self, error: BatonError | None, now: float) -> RequestEnd:
        self.timings.total_s = now - self.arrived
        return RequestEnd(error, self.timings, self.timeline(error, now))

    def timeline(self, error: BatonError | None, now: float, is_live: bool = False) -> Timeline:
        """At its end, or of what has happened until now."""
        record, prepared = self.record, self.request.preparation
        return Timeline(
            request_id=self.request.request_id,
            model=self.version.name if self.version else "",
            received_at=prepared.received_at,
            read_at_s=prepared.read_at_s,
            tokenized_at_s=prepared.tokenized_at_s,
            submitted_at_s=record.submitted_at_s,
            first_token_at_s=self.timings.first_token_s,
            ended_at_s=now - self.arrived,
            num_prompt_tokens=len(self.request.prompt_tokens),
            num_output_tokens=sum([len(sample.tokens) for sample in self.samples]),
            num_samples=len(self.samples),
            attempts=tuple(
                map(copy.copy, record.attempts) if is_live else record.attempts
            ),  # what is live goes on changing
            first_attempt=record.attempts.index(record.first) if record.first in record.attempts else None,
            num_attempts=record.num_attempts,
            error=error.message if error else "",
            error_code=error.code_name if error else "",
            trace=prepared.trace,
            first_waits_for_decode=record.first_waits_for_decode,
            is_live=is_live,
        )

    def note_first_token(self, sample: SampleState, was_held: bool, now: float) -> None:
        """Its client gets the first token, of that sample; `was_held`: until the decode node went on with it, if it was
        to."""
        self.client_has_token = True
        self.timings.first_token_s = now - self.arrived
        running = [a.record for a in self.attempts.values() if a.sample(sample.index) is sample]
        self.record.first = running[-1] if running else self.record.last
        self.record.first_waits_for_decode = was_held or self.request.sampling.beam_width > 0
