"""Splits one sequence into several that share its blocks: samples of a prompt, and beams of a parent."""

from __future__ import annotations

from dataclasses import replace

from engine.block_manager import BlockManager
from engine.block_tables import BlockTables
from engine.live_sequences import LiveSequences
from engine.scheduler import Scheduler
from engine.sequence import Sequence, SequenceState
from engine.step import ModelRunner, SampledToken
from engine.tier import KvTier, allocate


class Forks:
    """Gives children of a sequence their block tables. Full blocks are shared; each child has a last block of its own,
    which its next step writes."""

    def __init__(
        self,
        blocks: BlockManager,
        tables: BlockTables,
        scheduler: Scheduler,
        runner: ModelRunner,
        sequences: LiveSequences,
        tier: KvTier | None,
    ) -> None:
        self._shape = tables.shape
        self._blocks = blocks
        self._tables = tables
        self._scheduler = scheduler
        self._runner = runner
        self._sequences = sequences
        self._tier = tier

    def fork(self, seq: Sequence, sampled: list[SampledToken]) -> list[SampledToken]:
        """Make each sample a sequence of its own. Finished and failed ones hold no blocks; the others share the KV of
        the prompt."""
        table, seq.block_table = seq.block_table, []
        self._sequences.release(seq)
        num_computed = seq.num_computed_tokens
        num_full = num_computed // self._shape.block_size  # columns
        owned = [
            replace(token, sequence=seq.child(token.sample, (*seq.output_tokens, token.token), num_full))
            for token in sampled
        ]
        for token in owned:
            if token.finish or token.error is not None:
                token.sequence.move_to(SequenceState.FINISHED)
        children = [token.sequence for token in owned if token.sequence.state is not SequenceState.FINISHED]
        self._place(children, table, num_computed)
        return owned

    def _place(self, children: list[Sequence], table: list[int], num_computed: int) -> None:
        """Run as many of the children as there are blocks and places for; the others wait as if preempted."""
        num_running = min(len(children), max(self._scheduler.num_free_seqs, 1))
        while num_running and not self._blocks.can_allocate(self.num_new_blocks(num_running, num_computed)):
            num_running -= 1
        if num_running:
            self.run(children[:num_running], table, num_computed)
        else:
            self._blocks.release(table)
        for child in children[num_running:]:
            self._scheduler.waiting.add_preempted(child)

    def num_new_blocks(self, num_children: int, num_computed: int) -> int:
        """How many blocks `run` allocates: a column for each child but the first, and one for the first as well if the
        table of `num_computed` tokens has no room for the next token."""
        num_columns = num_children if num_computed % self._shape.block_size == 0 else num_children - 1
        return num_columns * self._shape.width

    def run(self, children: list[Sequence], table: list[int], num_computed: int) -> None:
        """Run the children from the KV of `num_computed` tokens in `table`, which becomes theirs, and in newly
        allocated blocks. There must be blocks and places for all."""
        fresh = allocate(self._blocks, self._tier, self.num_new_blocks(len(children), num_computed))
        room = len(fresh) - (len(children) - 1) * self._shape.width
        self.start(children, table + fresh[:room], num_computed, fresh[room:])

    def start(self, children: list[Sequence], table: list[int], num_computed: int, spares: list[int]) -> None:
        """Like `run`, with blocks that exist already: `table` has room for the next token, and `spares` is a column for
        each child but the first."""
        tables, copies = self._tables.fork(table, num_computed, spares)
        if copies:
            self._runner.copy_blocks(copies)
        for child, own in zip(children, tables, strict=True):
            child.block_table = own
            child.rewind(num_computed)
            self._scheduler.add_running(child)
