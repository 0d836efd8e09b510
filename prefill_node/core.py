"""The prefill node as a state machine: prompts in, KV parts and first tokens out.

In a turn of its loop (`node.core`) it handles the transport's events, sends what is ready, and launches a step. The end
of a layer group in a step triggers a turn, as an event does. `outgoing` tracks prompts and their KV from intake on.
"""

from __future__ import annotations

from typing import ClassVar

from baton.audit import KvSlot
from baton.errors import BatonError, InvalidRequest, PeerLost
from baton.messages import Abort, AttemptId, Migrate, Prefill, Stayed
from baton.node_info import NodeRole
from engine.engine import Engine
from engine.holdings import Holding
from engine.scheduler import Plan
from engine.sequence import Sequence
from engine.step import StepResult
from kv_transfer.ranks import SenderRanks, peer_of
from kv_transfer.sender import PartFailed, PartSent, PeerDisconnected
from node.core import RoleCore, RoleOptions
from node.events import FromPeer, PeerClosed, PeerEvent, PeerOpened
from node.handoffs.parts_out import PartsOut
from prefill_node.handoff import needs_decode_node, without_last_token
from prefill_node.outgoing import Outgoing


class PrefillCore(RoleCore):
    """Owns engine and sender. `layer_groups`, `whole_tokens`: see PartsOut."""

    role: ClassVar[NodeRole] = NodeRole.PREFILL

    def __init__(
        self,
        engine: Engine,
        sender: SenderRanks,
        options: RoleOptions,
        *,
        layer_groups: int = 1,
        whole_tokens: int = 0,
    ) -> None:
        super().__init__(engine, options)
        self.sender = sender
        self._outgoing = Outgoing(engine, PartsOut(engine, sender, layer_groups, whole_tokens), self._outbox)

    # ---- the turn ----

    def _take_transfers(self, now: float) -> None:
        for event in self.sender.poll():
            match event:
                case PartSent(name, lease, _, flight_s):
                    self._outgoing.part_sent(peer_of(name), lease, flight_s, now)
                case PartFailed(name, lease, part, reason):
                    self._outgoing.part_failed(peer_of(name), lease, part, reason, now)
                case PeerDisconnected(name, reason):
                    self._outgoing.peer_lost(peer_of(name), reason)

    def _end_overdue(self, now: float) -> None:
        self._outgoing.end_overdue(now)

    def _take_results(self, result: StepResult) -> None:
        for sequence, piece in result.prompt_logprobs:
            self._outbox.to_router(sequence.attempt_id, piece)
        for token in result.sampled:
            self._outgoing.sampled(token)
        for sequence in result.advanced:
            self._outgoing.advanced(sequence, result.device_s)

    def _move_on(self, now: float) -> None:
        self._outgoing.move_on(now)

    def _tell_launched(self, plan: Plan, now: float) -> None:
        for sequence in plan.started:
            self._outgoing.started(sequence, now)

    def _computed(self, result: StepResult, now: float) -> bool:
        self._outgoing.move_on(now)
        return result.again

    def next_deadline(self) -> float | None:
        return self._outgoing.next_deadline()

    # ---- decode nodes ----

    def _handle_peer(self, event: PeerEvent, now: float) -> None:
        match event:
            case PeerOpened(peer, part_blocks, layout):
                self._outgoing.peer_opened(peer, layout, part_blocks)
            case PeerClosed(peer, reason):
                self._outgoing.peer_closed(peer, reason)
            case FromPeer(peer, message):
                self._outgoing.handle(peer, message)

    # ---- requests ----

    def _make_sequence(self, prefill: Prefill, now: float) -> Sequence:
        needed = needs_decode_node(prefill)
        target = prefill.decode if needed else None
        if needed and target is None:
            raise InvalidRequest("a prefill node needs a decode node for more than one token", "decode")
        if target and self._outgoing.is_lost(target.incarnation):
            raise PeerLost(f"decode node {target.address} is being disconnected")
        computed = without_last_token(prefill) if prefill.sampling.beam_width else prefill
        sequence = self._new_sequence(computed, now, hand_off=True)
        sequence.lane = target and target.incarnation
        return sequence

    def _take_in(self, prefill: Prefill, sequence: Sequence, now: float, deadline: float) -> None:
        self._outgoing.add(prefill, sequence, now, deadline)

    def _attempts(self) -> list[AttemptId]:
        return self._outgoing.attempts()

    def _end_attempt(self, attempt_id: AttemptId, error: BatonError) -> None:
        self._outgoing.end_attempt(attempt_id, error)

    def _stop_samples(self, abort: Abort, now: float) -> None:
        """Nothing to do: the decode node drops them, and the prompt has to be computed anyway."""

    def _migrate(self, migrate: Migrate, now: float) -> None:
        error = InvalidRequest("a prefill node hands its requests over by itself", "move")
        self._outbox.to_router(migrate.attempt_id, Stayed(migrate.move, error))

    # ---- its accounts ----

    @property
    def idle(self) -> bool:
        return self._outgoing.idle

    def check_integrity(self) -> None:
        """Raise AssertionError if blocks, slots and handoffs disagree."""
        self.engine.check_integrity()
        self.sender.check_integrity()
        self._outgoing.check_integrity()

    def _count_requests(self) -> tuple[int, int]:
        num_waiting = self.engine.num_waiting
        return num_waiting, len(self._outgoing) - num_waiting

    def _holdings(self) -> list[Holding]:
        return self._outgoing.holdings()

    def _slots(self) -> list[KvSlot]:
        return self.sender.slots()
