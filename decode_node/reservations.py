"""The decode node's reservations: a queue of Reserves, leases with blocks and slots, parts, commits.

Nothing here runs a model. A committed lease with all its parts is handed out, blocks included, by `take_adoptable`; any
other ends here, exactly once, with its blocks freed at once and its slots as soon as their parts have arrived or
failed. During a lease, blocks that parts go into are marked as loading: the receiver may write to them at any time.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence as Seq
from itertools import chain

from baton.audit import KvUse
from baton.deadlines import Deadlines
from baton.errors import (
    BatonError,
    CacheExhausted,
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    Overloaded,
    PeerLost,
    RequestCancelled,
    TransferError,
    TransferTimeout,
)
from baton.handoff_messages import Commit, CommitReply, Grant, Landed, Refuse, Release, Reserve
from baton.layout import KvLayout
from baton.messages import AttemptId, End
from baton.waiting_queue import WaitingQueue
from decode_node.credits import LeaseCredits
from decode_node.leases import Extras, Lease, LeaseState, Waiting
from decode_node.turn_budget import Budget
from engine.engine import Engine
from engine.holdings import Holding
from kv_transfer.parts import PartPlanner
from kv_transfer.ranks import ReceiverRanks
from kv_transfer.receiver import PartLanded
from node.expiring_dict import ExpiringDict
from node.fences import UNDER_WAY_S
from node.outbox import Outbox

LEASE_OVER = RequestCancelled("the lease is over")


class Reservations:
    """Uses the engine's blocks, and the receiver's slots through `lease_credits`; sends to prefill nodes and routers
    through `outbox`. At most `max_waiting` Reserves wait; those of requests whose answers have begun (`goes_on`) do not
    count.

    Each attempt is here once, as a waiting Reserve or as a lease. The cost of a turn depends on what its events
    touched, not on the number of attempts. No deadline is more than `max_deadline_s` away."""

    def __init__(
        self,
        engine: Engine,
        receiver: ReceiverRanks,
        lease_credits: LeaseCredits,
        outbox: Outbox,
        *,
        max_waiting: int,
        max_deadline_s: float,
    ) -> None:
        self._engine = engine
        self._blocks = engine.blocks
        self._shape = engine.tables.shape
        self._receiver = receiver
        self._credits = lease_credits
        self._outbox = outbox
        self._max_waiting = max_waiting
        self._max_deadline_s = max_deadline_s
        self._planners: dict[str, PartPlanner] = {}  # of prefill nodes whose streams are up
        self._queue = WaitingQueue[AttemptId]()
        self._waiting: dict[AttemptId, Waiting] = {}  # those in the queue
        self._leases: dict[int, Lease] = {}  # by serial
        self._lease_of: dict[AttemptId, Lease] = {}  # the same leases
        self._deadlines = Deadlines[AttemptId]()  # of Reserves and leases
        self._num_long = 0  # how many Reserves and leases are long, see `Waiting.is_long`, `Lease.is_long`
        self._ready: list[Lease] = []  # committed and complete; some may have ended meanwhile
        # Of leases that ended: the peer, and the answer to a repeated Commit, for as long as one may arrive.
        self._outcomes = ExpiringDict[int, tuple[str, BatonError | None]]()
        self._last_serial = 0

    def __len__(self) -> int:
        return len(self._queue) + len(self._leases)

    def __contains__(self, attempt_id: AttemptId) -> bool:
        """Whether the attempt waits or has a lease."""
        return attempt_id in self._queue or attempt_id in self._lease_of

    def attempts(self) -> list[AttemptId]:
        """All attempts here."""
        return [*self._queue, *self._lease_of]

    def holdings(self) -> list[Holding]:
        """The blocks that each lease owns, and those of them that its parts are written to."""
        return [
            Holding(
                kind="lease",
                state=lease.state.value,
                attempt_id=lease.reserve.attempt_id,
                samples=(),
                since_s=lease.granted,
                blocks=blocks,
                use=use,
                lease=serial,
                peer=lease.peer,
            )
            for serial, lease in self._leases.items()
            for use, blocks in ((KvUse.OWNS, [*lease.table, *lease.spares]), (KvUse.WRITES, lease.written))
            if blocks
        ]

    @property
    def num_waiting(self) -> int:
        return len(self._queue)

    @property
    def has_long(self) -> bool:
        """Whether a long prompt has a lease, or waits for one."""
        return self._num_long > 0

    def check_integrity(self) -> None:
        """Assert that long prompts among the Reserves and leases are counted correctly."""
        holders: list[Waiting | Lease] = [*self._waiting.values(), *self._leases.values()]
        assert self._num_long == sum(holder.is_long for holder in holders), "long prompts are miscounted"

    def next_deadline(self) -> float | None:
        return self._deadlines.next()

    # ---- streams, reserve, grant ----

    def peer_opened(self, peer: str, layout: KvLayout, part_blocks: int) -> None:
        """The prefill node's stream is up; its layout is compatible."""
        self._planners[peer] = self._receiver.planner(layout, part_blocks)

    def peer_closed(self, peer: str) -> None:
        """The prefill node's stream is down, and its Reserves and leases have been ended."""
        self._planners.pop(peer, None)

    def reserve(self, peer: str, reserve: Reserve, now: float) -> None:
        """Queue a Reserve; the peer's stream must be up. Raises the BatonError with which to refuse it."""
        config, total = self._engine.config, self._blocks.num_total
        if len(self._queue) >= self._max_waiting and not reserve.goes_on:
            raise Overloaded(f"{self._max_waiting} requests wait for room on the decode node")
        if reserve.num_samples > config.max_num_seqs:
            raise InvalidRequest(f"n {reserve.num_samples} is more than --max-num-seqs {config.max_num_seqs}", "n")
        if reserve.max_total_tokens > config.max_model_len:
            raise InvalidRequest(
                f"{reserve.max_total_tokens} tokens are more than {config.max_model_len}", "max_tokens"
            )
        if (needed := self._num_blocks(reserve)) > total:
            raise CacheExhausted(f"{needed} KV blocks are needed and the decode node has {total}")
        if not 1 <= reserve.layer_groups <= self._receiver.layout.num_layers:
            raise InvalidRequest(f"{reserve.layer_groups} groups of layers", "layer_groups")
        deadline = now + min(reserve.deadline_s, self._max_deadline_s)
        num_blocks = self._shape.num_columns(reserve.num_tokens) * self._shape.width
        waiting = Waiting(reserve, peer, deadline, now - reserve.age_s, num_blocks)
        self._queue.add(reserve.attempt_id, waiting.due_s)
        self._waiting[reserve.attempt_id] = waiting
        self._num_long += waiting.is_long
        self._deadlines.set(reserve.attempt_id, deadline)

    def grant_waiting(self, now: float, budget: Budget) -> None:
        """Grant Reserves in the order in which they are due, as long as the budget allows for their tables. A Reserve
        waits for this node's own requests that wait for blocks and are due earlier; prompts here that are due later
        than the first Reserve left begin after it."""
        waiting = self._engine.waiting
        waiting.begins_until_s = math.inf
        while self._queue:
            first = self._waiting[next(iter(self._queue))]
            can_spend = not waiting.lacks_blocks(first.due_s) and budget.spend(first.num_blocks)
            if not can_spend or not self._grant(first, now):
                waiting.begins_until_s = first.due_s
                break
            self._remove(first)

    def _num_blocks(self, reserve: Reserve) -> int:
        """All full blocks that are still read, in each group, and one block per sample and group to write to."""
        return len(self._lacking(reserve, (0,) * self._shape.width)) + self._num_spares(reserve)

    def _lacking(self, reserve: Reserve, held: Seq[int]) -> Seq[int]:
        """The entries of the request's table that need new blocks: to fill, or for the first step to write to."""
        return self._shape.lacking(reserve.num_tokens // self._shape.block_size + 1, reserve.num_least_tokens, held)

    def _num_spares(self, reserve: Reserve) -> int:
        return (reserve.num_samples - 1) * self._shape.width

    def _room(self, waiting: Waiting) -> list[list[int]] | None:
        """The blocks of each group that are cached here, if there is room for the rest. None: there is no room."""
        engine, reserve = self._engine, waiting.reserve
        before = engine.waiting.num_up_to(waiting.due_s)
        seqs = engine.num_running + before + engine.scheduler.num_reserved_seqs + reserve.num_samples
        if seqs > engine.config.max_num_seqs:
            return None
        tables, least = engine.tables, reserve.num_least_tokens
        found = tables.match_from(reserve.block_hashes[: least // self._shape.block_size], least)
        fresh = len(self._lacking(reserve, tables.ends_of(found, least))) + self._num_spares(reserve)
        # Running sequences will need blocks soon: a grant that took the last ones would only cause a preemption.
        spare = engine.num_running * self._shape.width if engine.num_running or self._leases else 0
        return found if self._blocks.can_allocate(fresh + spare, keep=list(chain.from_iterable(found))) else None

    def _grant(self, waiting: Waiting, now: float) -> bool:
        found = self._room(waiting)
        if found is None:
            return False
        reserve, tables, least = waiting.reserve, self._engine.tables, waiting.reserve.num_least_tokens
        held = tables.ends_of(found, least)
        lacking = self._lacking(reserve, held)
        self._blocks.acquire(list(chain.from_iterable(found)))
        fresh = self._engine.allocate(len(lacking) + self._num_spares(reserve))
        end = self._shape.num_columns(reserve.num_tokens) * self._shape.width
        entries = lacking[: bisect.bisect_left(lacking, end)]
        tail = reserve.grouped_from_block * self._shape.width, reserve.layer_groups
        self._last_serial += 1
        lease = Lease(
            serial=self._last_serial,
            reserve=reserve,
            peer=waiting.peer,
            deadline=waiting.deadline,
            granted=now,
            since_s=waiting.since_s,
            table=tables.table_of(found, least, lacking, fresh[: len(lacking)]),
            spares=fresh[len(lacking) :],
            num_cached_tokens=held[0] * self._shape.block_size if found[0] else 0,
            entries=entries,
            parts=self._planners[waiting.peer].of_entries(entries, *tail),
            marks=self._receiver.mark(),
        )
        self._leases[lease.serial] = self._lease_of[reserve.attempt_id] = lease
        self._num_long += lease.is_long
        self._blocks.begin_load(lease.written)
        self._engine.scheduler.reserve_seqs(reserve.num_samples)
        # While a step runs, a long lease's further receives are posted in the next turn, when the step ends: this turn
        # has taken long already, and no part comes that soon.
        self._credits.begin(lease, is_put_off=lease.is_long and self._engine.device_busy_since is not None)
        terms = held[0], lease.num_parts, lease.credits, self._receiver.verify, held[1:]
        self._outbox.to_prefill(lease.peer, Grant(reserve.attempt_id, lease.serial, *terms))
        return True

    # ---- parts, commit ----

    def part_landed(self, part: PartLanded, now: float) -> None:
        """Record a part. If its lease has ended, the part landed before the end and is ignored."""
        if lease := self._leases.get(part.lease):
            lease.arrived.add(part.part)
            lease.transfer_bytes += part.num_bytes
            lease.last_arrived, lease.landed = now - part.landing_s, now
            self._credits.part_landed()
            self._note_if_ready(lease)

    def part_refused(self, serial: int, error: TransferError) -> None:
        if lease := self._leases.get(serial):
            self._end(lease, error)

    def part_failed(self, serial: int, part: int, reason: str) -> None:
        if lease := self._leases.get(serial):
            self._end(lease, PeerLost(f"part {part} did not arrive: {reason}"))

    def commit(
        self,
        peer: str,
        commit: Commit,
        now: float,
        extras: Extras,
        refusal: BatonError | None = None,
    ) -> None:
        """Take over the lease's request, and answer; a repeated Commit gets the same answer. extras: see Extras.
        refusal: why its parameters cannot be served here; it ends the lease."""
        answer = self._commit(peer, commit, now, extras, refusal)
        self._outbox.to_prefill(peer, CommitReply(commit.lease, commit.attempt_id, answer))

    def _commit(
        self,
        peer: str,
        commit: Commit,
        now: float,
        extras: Extras,
        refusal: BatonError | None,
    ) -> BatonError | None:
        lease = self._leases.get(commit.lease)
        if lease is None or lease.peer != peer:
            owner, outcome = self._outcomes.get(commit.lease) or ("", LEASE_OVER)
            return outcome if owner == peer else LEASE_OVER
        if lease.state is LeaseState.COMMITTED:
            return None
        if not lease.fits(commit):
            refusal = InternalError(f"the commit of {commit.attempt_id} does not fit lease {lease.serial}")
        if refusal is not None:
            self._end(lease, refusal)
            return refusal
        lease.extras = extras
        lease.state, lease.commit, lease.committed = LeaseState.COMMITTED, commit, now
        # The Commit states the deadline again. If the Reserve took longer on its way, this one is earlier and more
        # exact.
        lease.deadline = min(lease.deadline, now + commit.deadline_s)
        self._deadlines.set(commit.attempt_id, lease.deadline)
        self._note_if_ready(lease)
        return None

    def _note_if_ready(self, lease: Lease) -> None:
        if lease.adoptable:
            self._ready.append(lease)

    def take_adoptable(self, budget: Budget) -> list[Lease]:
        """Committed leases with all their KV, as long as the budget allows for their tables. The caller owns their
        blocks from now on."""
        ready, later = list[Lease](), list[Lease]()
        for lease in self._ready:
            if lease.serial in self._leases:
                (ready if budget.spend(len(lease.table)) else later).append(lease)
        self._ready = later
        for lease in ready:
            self._blocks.finish_load(lease.written)
            self._forget(lease, None)
            if lease.is_move:
                self._outbox.to_prefill(lease.peer, Landed(lease.serial, lease.reserve.attempt_id))
        return ready

    # ---- ends ----

    def release(self, peer: str, release: Release) -> None:
        """The prefill node gives up the lease, and tells the router itself. It gets a Refuse, after which no credit
        follows."""
        waiting, lease = self._waiting.get(release.attempt_id), self._lease_of.get(release.attempt_id)
        if waiting and waiting.peer == peer:
            self._leave_queue(waiting)
        if lease and lease.peer == peer:
            self._give_back(lease, LEASE_OVER)
            self._outbox.to_prefill(peer, Refuse(release.attempt_id, LEASE_OVER))

    def end_attempt(self, attempt_id: AttemptId, error: BatonError) -> None:
        """End the attempt's Reserve or lease; the prefill node gets a Refuse, and drains its granted parts."""
        if waiting := self._waiting.get(attempt_id):
            self._leave_queue(waiting)
            self._outbox.to_prefill(waiting.peer, Refuse(attempt_id, error))
        if lease := self._lease_of.get(attempt_id):
            self._end(lease, error)

    def end_peer(self, peer: str, name: str, reason: str) -> None:
        """The prefill node is gone: end its Reserves, and its leases of which it owes something. name: for the error
        message."""
        owing = [lease for lease in self._leases.values() if not lease.adoptable]
        holders: list[Waiting | Lease] = [*self._waiting.values(), *owing]
        for holder in holders:
            if holder.peer == peer:
                self.end_attempt(holder.reserve.attempt_id, PeerLost(f"prefill node {name}: {reason}"))

    def end_overdue(self, now: float) -> None:
        for attempt_id in self._deadlines.due(now):
            if lease := self._lease_of.get(attempt_id):
                missing = lease.num_parts - len(lease.arrived)
                self._end(lease, TransferTimeout(f"{missing} of {lease.num_parts} parts missing at the deadline"))
            else:
                waited_s = self._waiting[attempt_id].reserve.deadline_s
                self.end_attempt(attempt_id, DeadlineExceeded(f"no room on the decode node within {waited_s:g} s"))
        self._outcomes.expire(now)

    def _leave_queue(self, waiting: Waiting) -> None:
        """The Reserve will get no lease."""
        self._remove(waiting)
        self._deadlines.discard(waiting.reserve.attempt_id)

    def _remove(self, waiting: Waiting) -> None:
        self._queue.remove(waiting.reserve.attempt_id)
        del self._waiting[waiting.reserve.attempt_id]
        self._num_long -= waiting.is_long

    def _end(self, lease: Lease, error: BatonError) -> None:
        """Until the Commit, a request that moves belongs to its old node, which tells the router."""
        self._give_back(lease, error)
        self._outbox.to_prefill(lease.peer, Refuse(lease.reserve.attempt_id, error))
        if not lease.is_move or lease.state is LeaseState.COMMITTED:
            self._outbox.to_router(lease.reserve.attempt_id, End(error))

    def _give_back(self, lease: Lease, outcome: BatonError) -> None:
        self._receiver.withdraw(lease.serial)
        self._blocks.fail_load(lease.written)
        self._forget(lease, outcome)
        self._blocks.release([*lease.table, *lease.spares])

    def _forget(self, lease: Lease, outcome: BatonError | None) -> None:
        """Remove a lease whose parts can no longer land. Its peer may repeat the Commit until the deadline."""
        del self._leases[lease.serial], self._lease_of[lease.reserve.attempt_id]
        self._credits.end(lease)
        self._num_long -= lease.is_long
        self._deadlines.discard(lease.reserve.attempt_id)
        self._outcomes.keep(lease.serial, (lease.peer, outcome), lease.deadline + UNDER_WAY_S)
        self._engine.scheduler.unreserve_seqs(lease.reserve.num_samples)
