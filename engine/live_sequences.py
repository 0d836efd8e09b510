"""What an engine's sequences do besides waiting and running: fill blocks, be parked, and end."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import chain

from baton.block_hash import BlockHash
from engine.block_manager import NULL_BLOCK, BlockManager
from engine.block_tables import BlockTables
from engine.config import EngineConfig
from engine.holdings import Holding
from engine.in_flight import InFlight
from engine.scheduler import Scheduler
from engine.sequence import Sequence, SequenceState
from engine.step import ModelRunner


class LiveSequences:
    """`scheduler` has the sequences that wait or run, this those that are parked. A sequence's blocks are in its block
    table. If it ends while a launched step still writes into them, the engine's `in_flight` keeps them until that step
    retires, then `ended` until `release_ended`.
    """

    def __init__(
        self,
        config: EngineConfig,
        blocks: BlockManager,
        tables: BlockTables,
        scheduler: Scheduler,
        runner: ModelRunner,
        in_flight: deque[InFlight],
    ) -> None:
        self._config = config
        self._blocks = blocks
        self._tables = tables
        self._scheduler = scheduler
        self._runner = runner
        self._in_flight = in_flight
        self._parked: dict[Sequence, None] = {}
        self.ended: list[tuple[Sequence, list[int]]] = []
        """Sequences that have ended, and the block tables that they held, for which no step is under way any more."""
        self.on_sealed: Callable[[Sequence, list[BlockHash], int], None] | None = None
        """Is called with a sequence, the hashes of its blocks so far, and the index of the first new one."""

    # ---- blocks ----

    def release(self, seq: Sequence) -> None:
        """End a sequence in any state, and give its blocks back. Idempotent. The blocks are released once no launched
        step uses them."""
        if seq.state is SequenceState.FINISHED:
            return
        if seq.state is SequenceState.PARKED and seq.stops:
            self._scheduler.unreserve_seqs(1)
        self._scheduler.remove(seq)
        self._scheduler.waiting.leave_lane(seq)
        self._runner.forget(seq)
        self._parked.pop(seq, None)
        table = self._tables.take(seq)
        if seq.in_flight:
            self._in_flight[-1].released.append((seq, table))
        else:
            self._blocks.release(table)
        seq.move_to(SequenceState.FINISHED)

    def release_ended(self) -> None:
        """Release the blocks of `ended`."""
        ended, self.ended = self.ended, []
        for _, table in ended:
            self._blocks.release(table)

    def seal(self, seq: Sequence, table: list[int], first: int, end: int) -> None:
        """Seal columns [first, end) of the table, which are full of the sequence's KV."""
        if first == end:
            return
        names = seq.block_hashes(end, self._config.block_size)
        self._tables.seal(table, names, first)
        if self.on_sealed is not None:
            self.on_sealed(seq, names, first)

    # ---- parking ----

    def stop(self, seq: Sequence) -> None:
        """Launch no more steps that sample a token of this running sequence. It `is_settled` when the launched ones
        have retired, and the KV of all tokens before its last one is computed."""
        seq.stops = True
        if not seq.in_flight:  # else a launched step verifies them
            seq.draft_tokens = ()

    def is_settled(self, seq: Sequence) -> bool:
        """Whether a stopped sequence has all of its tokens, and the KV of all but the last, so that it may be
        parked."""
        is_computed = seq.num_computed_tokens == seq.num_tokens - 1
        return seq.stops and seq.state is SequenceState.RUNNING and is_computed and not seq.in_flight

    def park(self, seq: Sequence) -> None:
        """Take a settled sequence out of the batch. It keeps its blocks and its place, until `release` or
        `resume`."""
        assert self.is_settled(seq)
        self._scheduler.reserve_seqs(1)
        self._tables.give_up_claims(seq)
        self.park_prompt(seq)

    def resume(self, seq: Sequence) -> None:
        """Continue a stopped sequence, whether it is parked already or not."""
        seq.stops = False
        if seq.state is SequenceState.PARKED:
            self._scheduler.unreserve_seqs(1)
            del self._parked[seq]
            self._scheduler.add_running(seq)

    def park_prompt(self, seq: Sequence) -> None:
        """Take a prompt to hand off out of the batch. It keeps its blocks until `release`."""
        self._scheduler.remove(seq)
        self._runner.forget(seq)
        seq.move_to(SequenceState.PARKED)
        self._parked[seq] = None

    # ---- checks ----

    def holdings(self) -> list[Holding]:
        """The sequences that hold blocks, including ended ones whose blocks a launched step still uses."""
        held = [(seq, seq.block_table) for seq in chain(self._scheduler.running, self._parked)]
        held += chain(self.ended, *(launched.released for launched in self._in_flight))
        return [
            Holding(
                "sequence", seq.state.value, seq.attempt_id, tuple(seq.samples), seq.started_s or seq.arrived_s, table
            )
            for seq, table in held
        ]

    def check_integrity(self) -> None:
        """Assert that no sequence's next step would write into a block that is not its own."""
        for seq in self._scheduler.running:
            first = seq.num_computed_tokens // self._config.block_size * self._tables.shape.width
            for block in seq.block_table[first:]:
                assert block != NULL_BLOCK, f"{seq.attempt_id} would write the null block"
                assert self._blocks.hash_of(block) is None, f"{seq.attempt_id} would write the sealed block {block}"
                assert self._blocks.num_owners(block) == 1, f"{seq.attempt_id} would write the shared block {block}"
