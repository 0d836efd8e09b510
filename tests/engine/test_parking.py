"""A sequence that generates is taken out of the batch with its blocks, and goes on later as if nothing had been."""

from __future__ import annotations

import pytest

from engine.engine import Engine
from engine.holdings import Holding
from engine.sequence import Sequence, SequenceState
from tests.engine.counting import Counting, make, run, sequence
from tests.engine.test_forced_tokens import ALLOWED, Places

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
    engine, model = make(async_scheduling=True, max_num_seqs=1)
    parked, waits = sequence(5, max_tokens=9), sequence(5, first=40, max_tokens=2)
    stopped(engine, parked)
    engine.sequences.park(parked)
    assert parked in model.forgotten
    assert not engine.sequences.is_settled(parked), "it does not run"
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


def test_places_of_parked_sequences_are_counted_once() -> None:
    engine, model = make()
    resumed, ended, goes_on, handed_off = (sequence(5, first=10 * i, max_tokens=9) for i in range(4))
    handed_off.hand_off = True
    engine.add(handed_off)
    for seq in (resumed, ended, goes_on):
        stopped(engine, seq)
    for seq in (resumed, ended):
        engine.sequences.park(seq)
    assert handed_off.state is SequenceState.PARKED
    assert engine.scheduler.num_reserved_seqs == 2
    engine.sequences.resume(resumed)
    assert engine.scheduler.num_reserved_seqs == 1
    for seq in (ended, goes_on, handed_off):
        engine.sequences.release(seq)
        assert engine.scheduler.num_reserved_seqs == 0
    assert {ended, goes_on, handed_off} <= {*model.forgotten}
    assert [holding.attempt_id for holding in engine.sequences.holdings()] == [resumed.attempt_id]
    engine.check_integrity()


def test_only_who_stops_is_settled_and_has_no_guess_left() -> None:
    engine, _ = make()
    seq = sequence(5, max_tokens=9, runs_ahead=False)
    engine.add(seq)
    engine.compute(engine.schedule(0.0))
    engine.propose(seq, (11,))
    assert not engine.sequences.is_settled(seq)
    engine.sequences.stop(seq)
    assert not seq.draft_tokens
    assert engine.sequences.is_settled(seq)


def test_what_holds_blocks_is_listed_with_what_it_holds_and_since_when() -> None:
    engine, _ = make()
    seq = sequence(5, max_tokens=9, arrived_s=1.0)
    engine.add(seq)
    engine.compute(engine.schedule(3.0))
    held = Holding("sequence", "running", seq.attempt_id, (0,), 3.0, seq.block_table)
    assert engine.sequences.holdings() == [held]


def computed(model: Counting, seq: Sequence) -> set[int]:
    """The positions whose KV steps have computed since the sequence's first chunk that began anew."""
    chunks = [chunk for batch in model.batches for chunk in batch if chunk.sequence is seq]
    anew = max(number for number, chunk in enumerate(chunks) if not chunk.start)
    return {position for chunk in chunks[anew:] for position in range(chunk.start, chunk.end)}


@STEPS_AHEAD
def test_tokens_that_came_at_once_have_kv_before_a_stopped_sequence_is_settled(ahead: bool) -> None:
    engine, model = make(async_scheduling=ahead)
    seq = sequence(5, max_tokens=9, matcher=Places(ALLOWED))
    engine.add(seq)
    while seq.num_output_tokens < 5:
        engine.compute(engine.schedule(0.0))
    assert seq.num_computed_tokens < seq.num_tokens - 1, "three of them came at once"
    engine.sequences.stop(seq)
    assert not engine.sequences.is_settled(seq)
    tokens = tokens_after(engine)
    assert tokens == []
    assert engine.sequences.is_settled(seq)
    assert computed(model, seq) == set(range(seq.num_tokens - 1))
    engine.sequences.park(seq)
    engine.sequences.resume(seq)
    assert [*seq.output_tokens, *tokens_after(engine)] == [10, 11, 40, 41, 42, 15, 43, 17, 18]


@STEPS_AHEAD
@pytest.mark.parametrize("windows", [(None,), (None, 6)])
def test_one_that_is_computed_again_is_settled_when_all_of_it_is(ahead: bool, windows: tuple[int | None, ...]) -> None:
    engine, model = make(async_scheduling=ahead, max_num_batched_tokens=5, windows=windows, num_blocks=40)
    seq = sequence(5, max_tokens=30)
    engine.add(seq)
    while seq.num_output_tokens < 16:
        engine.compute(engine.schedule(0.0))
    lease = engine.allocate(engine.blocks.num_free + engine.blocks.num_cached)
    while not seq.num_preemptions:
        engine.compute(engine.schedule(0.0))
    engine.blocks.release(lease)
    engine.blocks.release(engine.allocate(engine.blocks.num_total))  # so that no prefix is left
    while seq.num_computed_tokens < 5:
        engine.compute(engine.schedule(0.0))
    num_output = seq.num_output_tokens
    engine.sequences.stop(seq)
    assert not engine.sequences.is_settled(seq)
    assert tokens_after(engine) == []
    assert engine.sequences.is_settled(seq)
    assert computed(model, seq) == set(range(seq.num_tokens - 1))
    engine.sequences.park(seq)
    engine.check_integrity()
    engine.sequences.resume(seq)
    assert tokens_after(engine) == list(range(10 + num_output, 40))


def test_a_sequence_may_stop_while_a_step_verifies_its_draft() -> None:
    engine, _ = make(async_scheduling=True, num_speculative_tokens=2)
    engine.add(seq := sequence(5, max_tokens=9, runs_ahead=False))
    while not seq.takes_drafts:
        engine.compute(engine.schedule(0.0))
    engine.propose(seq, (90, 91))
    engine.compute(engine.schedule(0.0), wait=False)
    engine.sequences.stop(seq)
    engine.check_integrity()
    assert len(tokens_after(engine)) == 1
    assert engine.sequences.is_settled(seq)
    assert not seq.draft_tokens
