"""A sequence that generates is taken out of the batch with its blocks, and goes on later as if nothing had been."""

from __future__ import annotations

import pytest

from engine.engine import Engine
from engine.sequence import Sequence, SequenceState
from tests.engine.counting import make, run, sequence

STEPS_AHEAD = pytest.mark.parametrize("ahead", [False, True])


def tokens_after(engine: Engine) -> list[int]:
    return [token.token for result in run(engine) for token in result.sampled]


def stopped(engine: Engine, seq: Sequence, num_steps: int = 3) -> list[int]:
    """It has run for so many steps, stops, and is settled; its tokens until then."""
    sampled = []
    engine.add(seq)
    for _ in range(num_steps):
        sampled += engine.compute(engine.schedule(0.0)).sampled
    engine.sequences.stop(seq)
    while not engine.sequences.is_settled(seq):
        plan = engine.schedule(0.0)
        assert all(chunk.sequence is not seq for chunk in plan.chunks)
        sampled += engine.compute(plan).sampled
    return [token.token for token in sampled if token.sequence is seq]


@STEPS_AHEAD
def test_a_sequence_that_stops_has_kv_of_all_but_its_last_token(ahead: bool) -> None:
    engine, _ = make(async_scheduling=ahead)
    seq = sequence(5, max_tokens=9)
    tokens = stopped(engine, seq)
    assert list(seq.output_tokens) == tokens
    assert seq.num_computed_tokens == seq.num_tokens - 1
    assert len(seq.block_table) * engine.config.block_size >= seq.num_computed_tokens


@STEPS_AHEAD
@pytest.mark.parametrize("parks", [False, True])
def test_a_resumed_sequence_goes_on_with_the_next_token(ahead: bool, parks: bool) -> None:
    undisturbed, _ = make(async_scheduling=ahead)
    undisturbed.add(sequence(5, max_tokens=9))
    engine, _ = make(async_scheduling=ahead)
    seq = sequence(5, max_tokens=9)
    tokens = stopped(engine, seq)
    if parks:
        engine.sequences.park(seq)
        assert tokens_after(engine) == []
        engine.check_integrity()
    engine.sequences.resume(seq)
    assert tokens + tokens_after(engine) == tokens_after(undisturbed)
    assert engine.blocks.num_free + engine.blocks.num_cached == engine.blocks.num_total


def test_a_parked_sequence_keeps_its_place_and_its_blocks() -> None:
    engine, _ = make(async_scheduling=True, max_num_seqs=1)
    parked, waits = sequence(5, max_tokens=9), sequence(5, first=40, max_tokens=2)
    stopped(engine, parked)
    engine.sequences.park(parked)
    table = list(parked.block_table)
    engine.add(waits)
    run(engine)
    assert waits.state is SequenceState.WAITING
    assert parked.block_table == table
    assert all(engine.blocks.num_owners(block) for block in table)
    engine.sequences.release(parked)
    assert len(tokens_after(engine)) == 2
    assert engine.scheduler.num_reserved_seqs == 0
    assert engine.blocks.num_free + engine.blocks.num_cached == engine.blocks.num_total
