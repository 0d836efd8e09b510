"""What happens to sequences between two nodes, here within one pool: handoffs of prompts, moves of running requests."""

from __future__ import annotations

import dataclasses

from hypothesis import event
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from baton.layout import num_blocks_for
from decode_node.migration import is_movable
from engine.block_manager import NULL_BLOCK
from engine.scheduler import Plan
from engine.sequence import Sequence, SequenceState
from engine.step import StepResult
from tests.engine.engine_watch import EngineWatch, Lease
from tests.engine.forcing import Compiling, Forcing


class EngineHandoffs(EngineWatch):
    """An engine whose sequences go on in other blocks."""

    def take(self, plan: Plan, result: StepResult) -> None:
        super().take(plan, result)
        self.park_settled()

    # ---- of prompts ----

    @precondition(lambda self: self.parked())
    @rule(data=st.data())
    def reserve(self, data: st.DataObject) -> None:
        """As a decode node grants: blocks and places for all forks, the prefix from its own cache."""
        seq = data.draw(st.sampled_from(self.parked()))
        request = self.requests[seq.attempt_id]
        samples = [s for s in seq.samples if s in request.expected and s not in request.finished]
        num_full = seq.num_tokens // self.block_size
        blocks, shape = self.engine.blocks, self.config.table_shape
        held = self.engine.tables.match_from(seq.block_hashes(num_full, self.block_size), seq.num_tokens)
        hits = [block for of_group in held for block in of_group]
        table = [NULL_BLOCK] * (num_full + 1) * shape.width
        for group, found in enumerate(held):
            for column, block in enumerate(found, shape.first_column(group, seq.num_tokens)):
                table[column * shape.width + group] = block
        ends = [shape.first_column(group, seq.num_tokens) + len(found) for group, found in enumerate(held)]
        lacking = shape.lacking(num_full + 1, seq.num_tokens, ends)
        num_spares = (len(samples) - 1) * shape.width
        places = self.config.max_num_seqs - self.engine.num_running - self.engine.scheduler.num_reserved_seqs
        fits = blocks.can_allocate(len(lacking) + num_spares, keep=hits)
        if not samples or len(samples) > places or not fits:
            return
        blocks.acquire(hits)
        fresh = self.engine.allocate(len(lacking) + num_spares)
        for entry, block in zip(lacking, fresh, strict=False):
            table[entry] = block
        self.engine.scheduler.reserve_seqs(len(samples))
        self.engine.waiting.leave_lane(seq)
        self.leases.append(Lease(seq, table, fresh[len(lacking) :], samples))

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def hand_over(self, data: st.DataObject) -> None:
        lease = self.leases.pop(data.draw(st.integers(0, len(self.leases) - 1)))
        source, request = lease.source, self.requests[lease.source.attempt_id]
        num_moved = num_blocks_for(source.num_tokens, self.block_size) * self.config.table_shape.width
        for block, copy in zip(source.block_table[:num_moved], lease.table, strict=False):
            assert (block == NULL_BLOCK) == (copy == NULL_BLOCK)
            if copy != NULL_BLOCK and self.engine.blocks.hash_of(copy) is None:
                self.model.copy_blocks([(block, copy)])
        self.engine.sequences.release(source)
        target = self.successor(source, lease.samples, lease.table)
        outputs = {s: tuple(request.got[s]) for s in lease.samples}
        self.engine.scheduler.unreserve_seqs(len(lease.samples))
        event(f"adopted {len(outputs)}")
        children = self.engine.adopt(target, outputs, lease.spares)
        assert [child.samples for child in children] == [[s] for s in lease.samples]
        assert all(child.num_computed_tokens == child.num_tokens - 1 for child in children)
        request.sequences += [target, *children]
        self.failing |= {*children} if target in self.failing else set()

    @precondition(lambda self: self.leases)
    @rule()
    def expire(self) -> None:
        lease = self.leases[0]
        self.drop(lease)
        self.end(lease.source.attempt_id)

    def parked(self) -> list[Sequence]:
        leased = [lease.source for lease in self.leases]
        return [seq for seq in self.live(SequenceState.PARKED) if seq not in leased and seq.hand_off]

    def drop(self, lease: Lease) -> None:
        self.leases.remove(lease)
        self.engine.scheduler.unreserve_seqs(len(lease.samples))
        self.engine.blocks.release(lease.table)
        self.engine.blocks.release(lease.spares)

    def successor(self, source: Sequence, samples: list[int], table: list[int]) -> Sequence:
        """What another node would have of the sequence, for these samples: its matcher may still be compiled there."""
        target = Sequence(
            source.attempt_id,
            samples,
            source.prompt_tokens,
            source.sampling,
            cache_salt=source.cache_salt,
            arrived_s=source.arrived_s,
            priority=source.priority,
            block_table=table,
            runs_ahead=source.runs_ahead,
        )
        if isinstance(source.matcher, Forcing):
            compiling = Compiling(self.random.random() < 0.7, self.compiled)
            target.matcher = dataclasses.replace(source.matcher, tokens=[], compiling=compiling)
        if source in self.failing:
            self.failing.add(target)
        return target

    # ---- of running requests ----

    @precondition(lambda self: self.movable())
    @rule(data=st.data())
    def stop(self, data: st.DataObject) -> None:
        seq = data.draw(st.sampled_from(self.movable()))
        self.engine.sequences.stop(seq)
        self.moving.append(seq)

    @precondition(lambda self: self.moving)
    @rule(data=st.data())
    def resume(self, data: st.DataObject) -> None:
        seq = data.draw(st.sampled_from(self.moving))
        self.moving.remove(seq)
        event(f"resumed {seq.state.value}")
        self.engine.sequences.resume(seq)

    def move(self, seq: Sequence) -> None:
        """The parked sequence goes on with copies of its blocks, as on another node, if there is room for them."""
        if (table := self.copied(seq)) is not None:
            self.moving.remove(seq)
            event("moved")
            self.engine.sequences.release(seq)
            target = self.successor(seq, seq.samples, table)
            children = self.engine.adopt(target, {seq.samples[0]: seq.output_tokens}, [])
            self.requests[seq.attempt_id].sequences += [target, *children]
            self.failing |= {*children} if target in self.failing else set()

    # ---- of both ----

    @precondition(lambda self: self.is_wide and len(self.read) < 3 and self.readable())
    @rule(data=st.data())
    def read_blocks(self, data: st.DataObject) -> None:
        """Gather some of those that will not change, to be sent."""
        seq = data.draw(st.sampled_from(self.readable()))
        num_full = seq.num_computed_tokens // self.block_size * self.config.table_shape.width
        blocks = [block for block in seq.block_table[:num_full] if block != NULL_BLOCK]
        self.read.append(blocks[: data.draw(st.integers(0, len(blocks)))])
        self.engine.blocks.pin_read(self.read[-1])

    @precondition(lambda self: self.read)
    @rule()
    def end_read(self) -> None:
        self.engine.blocks.unpin_read(self.read.pop(0))
        self.may_sleep = False

    def readable(self) -> list[Sequence]:
        running = [seq for seq in self.live(SequenceState.RUNNING) if seq.hand_off or is_movable(seq)]
        return running + self.live(SequenceState.PARKED)

    def movable(self) -> list[Sequence]:
        """Those of which several tokens have no KV yet come first: they are rare."""
        found = [seq for seq in self.live(SequenceState.RUNNING) if is_movable(seq) and not seq.stops]
        return [seq for seq in found if seq.num_tokens - seq.num_computed_tokens > 1] or found

    def copied(self, seq: Sequence) -> list[int] | None:
        """A table with all that the parked sequence's next token reads; None: there are too few blocks."""
        blocks, tables, num_computed = self.engine.blocks, self.engine.tables, seq.num_tokens - 1
        num_full = num_computed // self.block_size
        found = tables.match_from(seq.block_hashes(num_full, self.block_size), num_computed)
        hits = [block for of_group in found for block in of_group]
        lacking = tables.shape.lacking(num_full + 1, num_computed, tables.ends_of(found, num_computed))
        if not blocks.can_allocate(len(lacking), keep=hits):
            return None
        blocks.acquire(hits)
        fresh = self.engine.allocate(len(lacking))
        table = tables.table_of(found, num_computed, lacking, fresh)
        pairs = [(block, copy) for block, copy in zip(seq.block_table, table, strict=False) if copy in fresh]
        self.model.copy_blocks(pairs)
        return table

    def park_settled(self) -> None:
        """Now or later; those that are parked already may move."""
        self.moving = [seq for seq in self.moving if seq.state is not SequenceState.FINISHED]
        for seq in list(self.moving):
            if self.random.random() < 0.4:
                continue
            self.may_sleep = False
            if self.engine.sequences.is_settled(seq):
                self.engine.sequences.park(seq)
            elif seq.state is SequenceState.PARKED:
                self.move(seq)
