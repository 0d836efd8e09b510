"""The decode node as a state machine: leases and parts in, tokens out.

In a turn of its loop (`node.core`) it takes what arrived, grants Reserves that fit, adopts requests whose KV is here,
and launches a step if there is room for one and it is due (`engine.pace`). Adoption puts a request into the very next
step, so the running batch has no gap; the router gets Adopted when that step begins. `turn_budget` says how much of
this a turn does, so that long prompts delay neither launches nor tokens. A Prefill sent here directly runs on the same
engine, without a lease. `reservations` keeps requests that wait for KV, `running` those that generate, and `migrations`
those of them that move to another decode node.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from baton.audit import KvSlot
from baton.deadlines import earliest
from baton.errors import BatonError, NodeUnavailable, RequestCancelled
from baton.handoff_messages import Commit, Refuse, Release, Reserve
from baton.messages import Abort, AttemptId, Migrate, Prefill
from baton.node_info import NodeRole
from decode_node.credits import LeaseCredits
from decode_node.leases import Extras
from decode_node.migrations import Migrations
from decode_node.reservations import Reservations
from decode_node.running import RunningRequests
from decode_node.turn_budget import Budget, TurnBudget
from engine.beams import BeamGroup
from engine.engine import Engine
from engine.holdings import Holding
from engine.scheduler import Plan
from engine.sequence import Sequence
from engine.step import StepResult
from kv_transfer.ranks import ReceiverRanks, SenderRanks, peer_of
from kv_transfer.receiver import PartFailed, PartLanded, PartRefused, PartUnused, PeerDisconnected
from kv_transfer.sender import PartSent
from node.core import RoleCore, RoleOptions
from node.events import ClosePeer, FromPeer, PeerClosed, PeerEvent, PeerOpened, TargetEvent
from node.handoffs.parts_out import PartsOut


class DecodeCore(RoleCore):
    """Owns the engine, the receiver and the sender; the latter two have slots and a transport each. `max_waiting`
    limits the waiting prompts, and likewise the waiting Reserves."""

    role: ClassVar[NodeRole] = NodeRole.DECODE

    def __init__(self, engine: Engine, receiver: ReceiverRanks, sender: SenderRanks, options: RoleOptions) -> None:
        super().__init__(engine, options)
        self.receiver = receiver
        self.sender = sender
        self._credits = LeaseCredits(receiver, self._outbox)
        self._reservations = Reservations(
            engine,
            receiver,
            self._credits,
            self._outbox,
            max_waiting=options.max_waiting,
            max_deadline_s=options.max_deadline_s,
        )
        self._running = RunningRequests(engine, self._outbox, self._fences)
        self._migrations = Migrations(engine, PartsOut(engine, sender, 1, 0), self._outbox, self._running)
        self._peers: dict[str, PeerOpened] = {}  # nodes whose streams to this node are up
        self._launch_at: float | None = None  # when to launch the next step, while a launch is delayed
        self._turn_budget = TurnBudget(engine)

    # ---- the turn ----

    def _take_transfers(self, now: float) -> None:
        for event in self.receiver.poll():
            match event:
                case PartLanded():
                    self._reservations.part_landed(event, now)
                case PartRefused(_, lease, _, error):
                    self._reservations.part_refused(lease, error)
                case PartUnused():
                    pass  # its slot is free
                case PartFailed(_, lease, part, reason):
                    self._reservations.part_failed(lease, part, reason)
                case PeerDisconnected(name, reason):
                    peer = peer_of(name)
                    self._reservations.end_peer(peer, self._name_of(peer), reason)
                    self._outbox.add(ClosePeer(peer, reason))
        for sent in self.sender.poll():
            match sent:
                case PartSent(name, serial, _, flight_s):
                    self._migrations.part_sent(peer_of(name), serial, flight_s, now)
                case PartFailed(name, serial, part, reason):
                    self._migrations.part_failed(peer_of(name), serial, part, reason, now)
                case PeerDisconnected(name, reason):
                    self._migrations.peer_lost(peer_of(name), reason)

    def _end_overdue(self, now: float) -> None:
        self._reservations.end_overdue(now)
        self._running.end_overdue(now)
        self._migrations.end_overdue(now)

    def _take_results(self, result: StepResult) -> None:
        if result.num_tokens:
            self._running.step_retired()
        for sequence, piece in result.prompt_logprobs:
            self._outbox.to_router(sequence.attempt_id, piece)
        for sequence in result.advanced:
            self._running.advanced(sequence)
        if result.sampled:
            now = self.engine.clock()
            for token in result.sampled:
                self._running.sampled(token, now)
        for group in result.searched:
            self._running.searched(group)
        if result.num_tokens:
            self._migrations.step_retired()

    def _move_on(self, now: float) -> None:
        self.engine.launches_early = self._reservations.has_long
        self._adopt_and_grant(now, self._turn_budget.before_launch())
        if not self._turn_budget.is_brief:
            self._credits.share()

    def _adopt_and_grant(self, now: float, budget: Budget) -> bool:
        """Adopt requests whose KV is here, then grant Reserves. Returns whether a request was adopted."""
        leases = self._reservations.take_adoptable(budget)
        for lease in leases:
            assert lease.commit is not None
            self._running.adopt(lease, self._matchers.make(lease.reserve.attempt_id, lease.commit.sampling), now)
        self._move_migrations_on(now)
        self._reservations.grant_waiting(now, budget)  # including blocks that the above gave back
        return bool(leases)

    def _move_migrations_on(self, now: float) -> None:
        for attempt_id in self._running.take_ended():
            self._migrations.ended(attempt_id)
        self._migrations.move_on(now)

    def _schedule(self, now: float) -> Plan:
        due = self.engine.launch_at
        self._launch_at = due if due is not None and now < due else None
        if self._launch_at is not None:
            return Plan()
        plan = self.engine.schedule(now)
        for sequence in plan.preempted:
            self._migrations.preempted(sequence)
        # Sent before the launch, unlike other updates: first tokens wait for it, and a launch takes 1 to 2 ms.
        self._running.launching(plan.chunks)
        return plan

    def _tell_launched(self, plan: Plan, now: float) -> None:
        self._running.tell_started(plan.started, now)

    def _computed(self, result: StepResult, now: float) -> bool:
        budget = self._turn_budget.after_launch(bool(self._plan.chunks), result, now)
        # Before the grants, since these leave some of their receives to the next turn.
        if self._turn_budget.is_brief:
            self._credits.share()
        adopted = self._adopt_and_grant(now, budget)
        self.receiver.polls_soon(self.engine.device_busy_since is not None)  # the end of a step begins a turn
        return result.again or adopted

    def next_deadline(self) -> float | None:
        work = self._running, self._reservations, self._migrations
        return earliest(*(part.next_deadline() for part in work), self._launch_at)

    # ---- other nodes ----

    def _handle_peer(self, event: PeerEvent, now: float) -> None:
        match event:
            case TargetEvent(target_event):
                self._handle_target(target_event)
            case FromPeer(peer, _) if peer not in self._peers:
                pass  # its stream has ended, so no answer can be sent
            case FromPeer(peer, Reserve() as reserve):
                self._reserve(peer, reserve, now)
            case FromPeer(peer, Commit() as commit):
                self._commit(peer, commit, now)
            case FromPeer(peer, Release() as release):
                self._reservations.release(peer, release)
            case PeerOpened(peer, part_blocks, layout) as opened:
                self._peers[peer] = opened
                self._reservations.peer_opened(peer, layout, part_blocks)
            case PeerClosed(peer, reason):
                self._take_transfers(now)  # what has landed is here
                self._reservations.end_peer(peer, self._name_of(peer), reason)
                self._reservations.peer_closed(peer)
                self._peers.pop(peer, None)

    def _handle_target(self, event: PeerOpened | PeerClosed | FromPeer) -> None:
        """Handle an event of the stream to a decode node that requests move to."""
        match event:
            case PeerOpened(peer, part_blocks, layout):
                self._migrations.peer_opened(peer, layout, part_blocks)
            case PeerClosed(peer, reason):
                self._migrations.peer_closed(peer, reason)
            case FromPeer(peer, message):
                self._migrations.handle(peer, message)

    def _name_of(self, peer: str) -> str:
        opened = self._peers.get(peer)
        return opened.name if opened and opened.name else peer

    def _reserve(self, peer: str, reserve: Reserve, now: float) -> None:
        attempt_id = reserve.attempt_id
        if not self._admit(attempt_id, now, reserve.deadline_s, reserve.move):
            is_repeat = attempt_id in self._running or attempt_id in self._reservations
            if not is_repeat:
                self._outbox.to_prefill(peer, Refuse(attempt_id, RequestCancelled("the attempt is over")))
            return
        try:
            self._check_target(reserve.target_incarnation)
            if attempt_id.router_epoch not in self._outbox.epochs:
                raise NodeUnavailable("the request's router is not subscribed to the decode node")
            self._reservations.reserve(peer, reserve, now)
        except BatonError as error:
            self._outbox.to_prefill(peer, Refuse(attempt_id, error))

    def _commit(self, peer: str, commit: Commit, now: float) -> None:
        processors, beams, refusal = None, None, None
        try:
            self._matchers.compile_ahead(commit.sampling)  # while the last parts travel
            processors = self._processors.chain(commit.sampling.logits_processors)
            beams = self._beams_of(commit)
        except BatonError as error:
            refusal = error
        self._reservations.commit(peer, commit, now, Extras(processors, beams), refusal)

    # ---- requests ----

    def _make_sequence(self, prefill: Prefill, now: float) -> Sequence:
        return self._new_sequence(prefill, now, hand_off=False, beams=self._beams_of(prefill))

    def _beams_of(self, request: Prefill | Commit) -> BeamGroup[Sequence] | None:
        """The beam search that is asked for, if one is. Raises InvalidRequest if it may not fit."""
        prompt, sampling = request.prompt_tokens, request.sampling
        if not sampling.beam_width:
            return None
        self.engine.beam_search.require_possible(sampling.beam_width, len(prompt) + sampling.max_tokens)
        return BeamGroup(request.attempt_id, len(prompt), sampling, self.engine.config.eos_token_ids)

    def _take_in(self, prefill: Prefill, sequence: Sequence, now: float, deadline: float) -> None:
        self._running.add(sequence, tuple(sample.index for sample in prefill.samples), now, deadline)

    def _attempts(self) -> list[AttemptId]:
        return [*self._running.attempts(), *self._reservations.attempts()]

    def _end_attempt(self, attempt_id: AttemptId, error: BatonError) -> None:
        self._reservations.end_attempt(attempt_id, error)
        self._running.end_attempt(attempt_id, error)

    def _stop_samples(self, abort: Abort, now: float) -> None:
        if not self._fences.stop_samples(abort.attempt_id, abort.samples, now, abort.deadline_s):
            self._outbox.close_session(abort.attempt_id.router_epoch, "too many aborts of single samples")
        self._running.stop_samples(abort.attempt_id, abort.samples)

    def _migrate(self, migrate: Migrate, now: float) -> None:
        self._migrations.begin(migrate, now)

    # ---- its accounts ----

    @property
    def idle(self) -> bool:
        return not len(self._running) and not len(self._reservations) and self._migrations.idle

    def check_integrity(self) -> None:
        """Raise AssertionError if blocks, slots, leases and sequences disagree."""
        self.engine.check_integrity(self._reservations.holdings())
        self._reservations.check_integrity()
        self.receiver.check_integrity()
        self.sender.check_integrity()
        self._migrations.check_integrity()

    def _count_requests(self) -> tuple[int, int]:
        return self.engine.num_waiting + self._reservations.num_waiting, self.engine.num_running

    def _holdings(self) -> list[Holding]:
        return [*self.engine.sequences.holdings(), *self._reservations.holdings()]

    def _slots(self) -> list[KvSlot]:
        """The slots of the sender come last."""
        slots = self.receiver.slots()
        return slots + [replace(slot, slot=len(slots) + slot.slot) for slot in self.sender.slots()]
