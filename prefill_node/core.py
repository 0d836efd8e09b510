"""The prefill node as a state machine: prompts in, KV parts and first tokens out.

Its loop is `prepare` and `compute`: take what the network and the device did, end what is overdue, send what is ready,
decide a step; launch it. Neither waits: a step's end, or that of a group of its layers, makes a turn like an event.
What becomes of a prompt from its intake on, and of its KV, is `outgoing`'s.
"""

from __future__ import annotations

from baton.audit import KvAudit
from baton.errors import BatonError, InvalidRequest, NodeUnavailable, Overloaded, PeerLost, RequestCancelled
from baton.messages import Abort, End, Load, NodeRole, Prefill
from engine.engine import Engine, Plan
from engine.node.audit import make_audit, verdict
from engine.node.events import (
    Draining,
    Event,
    FromPeer,
    FromRouter,
    Output,
    PeerClosed,
    PeerOpened,
    SessionLost,
    SessionOpened,
)
from engine.node.fences import Fences
from engine.node.intake import make_sequence
from engine.node.outbox import Outbox
from engine.step import StepResult
from kv_transfer.ranks import SenderRanks, peer_of
from kv_transfer.sender import PartFailed, PartSent
from kv_transfer.sender import PeerLost as PeerGone
from prefill_node.handoff import needs_decode_node
from prefill_node.outgoing import Outgoing
from prefill_node.parts_out import PartsOut


class PrefillCore:
    """Owned by the engine's thread, and owner of engine and sender. `max_waiting` prompts may queue; no request has
    more than `max_deadline_s`. `layer_groups`, `whole_tokens`: see PartsOut."""

    def __init__(
        self,
        engine: Engine,
        sender: SenderRanks,
        *,
        incarnation: str,
        max_waiting: int = 4096,
        max_deadline_s: float = 3600.0,
        layer_groups: int = 1,
        whole_tokens: int = 0,
    ) -> None:
        self.engine = engine
        self.sender = sender
        self._incarnation = incarnation
        self._max_waiting = max_waiting
        self._max_deadline_s = max_deadline_s
        self._fences = Fences(max_deadline_s)
        self._outbox = Outbox()
        self._outgoing = Outgoing(engine, PartsOut(engine, sender, layer_groups, whole_tokens), self._outbox)
        self._stopping = False
        self._plan = Plan()

    # ---- the loop ----

    def prepare(self, now: float) -> None:
        self.engine.blocks.now = now
        self._take_transfers(now)
        self._outgoing.end_overdue(now)
        self._fences.expire(now)
        if not self.engine.has_room:
            self._take_results(self.engine.compute(Plan(), wait=False))
        self._outgoing.move_on(now)
        self._plan = self.engine.schedule(now)
        if not self.engine.only_launches:
            self._tell_started(now)

    def compute(self, now: float) -> bool:
        result = self.engine.compute(self._plan, wait=False)
        if self.engine.only_launches:
            self._tell_started(now)
        self._take_results(result)
        self._outgoing.move_on(now)
        return result.again

    @property
    def device_busy_since(self) -> float | None:
        return self.engine.device_busy_since

    def _tell_started(self, now: float) -> None:
        for sequence in self._plan.started:
            self._outgoing.started(sequence, now)

    def _take_results(self, result: StepResult) -> None:
        for token in result.sampled:
            self._outgoing.sampled(token)
        for sequence in result.advanced:
            self._outgoing.advanced(sequence)

    def _take_transfers(self, now: float) -> None:
        for event in self.sender.poll():
            match event:
                case PartSent(name, lease, _, flight_s):
                    self._outgoing.part_sent(peer_of(name), lease, flight_s, now)
                case PartFailed(name, lease, part, reason):
                    self._outgoing.part_failed(peer_of(name), lease, part, reason)
                case PeerGone(name, reason):
                    self._outgoing.peer_lost(peer_of(name), reason)

    # ---- events in ----

    def handle(self, event: Event, now: float) -> None:
        self.engine.blocks.now = now
        match event:
            case SessionOpened(epoch):
                self._outbox.epochs.add(epoch)
            case SessionLost(epoch):
                self._outbox.epochs.discard(epoch)
                self._outgoing.end_epoch(epoch, RequestCancelled("the router's stream ended"))
            case FromRouter(epoch, Prefill() as prefill):
                self._intake(epoch, prefill, now)
            case FromRouter(_, Abort() as abort):
                self._abort(abort, now)
            case PeerOpened(peer, part_blocks, layout):
                self._outgoing.peer_opened(peer, layout, part_blocks)
            case PeerClosed(peer, reason):
                self._outgoing.peer_closed(peer, reason)
            case FromPeer(peer, message):
                self._outgoing.hear(peer, message)
            case Draining():
                self._stopping = True

    def _intake(self, epoch: int, prefill: Prefill, now: float) -> None:
        work = prefill.work
        last = self._fences.last(work)
        if epoch not in self._outbox.epochs or not self._fences.admit(work, now, prefill.deadline_s):
            return  # a repeat, or fenced: whoever sent it has its answer or wants none
        if last:
            self._outgoing.end_work(last, RequestCancelled(f"attempt {work.attempt} took its place"))
        try:
            self._check(prefill)
            sequence = make_sequence(prefill, hand_off=True, now=now)
            if prefill.decode and needs_decode_node(prefill):
                sequence.lane = prefill.decode.incarnation
            self.engine.add(sequence)
        except BatonError as error:
            self._outbox.to_router(work, End(error))
            return
        self._outgoing.add(prefill, sequence, now, now + min(prefill.deadline_s, self._max_deadline_s))

    def _check(self, prefill: Prefill) -> None:
        if prefill.target_incarnation != self._incarnation:
            raise NodeUnavailable("the prefill node was started anew")
        if self._stopping:
            raise NodeUnavailable("this node is stopping")
        if self.engine.num_waiting >= self._max_waiting:
            raise Overloaded(f"{self._max_waiting} prompts are waiting")
        if prefill.decode is None and needs_decode_node(prefill):
            raise InvalidRequest("a prefill node needs a decode node for more than one token", "decode")
        if prefill.decode and self._outgoing.is_lost(prefill.decode.incarnation):
            raise PeerLost(f"decode node {prefill.decode.address} is being disconnected")

    def _abort(self, abort: Abort, now: float) -> None:
        if abort.samples:
            return  # the decode node drops them: what is done here, the prompt, is the same without
        work = abort.work
        last = self._fences.last(work)
        if not self._fences.fence(work, now, abort.deadline_s):
            self._outbox.close_session(work.router_epoch, "too many aborts of work that is not known here")
        if last and last.attempt <= work.attempt:
            self._outgoing.end_work(last, RequestCancelled("aborted by the router"))

    # ---- what the shell asks ----

    def next_deadline(self) -> float | None:
        return self._outgoing.next_deadline()

    def take_outputs(self) -> list[Output]:
        return self._outbox.take()

    def load(self) -> Load:
        waiting, blocks = self.engine.num_waiting, self.engine.blocks
        running = len(self._outgoing) - waiting
        return Load(waiting, running, blocks.num_free + blocks.num_cached, blocks.num_total, self._stopping)

    @property
    def idle(self) -> bool:
        return self._outgoing.idle

    def check_integrity(self) -> None:
        """Raise AssertionError where blocks, slots and handoffs disagree. For tests and the audit."""
        self.engine.check_integrity()
        self.sender.check_integrity()
        self._outgoing.check_integrity()

    def audit(self, now: float) -> KvAudit:
        return make_audit(
            role=NodeRole.PREFILL,
            incarnation=self._incarnation,
            integrity=verdict(self.check_integrity),
            idle=self.idle,
            blocks=self.engine.blocks,
            holdings=self._outgoing.holdings(),
            slots=self.sender.slots(),
            now=now,
        )
