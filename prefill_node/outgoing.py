"""The prefill node's requests, each on its way to a decode node: Reserve, Grant, parts, Commit, and one exit.

Nothing here runs a model. Memory on D is reserved when a prompt's first chunk is scheduled (so queued prompts hold
nothing there), and granted while that chunk is computed. Parts leave as their blocks are computed and D has slots
(`parts_out`). The first token goes to the router once D has granted, and the Commit gives the request to D.
"""

from __future__ import annotations

from dataclasses import replace

from baton.deadlines import Deadlines
from baton.errors import BatonError, DeadlineExceeded, PeerLost, TransferError
from baton.layout import KvLayout
from baton.messages import (
    AttemptId,
    CommitReply,
    Credit,
    End,
    Grant,
    HandedOff,
    Prefill,
    Refuse,
    Release,
    Reserve,
    Started,
)
from engine.engine import Engine
from engine.holdings import Holding
from engine.sequence import Sequence
from engine.step import SampledToken
from node.events import ClosePeer
from node.outbox import Outbox
from prefill_node.handoff import DecodePeer, Drain, Handoff, HandoffState, needs_decode_node
from prefill_node.parts_out import PartsOut


class Outgoing:
    """Tracks prompts from intake on, also while they wait in the engine's queue. Releases their sequences in the
    engine; sends to decode nodes and routers through `outbox`. The cost of a turn depends on what its events and steps
    touched, not on the number of prompts."""

    def __init__(self, engine: Engine, parts: PartsOut, outbox: Outbox) -> None:
        self._engine = engine
        self._parts = parts
        self._outbox = outbox
        self._handoffs: dict[AttemptId, Handoff] = {}
        self._deadlines = Deadlines[AttemptId]()
        self._touched: dict[AttemptId, None] = {}  # handoffs with news since they last moved on
        self._starved: dict[AttemptId, None] = {}  # handoffs with a part for which no slot was free
        self._peers: dict[str, DecodePeer] = {}
        self._draining: dict[tuple[str, int], None] = {}  # peer, lease: drains likewise touched or starved

    def __len__(self) -> int:
        return len(self._handoffs)

    def add(self, prefill: Prefill, sequence: Sequence, now: float, deadline: float) -> None:
        self._handoffs[prefill.attempt_id] = Handoff(prefill, sequence, now, deadline)
        self._deadlines.set(prefill.attempt_id, deadline)

    @property
    def idle(self) -> bool:
        """Whether nothing is here, and no decode node waits for parts of a dead lease."""
        return not self._handoffs and not any(peer.drains for peer in self._peers.values())

    def attempts(self) -> list[AttemptId]:
        """All attempts here."""
        return [*self._handoffs]

    def next_deadline(self) -> float | None:
        return self._deadlines.next()

    def holdings(self) -> list[Holding]:
        """The engine's holdings, each with its lease on the decode node, if there is one."""
        return [self._with_lease(holding) for holding in self._engine.holdings()]

    def _with_lease(self, holding: Holding) -> Holding:
        handoff = self._handoffs.get(holding.attempt_id)
        if handoff is None or handoff.target is None:
            return holding
        lease = handoff.grant.lease if handoff.grant else 0
        return replace(holding, lease=lease, peer=handoff.target.incarnation)

    def check_integrity(self) -> None:
        for incarnation, peer in self._peers.items():
            for lease, handoff in peer.leases.items():
                assert self._handoffs[handoff.attempt_id] is handoff
                assert handoff.grant
                assert handoff.grant.lease == lease
                assert peer.target.incarnation == incarnation
            by_attempt = [(attempt_id, lease) for attempt_id, leases in peer.drained.items() for lease in leases]
            assert sorted(by_attempt) == sorted((drain.attempt_id, lease) for lease, drain in peer.drains.items())
        assert len(self._deadlines) == len(self._handoffs)
        for handoff in self._handoffs.values():
            self._check_nothing_is_missed(handoff)

    def _check_nothing_is_missed(self, handoff: Handoff) -> None:
        """Every handoff that could send a part will be visited by `move_on`."""
        block_size = self._engine.config.block_size
        if handoff.attempt_id not in self._touched.keys() | self._starved.keys():
            assert not handoff.ready_part(block_size, 0), f"{handoff.attempt_id} could go on, and does not"

    # ---- what the engine did ----

    def started(self, sequence: Sequence, now: float) -> None:
        """The prompt's first chunk is scheduled: send D a Reserve, if there will be anything to decode."""
        handoff = self._handoffs[sequence.attempt_id]
        handoff.started = now
        self._outbox.to_router(sequence.attempt_id, Started(sequence.num_cached_tokens, now - handoff.received))
        prefill = handoff.message
        if prefill.decode is None or not needs_decode_node(prefill):
            return
        block_size = self._engine.config.block_size
        handoff.grouped_from_block, handoff.layer_groups = self._parts.tail(sequence)
        reserve = Reserve(
            attempt_id=prefill.attempt_id,
            target_incarnation=prefill.decode.incarnation,
            num_tokens=sequence.num_tokens,
            block_hashes=tuple(sequence.block_hashes(sequence.num_tokens // block_size, block_size)),
            num_samples=max(len(prefill.samples), prefill.sampling.beam_width),
            deadline_s=handoff.deadline - now,
            max_total_tokens=len(prefill.prompt_tokens) + prefill.sampling.max_tokens,
            grouped_from_block=handoff.grouped_from_block,
            layer_groups=handoff.layer_groups,
            priority=prefill.priority,
        )
        self._peers.setdefault(prefill.decode.incarnation, DecodePeer(prefill.decode))
        handoff.reserved = True
        self._outbox.to_decode(prefill.decode, reserve)

    def sampled(self, token: SampledToken) -> None:
        # The clock's time, not the turn's: on a CPU the step was computed within the turn.
        self._handoffs[token.sequence.attempt_id].sampled(token, self._engine.clock())

    def advanced(self, sequence: Sequence) -> None:
        """A chunk of the prompt is computed."""
        self._touch(sequence.attempt_id)

    # ---- messages from decode nodes ----

    def hear(self, incarnation: str, message: object) -> None:
        peer = self._peers.get(incarnation)
        if peer is None or not self._parts.is_open(incarnation):
            return
        match message:
            case Grant() as grant:
                self._granted(peer, grant)
            case Credit(lease, credits):
                if handoff := peer.leases.get(lease):
                    handoff.credits = min(max(handoff.credits, credits), len(handoff.parts))
                    self._touch(handoff.attempt_id)
                elif drain := peer.drains.get(lease):
                    drain.credits = min(max(drain.credits, credits), drain.num_parts)
                    self._draining[incarnation, lease] = None
            case Refuse(attempt_id, error):
                if (handoff := self._handoffs.get(attempt_id)) and handoff.goes_to(peer):
                    self._finish(handoff, End(error))
                for over in peer.drained.get(attempt_id, ()):
                    peer.drains[over].closed = True
                    self._draining[incarnation, over] = None
            case CommitReply(lease, _, error):
                if handoff := peer.leases.get(lease):
                    if error:
                        self._finish(handoff, End(error))
                    else:
                        handoff.accepted = True
                        self._touch(handoff.attempt_id)

    def _granted(self, peer: DecodePeer, grant: Grant) -> None:
        if grant.lease <= peer.last_lease:
            return  # a repeat
        peer.last_lease = grant.lease
        peer.first_lease = peer.first_lease or grant.lease
        handoff = self._handoffs.get(grant.attempt_id)
        if handoff is None or handoff.grant or not handoff.reserved or not handoff.goes_to(peer):
            # The request ended while the grant was in flight, or the grant answers no Reserve.
            self._drain(peer, grant.lease, Drain(grant.attempt_id, 0, grant.credits, grant.num_parts))
            self._outbox.to_decode(peer.target, Release(grant.lease, grant.attempt_id))
            return
        handoff.grant, handoff.credits = grant, grant.credits
        handoff.parts = self._parts.plan(handoff, grant)
        peer.leases[grant.lease] = handoff
        self._engine.leave_lane(handoff.sequence)
        self._touch(grant.attempt_id)
        num_parts, num_full = len(handoff.parts), handoff.sequence.num_tokens // self._engine.config.block_size
        if num_parts != grant.num_parts or grant.num_held_blocks > num_full:
            told = f"{grant.num_held_blocks} blocks there and {grant.num_parts} parts to come"
            text = f"decode node {peer.target.address} told of {told}, and they are {num_full} at most and {num_parts}"
            self._finish(handoff, End(TransferError(text)))

    def peer_opened(self, incarnation: str, layout: KvLayout, part_blocks: int) -> None:
        self._parts.open(incarnation, layout, part_blocks)

    def peer_closed(self, incarnation: str, reason: str) -> None:
        """The decode node's stream is down. Another one may follow, with new leases."""
        self._parts.close(incarnation)
        if incarnation in self._peers:
            self._end_peer(incarnation, reason)
            del self._peers[incarnation]

    def is_lost(self, incarnation: str) -> bool:
        """Whether the decode node's transport is gone and its stream is about to be closed."""
        peer = self._peers.get(incarnation)
        return peer is not None and peer.lost

    # ---- what the transport did ----

    def part_sent(self, peer: str, lease: int, flight_s: float, now: float) -> None:
        if (known := self._peers.get(peer)) and (handoff := known.leases.get(lease)):
            handoff.part_sent(now, flight_s)
            self._touch(handoff.attempt_id)

    def part_failed(self, peer: str, lease: int, part: int, reason: str) -> None:
        known = self._peers.get(peer)
        if known is None or not known.first_lease or lease < known.first_lease:
            return  # from a stream that is down: everything on it has failed already
        error = PeerLost(f"part {part} did not reach decode node {known.target.address}: {reason}")
        if handoff := known.leases.get(lease):
            self._finish(handoff, End(error))
        else:
            # The lease has ended here, but D's posted receive would wait for this part for ever: break the stream.
            self._outbox.add(ClosePeer(peer, error.message))

    def peer_lost(self, incarnation: str, reason: str) -> None:
        if incarnation in self._peers:
            self._peers[incarnation].lost = True
            self._end_peer(incarnation, reason)
        self._outbox.add(ClosePeer(incarnation, reason))

    # ---- moving on ----

    def move_on(self, now: float) -> None:
        """Do what an event or a step has made possible."""
        layers = self._engine.layers_computed()
        for sequence in layers:
            self._touch(sequence.attempt_id)
        moving = self._starved | self._touched if self._parts.has_slot else self._touched
        self._touched = {}
        for attempt_id in moving:
            if handoff := self._handoffs.get(attempt_id):
                self._starved.pop(attempt_id, None)
                if not self._parts.send(handoff, layers.get(handoff.sequence, 0)):
                    self._starved[attempt_id] = None
                self._advance(handoff, now)
        if self._draining:
            self._use_up_credits()

    def _touch(self, attempt_id: AttemptId) -> None:
        self._touched[attempt_id] = None

    def _drain(self, peer: DecodePeer, lease: int, drain: Drain) -> None:
        peer.drains[lease] = drain
        peer.drained.setdefault(drain.attempt_id, set()).add(lease)
        self._draining[peer.target.incarnation, lease] = None

    def _use_up_credits(self) -> None:
        """Send empty parts for the credits of dead leases."""
        for incarnation, lease in list(self._draining):
            peer = self._peers.get(incarnation)
            if peer and (drain := peer.drains.get(lease)):
                if not self._parts.drain(incarnation, lease, drain):
                    return  # no slot is free for the others either
                if drain.over:
                    peer.forget_drain(lease)
            del self._draining[incarnation, lease]

    def _advance(self, handoff: Handoff, now: float) -> None:
        if handoff.state is HandoffState.COMPUTING and handoff.computed is not None:
            if not handoff.outputs:  # every sample ended with its first token
                self._tell_results(handoff)
                self._finish(handoff, End())
            elif handoff.grant and handoff.target:
                self._tell_results(handoff)
                age_s = self._engine.clock() - handoff.computed
                self._outbox.to_decode(handoff.target, handoff.commit(handoff.grant, now, age_s))
                handoff.state = HandoffState.SENDING
        if handoff.state is HandoffState.SENDING and handoff.all_gathered:
            self._engine.release(handoff.sequence)
            if handoff.accepted and handoff.all_sent:
                self._finish(handoff, handoff.handed_off())

    def _tell_results(self, handoff: Handoff) -> None:
        for result in handoff.results:
            self._outbox.to_router(handoff.attempt_id, result)

    # ---- ends ----

    def end_attempt(self, attempt_id: AttemptId, error: BatonError) -> None:
        """A no-op if it is not here."""
        if handoff := self._handoffs.get(attempt_id):
            self._finish(handoff, End(error))

    def end_overdue(self, now: float) -> None:
        for attempt_id in self._deadlines.due(now):
            handoff = self._handoffs[attempt_id]
            self._finish(handoff, End(DeadlineExceeded(f"not handed off within {handoff.message.deadline_s:g} s")))

    def _end_peer(self, incarnation: str, reason: str) -> None:
        peer = self._peers[incarnation]
        for handoff in [h for h in self._handoffs.values() if h.reserved and h.goes_to(peer)]:
            self._finish(handoff, End(PeerLost(f"decode node {peer.target.address}: {reason}")))

    def _finish(self, handoff: Handoff, last_word: End | HandedOff) -> None:
        """The only exit of a handoff: frees its blocks and sends the router its final update."""
        del self._handoffs[handoff.attempt_id]
        self._deadlines.discard(handoff.attempt_id)
        self._touched.pop(handoff.attempt_id, None)
        self._starved.pop(handoff.attempt_id, None)
        self._engine.release(handoff.sequence)
        self._outbox.to_router(handoff.attempt_id, last_word)
        if handoff.target and (peer := self._peers.get(handoff.target.incarnation)):
            grant = handoff.grant
            if grant and peer.leases.pop(grant.lease, None) and not handoff.all_gathered:
                self._drain(
                    peer, grant.lease, Drain(grant.attempt_id, handoff.next_part, handoff.credits, grant.num_parts)
                )
            if isinstance(last_word, End) and handoff.reserved:
                self._outbox.to_decode(handoff.target, Release(grant.lease if grant else 0, handoff.attempt_id))
