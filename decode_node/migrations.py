"""Requests that move from this decode node to another one while they run.

Towards the target this node is what a prefill node is: Reserve, Grant, parts, Commit (`node.handoffs.sender_core`). The
full blocks of the request leave while it goes on; then it stops, the Commit and the rest follow, and the target
computes the very next token. Until the Commit is sent the request is here: whatever goes wrong, it goes on, and the
router hears Stayed. After that it goes on here only if the target says that it did not take it. If no answer comes, the
request ends with an error, and the router's next attempt follows: no token is ever generated twice.
"""

from __future__ import annotations

from baton.deadlines import Deadlines, earliest
from baton.errors import (
    BatonError,
    InvalidRequest,
    NodeUnavailable,
    Overloaded,
    PeerLost,
    TransferError,
    TransferTimeout,
)
from baton.messages import AttemptId, Migrate, Stayed
from decode_node.migration import Migration, MigrationState, is_movable
from decode_node.running import RunningRequests
from engine.engine import Engine
from engine.sequence import Sequence
from node.handoffs.parts_out import PartsOut
from node.handoffs.sender_core import KvSenderCore
from node.outbox import Outbox

REPLY_S = 5.0
"""How long the target has to answer a Commit. It answers within a turn, and a stream that is silent for this long ends
anyway."""


class Migrations(KvSenderCore[Migration]):
    """A request that moves is also one of `running`, which ends it; it is taken out there once the target has it."""

    def __init__(self, engine: Engine, parts: PartsOut, outbox: Outbox, running: RunningRequests) -> None:
        super().__init__(engine, parts, outbox)
        self._running = running
        self._reply_by = Deadlines[AttemptId]()

    def next_deadline(self) -> float | None:
        return earliest(self._reply_by.next(), super().next_deadline())

    def begin(self, migrate: Migrate, now: float) -> None:
        """Ask the target for room. A no-op for a repeat, and for a request that has ended."""
        running = self._running.get(migrate.attempt_id)
        if running is None or migrate.move <= running.move:
            return None
        running.move = migrate.move
        sequences = list(running.sequences.values())
        if migrate.attempt_id in self:
            return self._answer(migrate, InvalidRequest("the request is moving already", "move"))
        if running.beams is not None or len(sequences) != 1:
            return self._answer(migrate, InvalidRequest("only a request with one answer moves", "n"))
        if not is_movable(sequences[0]):
            return self._answer(migrate, Overloaded("the request does not generate yet"))
        if self.is_lost(migrate.target.incarnation):
            return self._answer(migrate, PeerLost(f"decode node {migrate.target.address} is being disconnected"))
        migration = Migration(
            attempt_id=migrate.attempt_id,
            sequence=sequences[0],
            target=migrate.target,
            deadline=running.deadline,
            move=migrate.move,
        )
        reserve = migration.reserve(self._engine.config, now)
        if reserve is None:
            return self._answer(migrate, NodeUnavailable("the request is about to end"))
        self._sendings[migrate.attempt_id] = migration
        return self._reserve(migration, reserve)

    def _answer(self, migrate: Migrate, error: BatonError) -> None:
        self._outbox.to_router(migrate.attempt_id, Stayed(migrate.move, error))

    # ---- what the engine did ----

    def step_retired(self) -> None:
        """A step has retired: each request that moves may have more KV."""
        for attempt_id in self._sendings:
            self._touch(attempt_id)

    def preempted(self, sequence: Sequence) -> None:
        """Its blocks are gone, so it stays and is computed again here."""
        if migration := self._sendings.get(sequence.attempt_id):
            self._stay(migration, Overloaded("the request was preempted"))

    def ended(self, attempt_id: AttemptId) -> None:
        """The request has ended, and its blocks are free. A no-op if it does not move."""
        if migration := self._sendings.get(attempt_id):
            self._forget(migration, release=True)

    # ---- moving on ----

    def _advance(self, sending: Migration, now: float) -> None:
        if sending.state is MigrationState.COPYING:
            self._stop_if_copied(sending)
        if sending.state is MigrationState.STOPPING and self._engine.sequences.is_settled(sending.sequence):
            self._commit(sending, now)
        if sending.state is MigrationState.COMMITTED and sending.accepted and sending.all_gathered:
            self._engine.sequences.release(sending.sequence)
            if sending.all_sent and sending.landed:
                self._forget(sending, release=False)
                self._running.moved(sending.attempt_id, sending.handed_off())

    def _stop_if_copied(self, migration: Migration) -> None:
        if migration.only_rest_is_left(self._engine.tables.shape):
            self._engine.sequences.stop(migration.sequence)
            migration.state, migration.stopped = MigrationState.STOPPING, self._engine.clock()
        elif migration.has_outgrown_target:
            error = Overloaded("the decode node had no room in time")
            self._stay(migration, error if migration.grant is None else TransferTimeout("copying takes too long"))

    def _commit(self, migration: Migration, now: float) -> None:
        assert migration.target is not None
        if migration.sequence.num_tokens - 1 > migration.num_tokens:  # several forced tokens came at once
            return self._stay(migration, TransferError("the request has outgrown its room"))
        self._engine.sequences.park(migration.sequence)
        age_s = self._engine.clock() - migration.stopped
        self._outbox.to_decode(migration.target, migration.commit(now, age_s))
        migration.state = MigrationState.COMMITTED
        self._reply_by.set(migration.attempt_id, now + REPLY_S)
        if not self._parts.send(migration, 0, now):
            self._starved[migration.attempt_id] = None
        return None

    # ---- it stays, or is lost ----

    def _refused(self, sending: Migration, error: BatonError) -> None:
        """If the lease ended before the Commit arrived, the target's answer to the Commit follows and decides."""
        if sending.state is not MigrationState.COMMITTED:
            self._stay(sending, error)
        elif sending.accepted:
            self._lose(sending, error)

    def _commit_refused(self, sending: Migration, error: BatonError) -> None:
        if sending.accepted:
            self._lose(sending, error)
        else:
            self._stay(sending, error)

    def _lost(self, sending: Migration, error: PeerLost) -> None:
        if sending.state is MigrationState.COMMITTED:
            self._lose(sending, error)
        else:
            self._stay(sending, error)

    def end_overdue(self, now: float) -> None:
        super().end_overdue(now)
        for attempt_id in self._reply_by.due(now):
            migration = self._sendings[attempt_id]
            if not migration.accepted:
                self._lose(migration, TransferTimeout(f"no answer to the commit within {REPLY_S:g} s"))

    def _stay(self, migration: Migration, error: BatonError) -> None:
        """The request goes on here, unless it has just ended."""
        self._forget(migration, release=True)
        if migration.attempt_id in self._running:
            self._engine.sequences.resume(migration.sequence)
            self._outbox.to_router(migration.attempt_id, Stayed(migration.move, error))

    def _lose(self, migration: Migration, error: BatonError) -> None:
        """The target may or may not have the request, so it ends here with an error."""
        self._forget(migration, release=True)
        self._running.end_attempt(migration.attempt_id, error)

    def _forget(self, migration: Migration, release: bool) -> None:
        self._reply_by.discard(migration.attempt_id)
        self._let_go(migration, release)
