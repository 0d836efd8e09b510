"""A request on its way through a prefill node, and the decode node that it goes to."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from baton.messages import AttemptId, Commit, DecodeTarget, Grant, HandedOff, Prefill, Sample, SampleEnd, Tokens
from engine.sequence import Sequence
from engine.step import SampledToken
from kv_transfer.parts import Piece


def needs_decode_node(prefill: Prefill) -> bool:
    """Whether its samples may have more tokens after the one that is sampled here. A beam search is the decode node's
    from its first token on."""
    if prefill.sampling.beam_width:
        return True
    return bool(prefill.samples) and prefill.sampling.max_tokens - len(prefill.samples[0].output_tokens) > 1


class HandoffState(enum.Enum):
    """What the request still waits for here. The grant may come before or after the prompt is computed.

    COMPUTING --prompt computed, granted--> SENDING --Commit accepted, all parts sent--> (gone: HandedOff)
        |                                      |
        +--- all samples ended with the first token: End, Release
        `--- abort, deadline, refused, peer lost: End(error), Release; granted parts are drained
    """

    COMPUTING = "computing"
    SENDING = "sending"


@dataclass(slots=True)
class Handoff:
    """`results`: what the prompt's last chunk sampled, held back from the router until D has granted or every sample
    has ended. `parts` are known from the grant on; D derives them from the same numbers. The blocks from
    `grouped_from_block` on travel by `layer_groups`."""

    message: Prefill
    sequence: Sequence
    received: float
    deadline: float
    started: float = 0.0
    reserved: bool = False  # a Reserve was sent, so an end without handoff needs a Release
    state: HandoffState = HandoffState.COMPUTING
    grouped_from_block: int = 0
    layer_groups: int = 1
    grant: Grant | None = None
    parts: tuple[Piece, ...] = ()
    credits: int = 0
    next_part: int = 0  # parts below it are on their way: gathered, or their gather is queued
    num_sent: int = 0  # parts that have left
    gathered: float = 0.0  # when the last sent part was in its slot
    sent: float = 0.0  # when the last sent part had left
    results: list[Tokens | SampleEnd] = field(default_factory=list)
    computed: float | None = None  # when the prompt was computed
    accepted: bool = False  # D accepted the Commit
    prefill_s: float = 0.0  # from scheduling of the first chunk to the first token

    @property
    def attempt_id(self) -> AttemptId:
        return self.message.attempt_id

    @property
    def target(self) -> DecodeTarget | None:
        return self.message.decode

    def goes_to(self, peer: DecodePeer) -> bool:
        """Compared by incarnation: routers may know the peer by different addresses."""
        return self.target is not None and self.target.incarnation == peer.target.incarnation

    @property
    def outputs(self) -> dict[int, tuple[int, ...]]:
        """Output tokens of each unfinished sample, the one sampled here included."""
        ended = {r.sample for r in self.results if isinstance(r, SampleEnd)}
        fresh = {r.sample: r.token_ids for r in self.results if isinstance(r, Tokens)}
        if self.message.sampling.beam_width:
            return {sample.index: () for sample in self.message.samples}
        return {s.index: s.output_tokens + fresh[s.index] for s in self.message.samples if s.index not in ended}

    def sampled(self, token: SampledToken, now: float) -> None:
        """The prompt is computed; this is the first token of one of its samples, which a beam search does not use."""
        self.computed, self.prefill_s = now, now - self.started
        if self.message.sampling.beam_width:
            return
        logprobs = (token.logprobs,) if token.logprobs else ()
        self.results.append(Tokens(token.sample, token.index, (token.token,), logprobs))
        if token.finish:
            self.results.append(SampleEnd(token.sample, token.finish, token.stop_token_id))

    @property
    def all_gathered(self) -> bool:
        return self.grant is not None and self.next_part == len(self.parts)

    @property
    def all_sent(self) -> bool:
        return self.grant is not None and self.num_sent == len(self.parts)

    def part_sent(self, now: float, flight_s: float) -> None:
        """A part has left, `flight_s` after it was in its slot, or its stores into D's slot began."""
        self.num_sent += 1
        self.gathered, self.sent = max(self.gathered, now - flight_s), now

    def commit(self, grant: Grant, now: float, age_s: float) -> Commit:
        """The Commit that gives the request to the decode node, `age_s` after its prompt was computed."""
        prefill = self.message
        assert prefill.decode is not None
        return Commit(
            lease=grant.lease,
            attempt_id=prefill.attempt_id,
            target_incarnation=prefill.decode.incarnation,
            prompt_tokens=prefill.prompt_tokens,
            samples=tuple(Sample(index, tokens) for index, tokens in self.outputs.items()),
            sampling=prefill.sampling,
            deadline_s=self.deadline - now,
            cache_salt=prefill.cache_salt,
            age_s=age_s,
        )

    def handed_off(self) -> HandedOff:
        """The final update. Transfers before the prompt was computed are hidden behind it and count as no time."""
        assert self.computed is not None
        gathered, sent = max(self.computed, self.gathered), max(self.computed, self.sent)
        return HandedOff(self.prefill_s, gathered - self.computed, sent - gathered)

    def ready_part(self, block_size: int, num_layers: int) -> Piece | None:
        """The next part, if D has a slot for it and its KV is computed: in all layers of its blocks, or because the
        first `num_layers` layers of all blocks are."""
        if self.next_part >= min(self.credits, len(self.parts)):
            return None
        part, sequence = self.parts[self.next_part], self.sequence
        last_token = min((part.first + part.num_blocks) * block_size, sequence.num_tokens)
        is_ready = sequence.num_computed_tokens >= last_token or part.end_layer <= num_layers
        return part if is_ready else None


@dataclass(slots=True)
class Drain:
    """A dead lease with parts for which D has posted receives: each is sent as a header without blocks, because a
    posted receive is never cancelled. `closed`: D has ended the lease, so no credit can follow."""

    attempt_id: AttemptId
    next_part: int
    credits: int
    num_parts: int
    closed: bool = False

    @property
    def over(self) -> bool:
        return self.closed and self.next_part >= self.credits


@dataclass(slots=True)
class DecodePeer:
    """A decode node over one stream, as seen by this prefill node. Lease numbers increase, which identifies repeats and
    leases of earlier streams."""

    target: DecodeTarget
    lost: bool = False  # its transport is gone, its stream is about to be closed
    first_lease: int = 0  # 0: none yet
    last_lease: int = 0
    leases: dict[int, Handoff] = field(default_factory=dict)
    drains: dict[int, Drain] = field(default_factory=dict)
    drained: dict[AttemptId, set[int]] = field(default_factory=dict)  # leases of the drains, by attempt

    def forget_drain(self, lease: int) -> None:
        """Forget a drain that has no credits left and can get no more."""
        attempt_id = self.drains.pop(lease).attempt_id
        leases = self.drained[attempt_id]
        leases.discard(lease)
        if not leases:
            del self.drained[attempt_id]
