"""The prefill node's requests, each on its way to a decode node: Reserve, Grant, parts, Commit, and one exit.

Nothing here runs a model. Decode memory is asked for when a prompt's first chunk is scheduled (so a queue here holds
nothing there), and is granted while that chunk is computed; parts leave as their blocks are computed and D has slots
(`parts_out`); the first token leaves once D has granted; the Commit makes the request D's.
"""

from __future__ import annotations

from dataclasses import replace

from baton.errors import BatonError, DeadlineExceeded, PeerLost, TransferError
from baton.messages import (
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
    WorkId,
)
from engine.engine import Engine
from engine.holdings import Holding
from engine.node.events import ClosePeer
from engine.node.outbox import Outbox
from engine.sequence import Sequence
from engine.step import SampledToken
from prefill_node.handoff import DecodePeer, Drain, Handoff, HandoffState, needs_decode_node
from prefill_node.parts_out import PartsOut


class Outgoing:
    """From a prompt's intake on, also while it waits in the engine's queue. Releases the sequences that the engine was
    given; tells decode nodes and routers through `outbox`."""

    def __init__(self, engine: Engine, parts: PartsOut, outbox: Outbox) -> None:
        self._engine = engine
        self._parts = parts
        self._outbox = outbox
        self._handoffs: dict[WorkId, Handoff] = {}
        self._peers: dict[str, DecodePeer] = {}

    def add(self, prefill: Prefill, sequence: Sequence, now: float) -> None:
        self._handoffs[prefill.work] = Handoff(prefill, sequence, now, now + prefill.deadline_s)

    def works(self) -> list[WorkId]:
        return list(self._handoffs)

    @property
    def idle(self) -> bool:
        """Nothing is here, and no decode node waits for parts of a dead lease."""
        return not self._handoffs and not any(peer.drains for peer in self._peers.values())

    def next_deadline(self) -> float | None:
        return min((h.deadline for h in self._handoffs.values()), default=None)

    def holdings(self) -> list[Holding]:
        """The engine's, each with the lease on the decode node that its blocks are for, where there is one."""
        return [self._with_lease(holding) for holding in self._engine.holdings()]

    def _with_lease(self, holding: Holding) -> Holding:
        handoff = self._handoffs.get(holding.work)
        if handoff is None or handoff.target is None:
            return holding
        lease = handoff.grant.lease if handoff.grant else 0
        return replace(holding, lease=lease, peer=handoff.target.incarnation)

    def check_integrity(self) -> None:
        for incarnation, peer in self._peers.items():
            for lease, handoff in peer.leases.items():
                assert self._handoffs[handoff.work] is handoff
                assert handoff.grant
                assert handoff.grant.lease == lease
                assert peer.target.incarnation == incarnation

    # ---- what the engine did ----

    def started(self, sequence: Sequence, now: float) -> None:
        """The prompt's first chunk is scheduled: D is asked for room, if anything is left for D to do."""
        handoff = self._handoffs[sequence.work]
        handoff.started = now
        self._outbox.to_router(sequence.work, Started(sequence.num_cached_tokens, now - handoff.received))
        prefill = handoff.message
        if prefill.decode is None or not needs_decode_node(prefill):
            return
        block_size = self._engine.config.block_size
        handoff.grouped_from_block, handoff.layer_groups = self._parts.tail(sequence)
        reserve = Reserve(
            work=prefill.work,
            target_incarnation=prefill.decode.incarnation,
            num_tokens=sequence.num_tokens,
            block_hashes=tuple(sequence.block_hashes(sequence.num_tokens // block_size, block_size)),
            num_samples=len(prefill.samples),
            deadline_s=handoff.deadline - now,
            max_total_tokens=len(prefill.prompt_tokens) + prefill.sampling.max_tokens,
            grouped_from_block=handoff.grouped_from_block,
            layer_groups=handoff.layer_groups,
        )
        self._peers.setdefault(prefill.decode.incarnation, DecodePeer(prefill.decode))
        handoff.reserved = True
        self._outbox.to_decode(prefill.decode, reserve)

    def sampled(self, token: SampledToken) -> None:
        # The clock's time, not the turn's: on a CPU the turn has computed it.
        self._handoffs[token.sequence.work].sampled(token, self._engine.clock())

    # ---- what the decode node says ----

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
                elif drain := peer.drains.get(lease):
                    drain.credits = min(max(drain.credits, credits), drain.num_parts)
            case Refuse(work, error):
                if (handoff := self._handoffs.get(work)) and handoff.goes_to(peer):
                    self._finish(handoff, End(error))
                for drain in peer.drains.values():
                    drain.closed |= drain.work == work
            case CommitReply(lease, _, error):
                if handoff := peer.leases.get(lease):
                    if error:
                        self._finish(handoff, End(error))
                    else:
                        handoff.accepted = True

    def _granted(self, peer: DecodePeer, grant: Grant) -> None:
        if grant.lease <= peer.last_lease:
            return  # a repeat
        peer.last_lease = grant.lease
        peer.first_lease = peer.first_lease or grant.lease
        handoff = self._handoffs.get(grant.work)
        if handoff is None or handoff.grant or not handoff.reserved or not handoff.goes_to(peer):
            # It ended while the grant was under way; or nobody asked for it.
            peer.drains[grant.lease] = Drain(grant.work, 0, grant.credits, grant.num_parts)
            self._outbox.to_decode(peer.target, Release(grant.lease, grant.work))
            return
        handoff.grant, handoff.credits = grant, grant.credits
        handoff.parts = self._parts.plan(handoff, grant)
        peer.leases[grant.lease] = handoff
        num_parts, num_full = len(handoff.parts), handoff.sequence.num_tokens // self._engine.config.block_size
        if num_parts != grant.num_parts or grant.num_held_blocks > num_full:
            told = f"{grant.num_held_blocks} blocks there and {grant.num_parts} parts to come"
            text = f"{peer.target.incarnation} told of {told}, and they are {num_full} at most and {num_parts}"
            self._finish(handoff, End(TransferError(text)))

    def peer_opened(self, incarnation: str, part_blocks: int) -> None:
        self._parts.part_blocks[incarnation] = part_blocks

    def peer_closed(self, incarnation: str, reason: str) -> None:
        """Its stream is down. Another one may follow, with new leases."""
        self._parts.part_blocks.pop(incarnation, None)
        if incarnation in self._peers:
            self._end_peer(incarnation, reason)
            del self._peers[incarnation]

    def is_lost(self, incarnation: str) -> bool:
        """Whether its transport is gone and its stream about to be closed."""
        peer = self._peers.get(incarnation)
        return peer is not None and peer.lost

    # ---- what the transport did ----

    def part_sent(self, peer: str, lease: int, flight_s: float, now: float) -> None:
        if (known := self._peers.get(peer)) and (handoff := known.leases.get(lease)):
            handoff.part_sent(now, flight_s)

    def part_failed(self, peer: str, lease: int, part: int, reason: str) -> None:
        known = self._peers.get(peer)
        if known is None or not known.first_lease or lease < known.first_lease:
            return  # its stream is down, and everything with it has failed already
        error = PeerLost(f"part {part} did not reach {peer}: {reason}")
        if handoff := known.leases.get(lease):
            self._finish(handoff, End(error))
        else:
            # The request is the decode node's, which may wait for this part for ever: have it see a broken stream.
            self._outbox.add(ClosePeer(peer, error.message))

    def peer_lost(self, incarnation: str, reason: str) -> None:
        if incarnation in self._peers:
            self._peers[incarnation].lost = True
            self._end_peer(incarnation, reason)
        self._outbox.add(ClosePeer(incarnation, reason))

    # ---- moving on ----

    def move_on(self, now: float) -> None:
        """Whatever an event or a step has made possible."""
        for handoff in list(self._handoffs.values()):
            self._parts.send(handoff)
            self._advance(handoff, now)
        for incarnation, peer in self._peers.items():
            self._parts.drain(incarnation, peer)

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
            self._outbox.to_router(handoff.work, result)

    # ---- ends ----

    def end_work(self, work: WorkId, error: BatonError) -> None:
        if handoff := self._handoffs.get(work):
            self._finish(handoff, End(error))

    def end_overdue(self, now: float) -> None:
        for handoff in [h for h in self._handoffs.values() if h.deadline <= now]:
            self._finish(handoff, End(DeadlineExceeded(f"not handed off within {handoff.message.deadline_s:g} s")))

    def _end_peer(self, incarnation: str, reason: str) -> None:
        peer = self._peers[incarnation]
        for handoff in [h for h in self._handoffs.values() if h.reserved and h.goes_to(peer)]:
            self._finish(handoff, End(PeerLost(f"decode node {incarnation}: {reason}")))

    def _finish(self, handoff: Handoff, last_word: End | HandedOff) -> None:
        """The one exit of a handoff: frees its blocks, and tells the router."""
        del self._handoffs[handoff.work]
        self._engine.release(handoff.sequence)
        self._outbox.to_router(handoff.work, last_word)
        if handoff.target and (peer := self._peers.get(handoff.target.incarnation)):
            grant = handoff.grant
            if grant and peer.leases.pop(grant.lease, None) and not handoff.all_gathered:
                peer.drains[grant.lease] = Drain(grant.work, handoff.next_part, handoff.credits, grant.num_parts)
            if isinstance(last_word, End) and handoff.reserved:
                self._outbox.to_decode(handoff.target, Release(grant.lease if grant else 0, handoff.work))
