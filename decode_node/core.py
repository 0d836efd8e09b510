"""The decode node as a state machine: leases and parts in, tokens out.

Its loop is `prepare` and `compute`: take what arrived, end what is overdue, take what a finished step brought, grant
what fits, adopt what is complete; launch a step if there is room for one and it is time (`engine.pace`). Neither waits
for the device: a step's end makes a turn like an event. Adoption puts a request into the very next step, so the batch
that runs has no gap; the router hears of it when that step begins. A Prefill sent here directly runs on the same
engine, with no lease.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from baton.audit import KvAudit
from baton.deadlines import Deadlines
from baton.errors import BatonError, DeadlineExceeded, NodeUnavailable, Overloaded, RequestCancelled
from baton.messages import (
    Abort,
    Commit,
    End,
    Load,
    NodeRole,
    Prefill,
    Refuse,
    Release,
    Reserve,
    SampleEnd,
    Started,
    Tokens,
    WorkId,
)
from decode_node.leases import Lease
from decode_node.reservations import Reservations
from engine.engine import Engine, Plan
from engine.node.audit import make_audit, verdict
from engine.node.events import (
    ClosePeer,
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
from engine.sequence import Sequence
from engine.step import Chunk, SampledToken, StepResult
from kv_transfer.ranks import ReceiverRanks, peer_of
from kv_transfer.receiver import PartFailed, PartLanded, PartRefused, PartUnused, PeerLost


@dataclass(slots=True)
class Running:
    """A request in this node's engine: the sequence of each live sample (one for all until a local prompt forks)."""

    work: WorkId
    received: float
    sequences: dict[int, Sequence] = field(default_factory=dict)


class DecodeCore:
    """Owned by the engine's thread, and owner of engine and receiver. `max_waiting` bounds each queue; no request has
    more than `max_deadline_s`. A turn costs what an event or a step has touched, whatever else is here."""

    def __init__(
        self,
        engine: Engine,
        receiver: ReceiverRanks,
        *,
        incarnation: str,
        max_waiting: int = 4096,
        max_deadline_s: float = 3600.0,
    ) -> None:
        self.engine = engine
        self.receiver = receiver
        self._incarnation = incarnation
        self._max_waiting = max_waiting
        self._max_deadline_s = max_deadline_s
        self._fences = Fences(max_deadline_s)
        self._outbox = Outbox()
        self._reservations = Reservations(
            engine, receiver, self._outbox, max_waiting=max_waiting, max_deadline_s=max_deadline_s
        )
        self._running: dict[WorkId, Running] = {}
        self._deadlines = Deadlines[WorkId]()  # of those that run
        self._adopted: dict[WorkId, Lease] = {}  # of those that run, whose first step has not begun
        self._peers: dict[str, PeerOpened] = {}  # prefill nodes whose streams are up
        self._stopping = False
        self._plan = Plan()
        self._launch_at: float | None = None  # when the next step is to be launched, if that is waited for

    # ---- the loop ----

    def prepare(self, now: float) -> None:
        self.engine.blocks.now = now
        self._take_transfers(now)
        self._end_overdue(now)
        if not self.engine.has_room:
            self._take_results(self.engine.compute(Plan(), wait=False))
        self._reservations.grant_waiting(now)
        for lease in self._reservations.take_adoptable():
            self._adopt(lease, now)
        due = self.engine.launch_at
        self._launch_at = due if due is not None and now < due else None
        self._plan = self.engine.schedule(now) if self._launch_at is None else Plan()
        if not self.engine.only_launches:
            self._tell_started(now)
        self._tell_adopted(self.engine.computing or self._plan.chunks)  # who computes nothing begins at once

    def compute(self, now: float) -> bool:
        result = self.engine.compute(self._plan, wait=False)
        if self.engine.only_launches:
            self._tell_started(now)
        self._take_results(result)
        self._tell_adopted(self.engine.computing)
        # A step that retired may have made room for a Reserve, also when nothing is left to be computed.
        return result.again or (result.num_tokens > 0 and self._reservations.num_waiting > 0)

    @property
    def device_busy_since(self) -> float | None:
        return self.engine.device_busy_since

    def _take_results(self, result: StepResult) -> None:
        for token in result.sampled:
            self._sampled(self._running[token.sequence.work], token)

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
                case PeerLost(name, reason):
                    peer = peer_of(name)
                    self._reservations.end_peer(peer, self._name_of(peer), reason)
                    self._outbox.add(ClosePeer(peer, reason))

    def _end_overdue(self, now: float) -> None:
        self._reservations.end_overdue(now)
        for work in self._deadlines.due(now):
            self._end_running(self._running[work], DeadlineExceeded("not finished by its deadline"))
        self._fences.expire(now)

    # ---- events in ----

    def handle(self, event: Event, now: float) -> None:
        self.engine.blocks.now = now
        match event:
            case SessionOpened(epoch):
                self._outbox.epochs.add(epoch)
            case SessionLost(epoch):
                self._outbox.epochs.discard(epoch)
                for work in [w for w in self._works() if w.router_epoch == epoch]:
                    self._end_work(work, RequestCancelled("the router's stream ended"))
            case FromRouter(epoch, Prefill() as prefill):
                self._prefill_here(epoch, prefill, now)
            case FromRouter(_, Abort() as abort):
                self._abort(abort, now)
            case FromPeer(peer, _) if peer not in self._peers:
                pass  # its stream has ended: nobody is there to be answered
            case FromPeer(peer, Reserve() as reserve):
                self._reserve(peer, reserve, now)
            case FromPeer(peer, Commit() as commit):
                self._reservations.commit(peer, commit, now)
            case FromPeer(peer, Release() as release):
                self._reservations.release(peer, release)
            case PeerOpened(peer, part_blocks, layout) as opened:
                self._peers[peer] = opened
                self._reservations.peer_opened(peer, layout, part_blocks)
            case PeerClosed(peer, reason):
                self._reservations.end_peer(peer, self._name_of(peer), reason)
                self._reservations.peer_closed(peer)
                self._peers.pop(peer, None)
            case Draining():
                self._stopping = True

    def _name_of(self, peer: str) -> str:
        opened = self._peers.get(peer)
        return opened.name if opened and opened.name else peer

    def _admit(self, work: WorkId, now: float, deadline_s: float) -> bool:
        """Whether the work is news. Then the attempt before it ends, if it is still here."""
        last = self._fences.last(work)
        if not self._fences.admit(work, now, deadline_s):
            return False
        if last:
            self._end_work(last, RequestCancelled(f"attempt {work.attempt} took its place"))
        return True

    def _check(self, target_incarnation: str) -> None:
        if target_incarnation != self._incarnation:
            raise NodeUnavailable("the decode node was started anew")
        if self._stopping:
            raise NodeUnavailable("the decode node is stopping")

    def _reserve(self, peer: str, reserve: Reserve, now: float) -> None:
        work = reserve.work
        if not self._admit(work, now, reserve.deadline_s):
            if (
                work not in self._running and work not in self._reservations
            ):  # else it is a repeat of one that is being served
                self._outbox.to_prefill(peer, Refuse(work, RequestCancelled("the attempt is over")))
            return
        try:
            self._check(reserve.target_incarnation)
            if work.router_epoch not in self._outbox.epochs:
                raise NodeUnavailable("the request's router is not subscribed to the decode node")
            self._reservations.reserve(peer, reserve, now)
        except BatonError as error:
            self._outbox.to_prefill(peer, Refuse(work, error))

    def _prefill_here(self, epoch: int, prefill: Prefill, now: float) -> None:
        work = prefill.work
        if epoch not in self._outbox.epochs or not self._admit(work, now, prefill.deadline_s):
            return  # a repeat, or fenced: whoever sent it has its answer or wants none
        try:
            self._check(prefill.target_incarnation)
            if self.engine.num_waiting >= self._max_waiting:
                raise Overloaded(f"{self._max_waiting} prompts are waiting")
            sequence = make_sequence(prefill, hand_off=False, now=now)
            self.engine.add(sequence)
        except BatonError as error:
            self._outbox.to_router(work, End(error))
            return
        deadline = now + min(prefill.deadline_s, self._max_deadline_s)
        self._run(Running(work, now, dict.fromkeys(sequence.samples, sequence)), deadline)

    # ---- running ----

    def _adopt(self, lease: Lease, now: float) -> None:
        """Into the next step's batch: all KV is here. The engine takes over the lease's blocks."""
        commit, work = lease.commit, lease.reserve.work
        assert commit is not None
        stopped = self._fences.stopped(work)
        outputs = {s.index: s.output_tokens for s in commit.samples if s.index not in stopped}
        needed = max(0, len(outputs) - 1)
        self.engine.blocks.release(lease.spares[needed:])
        if not outputs:
            self.engine.blocks.release(lease.table)
            self._outbox.to_router(work, End())
            return
        sequence = Sequence(
            work=work,
            samples=list(outputs),
            prompt_tokens=commit.prompt_tokens,
            sampling=commit.sampling,
            cache_salt=commit.cache_salt,
            arrived_s=now,
            block_table=lease.table,
            num_computed_tokens=lease.reserve.num_tokens,
            num_cached_tokens=lease.num_cached_tokens,
        )
        sequence.take_names(lease.reserve.block_hashes[: lease.reserve.num_tokens // lease.block_size])
        adopted = self.engine.adopt(sequence, outputs, lease.spares[:needed])
        self._run(Running(work, now, {s.samples[0]: s for s in adopted}), lease.deadline)
        self._adopted[work] = lease

    def _run(self, running: Running, deadline: float) -> None:
        self._running[running.work] = running
        self._deadlines.set(running.work, deadline)

    def _tell_started(self, now: float) -> None:
        for sequence in self._plan.started:
            queue_s = now - self._running[sequence.work].received
            self._outbox.to_router(sequence.work, Started(sequence.num_cached_tokens, queue_s))

    def _tell_adopted(self, chunks: Iterable[Chunk]) -> None:
        """Whose first step this is, which begins now."""
        if self._adopted:
            for work in self._adopted.keys() & {chunk.sequence.work for chunk in chunks}:
                self._outbox.to_router(work, self._adopted.pop(work).adopted(self.engine.clock()))

    def _sampled(self, running: Running, token: SampledToken) -> None:
        running.sequences[token.sample] = token.sequence
        if token.sample in self._fences.stopped(running.work):  # stopped while its prompt stood for several samples
            self._drop_sample(running, token.sample)
            return
        logprobs = (token.logprobs,) if token.logprobs else ()
        self._outbox.to_router(running.work, Tokens(token.sample, token.index, (token.token,), logprobs))
        if token.finish:
            self._outbox.to_router(running.work, SampleEnd(token.sample, token.finish, token.stop_token_id))
            self._drop_sample(running, token.sample)

    def _drop_sample(self, running: Running, sample: int) -> None:
        self.engine.release(running.sequences.pop(sample))
        if not running.sequences:
            self._forget(running.work)
            self._outbox.to_router(running.work, End())

    # ---- ends ----

    def _works(self) -> list[WorkId]:
        return [*self._running, *self._reservations.works()]

    def _abort(self, abort: Abort, now: float) -> None:
        work = abort.work
        if not abort.samples:
            last = self._fences.last(work)
            if not self._fences.fence(work, now, abort.deadline_s):
                self._outbox.close_session(work.router_epoch, "too many aborts of work that is not known here")
            if last and last.attempt <= work.attempt:
                self._end_work(last, RequestCancelled("aborted by the router"))
            return
        if not self._fences.stop_samples(work, abort.samples, now, abort.deadline_s):
            self._outbox.close_session(work.router_epoch, "too many aborts of single samples")
        running = self._running.get(work)
        for sample in abort.samples:
            sequence = running.sequences.get(sample) if running else None
            if running and sequence and len(sequence.samples) == 1:
                self._drop_sample(running, sample)

    def _end_work(self, work: WorkId, error: BatonError) -> None:
        """Wherever it is; nothing happens if it is not here."""
        self._reservations.end_work(work, error)
        if running := self._running.get(work):
            self._end_running(running, error)

    def _end_running(self, running: Running, error: BatonError) -> None:
        self._forget(running.work)
        for sequence in running.sequences.values():
            self.engine.release(sequence)
        self._outbox.to_router(running.work, End(error))

    def _forget(self, work: WorkId) -> None:
        del self._running[work]
        self._deadlines.discard(work)
        self._adopted.pop(work, None)

    # ---- what the shell asks ----

    def next_deadline(self) -> float | None:
        times = (self._deadlines.next(), self._reservations.next_deadline(), self._launch_at)
        return min((when for when in times if when is not None), default=None)

    def take_outputs(self) -> list[Output]:
        return self._outbox.take()

    def load(self) -> Load:
        engine, blocks = self.engine, self.engine.blocks
        waiting = engine.num_waiting + self._reservations.num_waiting
        num_free = blocks.num_free + blocks.num_cached
        return Load(waiting, engine.num_running, num_free, blocks.num_total, self._stopping)

    @property
    def idle(self) -> bool:
        return not self._running and not len(self._reservations)

    def check_integrity(self) -> None:
        """Raise AssertionError where blocks, slots, leases and sequences disagree. For tests and the audit."""
        self.engine.check_integrity(self._reservations.holdings())
        self.receiver.check_integrity()

    def audit(self, now: float) -> KvAudit:
        return make_audit(
            role=NodeRole.DECODE,
            incarnation=self._incarnation,
            integrity=verdict(self.check_integrity),
            idle=self.idle,
            blocks=self.engine.blocks,
            holdings=[*self.engine.holdings(), *self._reservations.holdings()],
            slots=self.receiver.slots(),
            now=now,
        )
