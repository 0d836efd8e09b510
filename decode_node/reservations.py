"""The decode node's promises: a queue of Reserves, leases with blocks and slots, parts, commits.

Nothing here runs a model. A lease that is committed and has all its parts is handed out by `take_adoptable`, blocks and
all; everything else ends here, exactly once, with its blocks back in the pool at once and its slots as soon as their
parts have come or failed. Blocks that parts go into are pinned until then: the receiver writes them when it likes.
"""

from __future__ import annotations

from collections import OrderedDict, deque

from baton.audit import KvUse
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
from baton.layout import num_blocks_for
from baton.messages import Commit, CommitReply, Credit, End, Grant, Refuse, Release, Reserve, WorkId
from decode_node.leases import Lease, LeaseState, Waiting
from engine.engine import Engine
from engine.holdings import Holding
from engine.node.outbox import Outbox
from kv_transfer.parts import plan_parts
from kv_transfer.receiver import KvReceiver, PartLanded

MIN_OPEN_PARTS = 2
"""Slots that one lease may hold at a time, even if few are left. It may always hold as many as are free beside, so that
a prompt alone has half of them, and a slow one does not keep all of them from the others (the dynamic threshold of
Choudhury and Hahne, 1998)."""

LEASE_OVER = RequestCancelled("the lease is over")


class Reservations:
    """Uses the engine's blocks and the receiver's slots; tells prefill nodes and routers through `outbox`."""

    def __init__(
        self, engine: Engine, receiver: KvReceiver, outbox: Outbox, *, max_waiting: int, keep_s: float
    ) -> None:
        self._engine = engine
        self._blocks = engine.blocks
        self._receiver = receiver
        self._outbox = outbox
        self._max_waiting = max_waiting
        self._keep_s = keep_s
        self._queue: deque[Waiting] = deque()
        self._leases: dict[int, Lease] = {}
        # Of leases that ended: whose they were, what a repeated Commit is answered, and until when that is remembered.
        self._outcomes: OrderedDict[int, tuple[str, BatonError | None, float]] = OrderedDict()
        self._last_serial = 0

    def works(self) -> list[WorkId]:
        """All work that waits or has a lease."""
        return [x.reserve.work for x in self._holders()]

    def holdings(self) -> list[Holding]:
        """The blocks that each lease holds, and those of them that its parts go into."""
        return [
            Holding(
                kind="lease",
                state=lease.state.value,
                work=lease.reserve.work,
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

    def next_deadline(self) -> float | None:
        return min((x.deadline for x in self._holders()), default=None)

    def _holders(self) -> list[Waiting | Lease]:
        return [*self._queue, *self._leases.values()]

    # ---- reserve, grant ----

    def reserve(self, peer: str, part_blocks: int, reserve: Reserve, now: float) -> None:
        """Into the queue. Raises what the prefill node shall be refused with."""
        config, total = self._engine.config, self._blocks.num_total
        if len(self._queue) >= self._max_waiting:
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
        self._queue.append(Waiting(reserve, peer, part_blocks, now + reserve.deadline_s))

    def grant_waiting(self, now: float) -> None:
        """First come, first served; preempted requests, which are older, before all of them. Then new slots."""
        while self._queue and not self._engine.has_preempted and self._grant(self._queue[0], now):
            self._queue.popleft()
        for lease in self._leases.values():
            if self._post_receives(lease):
                self._outbox.to_prefill(lease.peer, Credit(lease.serial, lease.credits))

    def _num_blocks(self, reserve: Reserve) -> int:
        """All full blocks, and one for each sample to write into."""
        return reserve.num_tokens // self._blocks.block_size + reserve.num_samples

    def _room(self, waiting: Waiting) -> list[int] | None:
        """The prefix blocks that are here already, if the rest fits too."""
        engine, reserve = self._engine, waiting.reserve
        seqs = engine.num_running + engine.num_waiting + engine.num_reserved_seqs + reserve.num_samples
        if seqs > engine.config.max_num_seqs:
            return None
        held = self._blocks.match(reserve.block_hashes[: reserve.num_tokens // self._blocks.block_size])
        fresh = self._num_blocks(reserve) - len(held)
        # Those that run need their next blocks soon: a grant that took the last ones would only cause a preemption.
        spare = engine.num_running if engine.num_running or self._leases else 0
        return held if self._blocks.can_allocate(fresh + spare, keep=held) else None

    def _grant(self, waiting: Waiting, now: float) -> bool:
        held = self._room(waiting)
        if held is None:
            return False
        reserve = waiting.reserve
        self._blocks.acquire(held)
        taken = held + self._blocks.allocate(self._num_blocks(reserve) - len(held))
        cut = len(taken) - (reserve.num_samples - 1)
        end = num_blocks_for(reserve.num_tokens, self._blocks.block_size)
        tail = reserve.grouped_from_block, reserve.layer_groups
        self._last_serial += 1
        lease = Lease(
            serial=self._last_serial,
            reserve=reserve,
            peer=waiting.peer,
            deadline=waiting.deadline,
            granted=now,
            table=taken[:cut],
            spares=taken[cut:],
            num_held=len(held),
            parts=plan_parts(self._receiver.layout, waiting.part_blocks, len(held), end, *tail),
            mark=self._receiver.mark(),
            block_size=self._blocks.block_size,
        )
        self._leases[lease.serial] = lease
        self._blocks.pin_write(lease.written)
        self._engine.num_reserved_seqs += reserve.num_samples
        self._post_receives(lease)
        told = lease.num_held, lease.num_parts, lease.credits, self._receiver.verify
        self._outbox.to_prefill(lease.peer, Grant(reserve.work, lease.serial, *told))
        return True

    def _post_receives(self, lease: Lease) -> bool:
        """Post receives into free slots, in part order. True: the lease has more credits than before."""
        before = lease.credits
        receiver = self._receiver
        while lease.credits < lease.num_parts and lease.num_open < max(MIN_OPEN_PARTS, receiver.num_free_slots):
            piece = lease.parts[lease.credits]
            where = lease.blocks_of(piece), piece.offset, piece.num_bytes, lease.mark
            is_last = lease.credits + 1 == lease.num_parts
            if not receiver.expect(lease.peer, lease.serial, lease.credits, *where, is_last):
                break
            lease.credits += 1
        return lease.credits > before

    # ---- parts, commit ----

    def part_landed(self, part: PartLanded, now: float) -> None:
        """Of a lease that has ended meanwhile it landed before that, and means nothing."""
        if lease := self._leases.get(part.lease):
            lease.arrived.add(part.part)
            lease.transfer_bytes += part.num_bytes
            lease.last_arrived, lease.landed = now - part.landing_s, now

    def part_refused(self, serial: int, error: TransferError, now: float) -> None:
        if lease := self._leases.get(serial):
            self._end(lease, error, now)

    def part_failed(self, serial: int, part: int, reason: str, now: float) -> None:
        if lease := self._leases.get(serial):
            self._end(lease, PeerLost(f"part {part} did not arrive: {reason}"), now)

    def commit(self, peer: str, commit: Commit, now: float) -> None:
        """Make the lease's request this node's, and answer; a repeat gets the same answer."""
        self._outbox.to_prefill(peer, CommitReply(commit.lease, commit.work, self._commit(peer, commit, now)))

    def _commit(self, peer: str, commit: Commit, now: float) -> BatonError | None:
        lease = self._leases.get(commit.lease)
        if lease is None or lease.peer != peer:
            owner, outcome, _ = self._outcomes.get(commit.lease, ("", LEASE_OVER, 0.0))
            return outcome if owner == peer else LEASE_OVER
        if lease.state is LeaseState.COMMITTED:
            return None
        if not lease.fits(commit):
            error = InternalError(f"the commit of {commit.work} does not fit lease {lease.serial}")
            self._end(lease, error, now)
            return error
        lease.state, lease.commit, lease.committed = LeaseState.COMMITTED, commit, now
        lease.deadline = now + commit.deadline_s
        return None

    def take_adoptable(self, now: float) -> list[Lease]:
        """Leases whose KV is all here and whose request is this node's. The caller owns their blocks now."""
        ready = [x for x in self._leases.values() if x.state is LeaseState.COMMITTED and x.complete]
        for lease in ready:
            self._forget(lease, None, now)
        return ready

    # ---- ends ----

    def release(self, peer: str, release: Release, now: float) -> None:
        """The prefill node has no use for it; it tells the router itself, and hears that no credit will follow."""
        for waiting in [w for w in self._queue if (w.peer, w.reserve.work) == (peer, release.work)]:
            self._queue.remove(waiting)
        for lease in [x for x in self._leases.values() if (x.peer, x.reserve.work) == (peer, release.work)]:
            self._give_back(lease, LEASE_OVER, now)
            self._outbox.to_prefill(peer, Refuse(release.work, LEASE_OVER))

    def end_work(self, work: WorkId, error: BatonError, now: float) -> None:
        """End what waits or is leased for the work; the prefill node is told, and drains its granted parts."""
        for waiting in [w for w in self._queue if w.reserve.work == work]:
            self._queue.remove(waiting)
            self._outbox.to_prefill(waiting.peer, Refuse(work, error))
        for lease in [x for x in self._leases.values() if x.reserve.work == work]:
            self._end(lease, error, now)

    def end_peer(self, peer: str, reason: str, now: float) -> None:
        """The prefill node is gone: nobody will complete its leases."""
        for work in [x.reserve.work for x in self._holders() if x.peer == peer]:
            self.end_work(work, PeerLost(f"prefill node {peer}: {reason}"), now)

    def end_overdue(self, now: float) -> None:
        for waiting in [w for w in self._queue if w.deadline <= now]:
            error = DeadlineExceeded(f"no room on the decode node within {waiting.reserve.deadline_s:g} s")
            self.end_work(waiting.reserve.work, error, now)
        for lease in [x for x in self._leases.values() if x.deadline <= now]:
            missing = lease.num_parts - len(lease.arrived)
            self._end(lease, TransferTimeout(f"{missing} of {lease.num_parts} parts missing at the deadline"), now)
        while self._outcomes and next(iter(self._outcomes.values()))[-1] <= now:
            self._outcomes.popitem(last=False)

    def _end(self, lease: Lease, error: BatonError, now: float) -> None:
        self._give_back(lease, error, now)
        self._outbox.to_prefill(lease.peer, Refuse(lease.reserve.work, error))
        self._outbox.to_router(lease.reserve.work, End(error))

    def _give_back(self, lease: Lease, outcome: BatonError, now: float) -> None:
        self._receiver.withdraw(lease.serial)
        self._forget(lease, outcome, now)
        self._blocks.release([*lease.table, *lease.spares])

    def _forget(self, lease: Lease, outcome: BatonError | None, now: float) -> None:
        """Nothing is landed for it any more."""
        self._blocks.unpin_write(lease.written)
        del self._leases[lease.serial]
        self._outcomes[lease.serial] = (lease.peer, outcome, now + self._keep_s)
        self._engine.num_reserved_seqs -= lease.reserve.num_samples
