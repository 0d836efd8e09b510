"""The sending half of handoffs, the same for both roles: Reserve, Grant, parts, Commit, and what goes wrong with them.

    reserve --Grant--> parts leave as they are computed and credited --Commit--> the decode node's

Nothing here runs a model. The role decides what a Refuse, a CommitReply or the loss of the decode node means for a
request, in the abstract methods at the end: a prefill node ends it, and a decode node may go on with it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Generic, TypeVar

from baton.deadlines import Deadlines, earliest
from baton.errors import BatonError, PeerLost, TransferError
from baton.handoff_messages import CommitReply, Credit, Grant, Landed, Refuse, Release, Reserve
from baton.layout import KvLayout
from baton.messages import AttemptId
from engine.engine import Engine
from engine.sequence import Sequence
from node.events import ClosePeer
from node.handoffs.flights import STUCK_S
from node.handoffs.parts_out import PartsOut
from node.handoffs.sending import DecodePeer, Drain, KvSending
from node.outbox import Outbox

S = TypeVar("S", bound=KvSending)


class KvSenderCore(ABC, Generic[S]):
    """Tracks the requests on their way, by attempt; sends to decode nodes through `outbox`. The cost of a turn depends
    on what its events and steps touched, not on the number of requests."""

    def __init__(self, engine: Engine, parts: PartsOut, outbox: Outbox) -> None:
        self._engine = engine
        self._parts = parts
        self._outbox = outbox
        self._sendings: dict[AttemptId, S] = {}
        self._touched: dict[AttemptId, None] = {}  # for which something has changed since `move_on` last visited them
        self._starved: dict[AttemptId, None] = {}  # whose next part found no free slot
        self._put_off = Deadlines[AttemptId]()  # whose next part may leave only later
        self._peers: dict[str, DecodePeer] = {}
        self._draining: dict[tuple[str, int], None] = {}  # (peer, lease): drains likewise

    def __len__(self) -> int:
        return len(self._sendings)

    def __contains__(self, attempt_id: AttemptId) -> bool:
        return attempt_id in self._sendings

    @property
    def idle(self) -> bool:
        """Whether nothing is here, and no decode node waits for parts of a dead lease."""
        return not self._sendings and not any(peer.drains for peer in self._peers.values())

    def attempts(self) -> list[AttemptId]:
        """All attempts here."""
        return [*self._sendings]

    def next_deadline(self) -> float | None:
        """When the next part that was put off may leave, or when a decode node will have taken no part for too long."""
        return earliest(self._put_off.next(), self._parts.flights.next_deadline())

    def is_lost(self, incarnation: str) -> bool:
        """Whether the decode node's transport is gone and its stream is about to be closed."""
        peer = self._peers.get(incarnation)
        return peer is not None and peer.lost

    def check_integrity(self) -> None:
        for incarnation, peer in self._peers.items():
            for lease, sending in peer.leases.items():
                assert self._sendings[sending.attempt_id] is sending
                assert sending.grant
                assert sending.grant.lease == lease
                assert peer.target.incarnation == incarnation
            by_attempt = [(attempt_id, lease) for attempt_id, leases in peer.drained.items() for lease in leases]
            assert sorted(by_attempt) == sorted((drain.attempt_id, lease) for lease, drain in peer.drains.items())
        for sending in self._sendings.values():
            self._check_nothing_is_missed(sending)

    def _check_nothing_is_missed(self, sending: S) -> None:
        """Assert that `move_on` will visit it if it could send a part."""
        shape = self._engine.tables.shape
        visited = self._touched.keys() | self._starved.keys()
        if sending.attempt_id not in visited and sending.attempt_id not in self._put_off:
            assert not sending.ready_part(shape, 0), f"{sending.attempt_id} could go on, and does not"

    # ---- reserve, grant ----

    def _reserve(self, sending: S, reserve: Reserve) -> None:
        """Ask the target for room; if there is no stream to it, one is opened."""
        assert sending.target is not None
        self._peers.setdefault(sending.target.incarnation, DecodePeer(sending.target))
        sending.reserved, sending.num_tokens = True, reserve.num_tokens
        sending.num_spare_tokens, sending.num_named_blocks = reserve.num_spare_tokens, len(reserve.block_hashes)
        self._outbox.to_decode(sending.target, reserve)

    def handle(self, incarnation: str, message: object) -> None:
        """A decode node's message."""
        peer = self._peers.get(incarnation)
        if peer is None or not self._parts.is_open(incarnation):
            return
        match message:
            case Grant() as grant:
                self._granted(peer, grant)
            case Credit(lease, number):
                self._credited(peer, lease, number)
            case Refuse(attempt_id, error):
                if (sending := self._sendings.get(attempt_id)) and sending.goes_to(peer):
                    sending.closed = sending.grant is not None
                    self._refused(sending, error)
                for over in peer.drained.get(attempt_id, ()):
                    peer.drains[over].closed = True
                    self._draining[incarnation, over] = None
            case Landed(lease, _):
                if lease in peer.leases:
                    peer.leases[lease].landed = True
                    self._touch(peer.leases[lease].attempt_id)
            case CommitReply(lease, _, error):
                if lease in peer.leases and (sending := self._sendings.get(peer.leases[lease].attempt_id)):
                    if error is not None:
                        self._commit_refused(sending, error)
                    else:
                        sending.accepted = True
                        self._touch(sending.attempt_id)

    def _credited(self, peer: DecodePeer, lease: int, number: int) -> None:
        if sending := peer.leases.get(lease):
            sending.credits = min(max(sending.credits, number), len(sending.parts))
            self._touch(sending.attempt_id)
        elif drain := peer.drains.get(lease):
            drain.credits = min(max(drain.credits, number), drain.num_parts)
            self._draining[peer.target.incarnation, lease] = None

    def _granted(self, peer: DecodePeer, grant: Grant) -> None:
        if grant.lease <= peer.last_lease:
            return  # a repeat
        peer.last_lease = grant.lease
        peer.first_lease = peer.first_lease or grant.lease
        sending = self._sendings.get(grant.attempt_id)
        if sending is None or sending.grant or not sending.reserved or not sending.goes_to(peer):
            # The request ended while the grant was in flight, or the grant answers no Reserve.
            self._drain(peer, grant.lease, Drain(grant.attempt_id, 0, grant.credits, grant.num_parts))
            self._outbox.to_decode(peer.target, Release(grant.attempt_id))
            return
        sending.grant, sending.credits = grant, grant.credits
        sending.granted = self._engine.clock()
        sending.entries, sending.parts = self._parts.plan(sending, grant)
        peer.leases[grant.lease] = sending
        self._engine.waiting.leave_lane(sending.sequence)
        self._touch(grant.attempt_id)
        num_parts, num_full = len(sending.parts), sending.num_named_blocks
        is_of_groups = len(grant.held) == self._engine.tables.shape.width
        if num_parts != grant.num_parts or max(grant.held) > num_full or not is_of_groups:
            there = "+".join(map(str, grant.held))
            said = f"{there} blocks there and {grant.num_parts} parts to come"
            text = f"decode node {peer.target.address} told of {said}, and they are {num_full} at most and {num_parts}"
            self._refused(sending, TransferError(text))

    def peer_opened(self, incarnation: str, layout: KvLayout, part_blocks: int) -> None:
        """A stream to the decode node is up. An earlier one may have ended without a word, since it was idle: the
        decode node expects no parts of its leases any more."""
        self._parts.open(incarnation, layout, part_blocks)
        if peer := self._peers.get(incarnation):
            peer.drains.clear()
            peer.drained.clear()

    def peer_closed(self, incarnation: str, reason: str) -> None:
        """The decode node's stream is down. Another one may follow, with new leases."""
        self._parts.close(incarnation)
        if incarnation in self._peers:
            self._end_peer(incarnation, reason)
            del self._peers[incarnation]

    def _end_peer(self, incarnation: str, reason: str) -> None:
        peer = self._peers[incarnation]
        for sending in [s for s in self._sendings.values() if s.reserved and s.goes_to(peer)]:
            self._lost(sending, PeerLost(f"decode node {peer.target.address}: {reason}"))

    # ---- what the transport did ----

    def part_sent(self, peer: str, lease: int, flight_s: float, now: float) -> None:
        self._parts.flights.ended(peer, now)
        if (known := self._peers.get(peer)) and (sending := known.leases.get(lease)):
            sending.part_sent(now, flight_s)
            self._touch(sending.attempt_id)

    def part_failed(self, peer: str, lease: int, part: int, reason: str, now: float) -> None:
        self._parts.flights.ended(peer, now)
        known = self._peers.get(peer)
        if known is None or not known.first_lease or lease < known.first_lease:
            return  # of an earlier stream, whose requests have all failed already
        error = PeerLost(f"part {part} did not reach decode node {known.target.address}: {reason}")
        if lease in known.leases and (sending := self._sendings.get(known.leases[lease].attempt_id)):
            self._lost(sending, error)
        else:
            # The lease has ended here, but D's posted receive would wait for this part forever, so end the stream.
            self._outbox.add(ClosePeer(peer, error.message))

    def peer_lost(self, incarnation: str, reason: str) -> None:
        if incarnation in self._peers:
            self._peers[incarnation].lost = True
            self._end_peer(incarnation, reason)
        self._outbox.add(ClosePeer(incarnation, reason))

    def end_overdue(self, now: float) -> None:
        for incarnation in self._parts.flights.take_stuck(now):
            self.peer_lost(incarnation, f"it has taken no KV for {STUCK_S:g} s")

    # ---- moving on ----

    def move_on(self, now: float) -> None:
        """Do what an event, a step or the time has made possible."""
        layers = self._layers_computed()
        for attempt_id in (*(sequence.attempt_id for sequence in layers), *self._put_off.due(now)):
            self._touch(attempt_id)
        moving = self._starved | self._touched if self._parts.has_slot else self._touched
        self._touched = {}
        for attempt_id in moving:
            if sending := self._sendings.get(attempt_id):
                self._starved.pop(attempt_id, None)
                if not self._parts.send(sending, layers.get(sending.sequence, 0), now):
                    self._starved[attempt_id] = None
                if sending.is_put_off(now):
                    self._put_off.set(attempt_id, sending.next_part_at)
                self._advance(sending, now)
        if self._draining:
            self._use_up_credits(now)

    def _touch(self, attempt_id: AttemptId) -> None:
        self._touched[attempt_id] = None

    def _drain(self, peer: DecodePeer, lease: int, drain: Drain) -> None:
        peer.drains[lease] = drain
        peer.drained.setdefault(drain.attempt_id, set()).add(lease)
        self._draining[peer.target.incarnation, lease] = None

    def _use_up_credits(self, now: float) -> None:
        """Send empty parts for the credits of dead leases."""
        for incarnation, lease in list(self._draining):
            peer = self._peers.get(incarnation)
            if peer and (drain := peer.drains.get(lease)):
                if not self._parts.drain(incarnation, lease, drain, now):
                    continue  # no slot of that part's rank is free; other drains may need another rank's
                if drain.over:
                    peer.forget_drain(lease)
            del self._draining[incarnation, lease]

    def _let_go(self, sending: S, release: bool) -> None:
        """Forget the request; parts that the decode node still expects are drained. release: the decode node did not
        take the request, and must be told that the lease is over."""
        del self._sendings[sending.attempt_id]
        self._touched.pop(sending.attempt_id, None)
        self._starved.pop(sending.attempt_id, None)
        self._put_off.discard(sending.attempt_id)
        if sending.target is None or (peer := self._peers.get(sending.target.incarnation)) is None:
            return
        grant = sending.grant
        if grant and peer.leases.pop(grant.lease, None) and not sending.all_gathered:
            left = sending.next_part, sending.credits, grant.num_parts
            self._drain(peer, grant.lease, Drain(grant.attempt_id, *left, sending.closed))
        if release and sending.reserved:
            self._outbox.to_decode(sending.target, Release(sending.attempt_id))

    # ---- implemented by the role ----

    def _layers_computed(self) -> dict[Sequence, int]:
        """For each sequence that is being computed, how many of its layers have all of their KV."""
        return {}

    @abstractmethod
    def _advance(self, sending: S, now: float) -> None:
        """Go on with the request: something has changed, and all parts that can leave have left."""

    @abstractmethod
    def _refused(self, sending: S, error: BatonError) -> None:
        """The decode node has no lease for it, or no longer."""

    @abstractmethod
    def _commit_refused(self, sending: S, error: BatonError) -> None:
        """The decode node did not take the request."""

    @abstractmethod
    def _lost(self, sending: S, error: PeerLost) -> None:
        """The decode node is gone, or a part did not reach it."""
