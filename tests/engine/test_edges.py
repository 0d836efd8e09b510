"""Rules of the engine that a random run shows only now and then, each at its edge."""

from __future__ import annotations

import pytest

from baton.block_hash import chain
from engine.block_manager import BlockManager
from engine.block_tables import BlockTables
from engine.pace import LaunchKind, Pace
from engine.scheduler import Scheduler
from engine.step_size import StepSize
from tests.engine.counting import SIZES, make, run, sequence


def test_parts_go_into_blocks_that_one_lease_has_alone() -> None:
    blocks = BlockManager(4)
    table = blocks.allocate(2).blocks
    blocks.share(table[:1], 1)  # the first
    with pytest.raises(AssertionError, match="one owner"):
        blocks.begin_load(table[:1])
    blocks.begin_load(table[1:])


def test_a_step_ahead_computes_no_token_beyond_the_context() -> None:
    engine, model = make(async_scheduling=True)
    engine.add(sequence(60, first=0, max_tokens=1000))
    run(engine)
    assert max(chunk.end for batch in model.batches for chunk in batch) == SIZES.max_model_len - 1


def test_who_lost_their_blocks_come_back_in_order_of_arrival() -> None:
    blocks = BlockManager(SIZES.num_blocks)
    scheduler = Scheduler(SIZES, blocks, BlockTables(SIZES, blocks))
    old, young, newcomer = (sequence(4, first=10 * number) for number in range(3))
    scheduler.waiting.add(newcomer)
    scheduler.waiting.add_preempted(young)
    scheduler.waiting.add_preempted(old)
    assert [chunk.sequence for chunk in scheduler.schedule().chunks] == [old, young, newcomer]


def test_a_sample_has_the_names_of_its_own_tokens() -> None:
    parent = sequence(4)
    parent.tokens.extend([5, 6, 7, 8])
    parent.block_hashes(2, 4)
    child = parent.child(0, (9, 9, 9, 9), num_shared_blocks=1)
    assert child.block_hashes(2, 4) == chain(child.tokens, 4) != parent.block_hashes(2, 4)


def test_a_step_whose_end_nobody_saw_teaches_nothing() -> None:
    pace, size = Pace(), StepSize(1, 10)
    pace.launched(size, 0.0, 0.0, idle=False)
    pace.launched(size, 1.0, 1.0, idle=True)  # the first ended some time before
    pace.retired(5.0)
    pace.retired(15.0)  # the second took 10 s
    pace.launched(size, 20.0, 20.0, idle=False)
    due = pace.launch_at(LaunchKind())
    assert due is not None
    assert due > 29.0
