"""The common part of both roles' state machines: sessions, fences, intake, and the turn of the loop.

    handle(event)*  ->  prepare: transfers, deadlines, a finished step, what these made possible; decide the next step
                    ->  compute: launch it, take the results of steps that retired

Neither half waits for the device: the end of a step triggers a turn, as an event does. A role implements its handling
of prompts, parts and peers in the abstract methods at the end.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from baton.audit import KvAudit, KvSlot
from baton.errors import BatonError, InvalidRequest, NodeUnavailable, Overloaded, RequestCancelled
from baton.messages import Abort, AttemptId, End, Load, Migrate, Prefill
from baton.node_info import NodeRole
from engine.beams import BeamGroup
from engine.engine import Engine
from engine.holdings import Holding
from engine.scheduler import Plan
from engine.sequence import Sequence
from engine.step import StepResult
from node.audit import make_audit, verdict
from node.events import (
    BlocksWanted,
    Draining,
    Event,
    FromPeer,
    Output,
    PeerClosed,
    PeerEvent,
    PeerOpened,
    SessionLost,
    SessionOpened,
    TargetEvent,
)
from node.fences import Fences
from node.kv_events.block_changes import BlockChanges
from node.logits_processors import LogitsProcessors
from node.outbox import Outbox
from node.structured_output.matchers import Matchers

if TYPE_CHECKING:
    from node.structured_output.grammars import Grammars  # imports numpy, which a simulated node does without


@dataclass(frozen=True, slots=True)
class RoleOptions:
    """What both roles take besides the engine and what moves KV.

    At most `max_waiting` requests wait in a queue, not counting those whose answers have begun; no deadline is longer
    than `max_deadline_s`. `grammars`: compiles what answers must match; without it, requests with structured outputs
    are refused. `processors`: likewise, for logits processors.
    """

    incarnation: str
    max_waiting: int = 4096
    max_deadline_s: float = 3600.0
    grammars: Grammars | None = None
    processors: LogitsProcessors | None = None


class RoleCore(ABC):
    """Implements `node.events.Role`. Owned by the engine's thread, and owner of the engine.

    The cost of a turn depends on what its events and steps touched, not on the number of requests.
    """

    role: ClassVar[NodeRole]

    def __init__(self, engine: Engine, options: RoleOptions) -> None:
        self.engine = engine
        self._processors = options.processors or LogitsProcessors({})
        self._matchers = Matchers(options.grammars)
        self._incarnation = options.incarnation
        self._max_waiting = options.max_waiting
        self._max_deadline_s = options.max_deadline_s
        self._fences = Fences(options.max_deadline_s)
        self._outbox = Outbox()
        self._stopping = False
        self._plan = Plan()
        self.block_changes = BlockChanges(engine, self._outbox)

    # ---- the loop ----

    def prepare(self, now: float) -> None:
        self.engine.blocks.now = now
        self._take_transfers(now)
        self._end_overdue(now)
        self._fences.expire(now)
        for attempt_id, error in self._matchers.take_failed():
            self._end_attempt(attempt_id, error)
        if not self.engine.has_room:
            self._take(self.engine.retire())
        self._move_on(now)
        self._plan = self._schedule(now)
        if not self.engine.only_launches:
            self._tell_launched(self._plan, now)
        if not self._outbox.is_empty:  # otherwise the turn's second half reports the changes of both
            self.block_changes.tell()

    def compute(self, now: float) -> bool:
        result = self.engine.compute(self._plan, wait=False)
        if self.engine.only_launches:
            self._tell_launched(self._plan, now)
        self._take(result)
        again = self._computed(result, now)
        self.block_changes.tell()
        return again

    def _take(self, result: StepResult) -> None:
        self._take_results(result)
        for sequence, failure in result.failed:
            # The request itself is the cause: it would fail on any node, so no node should be avoided because of it.
            self._end_attempt(sequence.attempt_id, InvalidRequest(failure))

    @property
    def device_busy_since(self) -> float | None:
        return self.engine.device_busy_since

    def _schedule(self, now: float) -> Plan:
        return self.engine.schedule(now)

    # ---- events in ----

    def handle(self, event: Event, now: float) -> None:
        self.engine.blocks.now = now
        match event:
            case SessionOpened(epoch):
                self._outbox.epochs.add(epoch)
                self.block_changes.record_if_wanted()
                self.block_changes.tell_held(epoch)
            case BlocksWanted(epoch) if epoch in self._outbox.epochs:
                self.block_changes.tell_held(epoch)
            case SessionLost(epoch):
                self._outbox.epochs.discard(epoch)
                self.block_changes.record_if_wanted()
                # Other nodes hear of the refusal, and may tell the router before it notices; it then places the work
                # elsewhere.
                lost = NodeUnavailable(f"the router's stream to the {self.role.value} node ended")
                for attempt_id in [attempt_id for attempt_id in self._attempts() if attempt_id.router_epoch == epoch]:
                    self._end_attempt(attempt_id, lost)
            case Prefill() as prefill:
                self._intake(prefill, now)
            case Abort() as abort:
                self._abort(abort, now)
            case Migrate() as migrate if migrate.attempt_id.router_epoch in self._outbox.epochs:
                self._migrate(migrate, now)
            case PeerOpened() | PeerClosed() | FromPeer() | TargetEvent():
                self._handle_peer(event, now)
            case Draining():
                self._stopping = True

    def _admit(self, attempt_id: AttemptId, now: float, deadline_s: float, move: int = 0) -> bool:
        """Whether the attempt, or this move of it, is new. If so, end the previous attempt at the request if it is
        still here."""
        last = self._fences.last(attempt_id)
        if not self._fences.admit(attempt_id, now, deadline_s, move):
            return False
        if last:
            self._end_attempt(last, RequestCancelled(f"attempt {attempt_id.attempt} took its place"))
        return True

    def _check_target(self, incarnation: str) -> None:
        """Raises NodeUnavailable if the work is meant for another incarnation, or the node is stopping."""
        if incarnation != self._incarnation:
            raise NodeUnavailable(f"the {self.role.value} node was restarted")
        if self._stopping:
            raise NodeUnavailable(f"the {self.role.value} node is stopping")

    def _intake(self, prefill: Prefill, now: float) -> None:
        attempt_id, epochs = prefill.attempt_id, self._outbox.epochs
        if attempt_id.router_epoch not in epochs or not self._admit(attempt_id, now, prefill.deadline_s):
            return  # a repeat, a fenced attempt, or a lost session: no answer is needed
        try:
            self._check_target(prefill.target_incarnation)
            if self.engine.num_waiting >= self._max_waiting and not prefill.goes_on:
                raise Overloaded(f"{self._max_waiting} prompts are waiting")
            sequence = self._make_sequence(prefill, now)
            self.engine.add(sequence)
        except BatonError as error:
            self._outbox.to_router(attempt_id, End(error))
            return
        self._take_in(prefill, sequence, now, now + min(prefill.deadline_s, self._max_deadline_s))

    def _new_sequence(
        self, prefill: Prefill, now: float, *, hand_off: bool, beams: BeamGroup[Sequence] | None = None
    ) -> Sequence:
        """The sequence that computes prompt and output so far. Raises InvalidRequest if the output is complete already,
        or the node cannot do what is asked for; `Engine.add` checks whether the tokens fit."""
        output, sampling = prefill.samples[0].output_tokens, prefill.sampling
        if sampling.beam_width and output:
            raise InvalidRequest("a beam search cannot go on from an output", "samples")
        if len(output) >= sampling.max_tokens:
            raise InvalidRequest(f"{len(output)} tokens of max_tokens {sampling.max_tokens} exist already")
        return Sequence(
            attempt_id=prefill.attempt_id,
            samples=[0] if beams else [s.index for s in prefill.samples],
            prompt_tokens=prefill.prompt_tokens,
            output=output,
            sampling=BeamGroup.sampling_of(sampling) if beams else sampling,
            hand_off=hand_off,
            cache_salt=prefill.cache_salt,
            arrived_s=now,
            age_s=prefill.age_s,
            priority=prefill.priority,
            matcher=self._matchers.make(prefill.attempt_id, sampling, output),
            num_prompt_logprobs=sampling.num_prompt_logprobs,
            processors=self._processors.chain(sampling.logits_processors),
            beams=beams,
        )

    def _abort(self, abort: Abort, now: float) -> None:
        attempt_id = abort.attempt_id
        if abort.samples:
            self._stop_samples(abort, now)
            return
        last = self._fences.last(attempt_id)
        if not self._fences.fence(attempt_id, now, abort.deadline_s):
            self._outbox.close_session(attempt_id.router_epoch, "too many aborts of work that is not known here")
        if last and last.attempt <= attempt_id.attempt:
            self._end_attempt(last, RequestCancelled("aborted by the router"))

    # ---- for the shell ----

    def end_turn(self) -> None:
        self.block_changes.tell_follower()

    def take_outputs(self) -> list[Output]:
        return self._outbox.take()

    def load(self) -> Load:
        num_waiting, num_running = self._count_requests()
        blocks, target_s = self.engine.blocks, self.engine.config.target_itl_s
        return Load(
            num_waiting,
            num_running,
            max(0, blocks.num_unclaimed),
            blocks.num_total,
            self._stopping,
            self.engine.waiting.num_tokens,
            target_itl_s=target_s or 0.0,
            prompt_tokens_per_s=self.engine.prompt_tokens_per_s if target_s else 0.0,
        )

    def audit(self, now: float) -> KvAudit:
        return make_audit(
            role=self.role,
            incarnation=self._incarnation,
            integrity=verdict(self.check_integrity),
            idle=self.idle,
            blocks=self.engine.blocks,
            holdings=self._holdings(),
            slots=self._slots(),
            now=now,
        )

    # ---- implemented by the role: the turn ----

    @abstractmethod
    def _take_transfers(self, now: float) -> None:
        """Handle the transport's events."""

    @abstractmethod
    def _end_overdue(self, now: float) -> None:
        """End requests that are past their deadlines."""

    @abstractmethod
    def _take_results(self, result: StepResult) -> None:
        """Handle the results of a step that retired."""

    @abstractmethod
    def _move_on(self, now: float) -> None:
        """Do what has become possible since the last turn, before the next step is decided."""

    @abstractmethod
    def _tell_launched(self, plan: Plan, now: float) -> None:
        """Report the sequences for which this turn's step is the first."""

    @abstractmethod
    def _computed(self, result: StepResult, now: float) -> bool:
        """The step is launched and its results are taken. Returns whether there is more to do at once."""

    @abstractmethod
    def next_deadline(self) -> float | None:
        """See `Role`."""

    # ---- implemented by the role: requests and peers ----

    @abstractmethod
    def _make_sequence(self, prefill: Prefill, now: float) -> Sequence:
        """By `_new_sequence`. Raises the BatonError to send to the router if this node cannot serve the request."""

    @abstractmethod
    def _take_in(self, prefill: Prefill, sequence: Sequence, now: float, deadline: float) -> None:
        """Take over the request; the engine has its sequence."""

    @abstractmethod
    def _attempts(self) -> list[AttemptId]:
        """All attempts on this node."""

    @abstractmethod
    def _end_attempt(self, attempt_id: AttemptId, error: BatonError) -> None:
        """End the attempt in whatever state it is; a no-op if it is not here."""

    @abstractmethod
    def _stop_samples(self, abort: Abort, now: float) -> None:
        """End these samples of the attempt."""

    @abstractmethod
    def _migrate(self, migrate: Migrate, now: float) -> None:
        """Begin to hand the attempt over to another decode node."""

    @abstractmethod
    def _handle_peer(self, event: PeerEvent, now: float) -> None:
        """Handle an event of a handoff stream."""

    # ---- implemented by the role: its accounts ----

    @property
    @abstractmethod
    def idle(self) -> bool:
        """See `Role`."""

    @abstractmethod
    def check_integrity(self) -> None:
        """See `Role`. For tests and the audit."""

    @abstractmethod
    def _count_requests(self) -> tuple[int, int]:
        """How many are waiting, and how many running."""

    @abstractmethod
    def _holdings(self) -> list[Holding]:
        """All holdings of blocks."""

    @abstractmethod
    def _slots(self) -> list[KvSlot]:
        """The staging slots."""
