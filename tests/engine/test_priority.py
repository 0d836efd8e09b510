"""A sequence with a lower priority value comes first: into a step, and back after a preemption."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from hypothesis import given
from hypothesis import strategies as st

from engine.engine import Engine
from engine.sequence import Sequence
from engine.waiting_queue import WaitingQueue
from tests.engine.counting import make, run, sequence, turns

EDITS = st.lists(st.tuples(st.booleans(), st.integers(0, 9), st.integers(-2, 2)))


@given(EDITS, st.integers(-3, 3))
def test_a_queue_is_in_order_of_priority_and_then_of_arrival(edits: Seq[tuple[bool, int, int]], upto: int) -> None:
    queue, model = WaitingQueue[int](), list[tuple[int, int]]()
    for adds, item, priority in edits:
        known = [pair for pair in model if pair[1] == item]
        assert (item in queue) == bool(known)
        if adds and not known:
            queue.add(item, priority)
            model.append((priority, item))
        elif not adds:
            assert queue.remove(item) == bool(known)
            model = [pair for pair in model if pair[1] != item]
    ordered = sorted(model, key=lambda pair: pair[0])  # stable: in order of arrival
    assert list(queue) == [item for _, item in ordered]
    assert (len(queue), queue.num_up_to(upto)) == (len(model), sum(priority <= upto for priority, _ in model))
    assert [queue.rank_of(item) for item in queue] == sorted(queue.rank_of(item) for item in queue)


def started(engine: Engine) -> list[Sequence]:
    return [seq for plan, _ in turns(engine) for seq in plan.started]


@given(st.lists(st.tuples(st.integers(-2, 2), st.sampled_from([None, "a", "b"])), max_size=8))
def test_prompts_are_admitted_in_order_of_priority_and_then_of_arrival(wanted: Seq[tuple[int, str | None]]) -> None:
    engine, _ = make(max_num_seqs=1)
    seqs = [sequence(priority=priority, lane=lane, max_tokens=1) for priority, lane in wanted]
    for seq in seqs:
        engine.add(seq)
    assert started(engine) == sorted(seqs, key=lambda seq: seq.priority)


def test_one_that_arrives_late_overtakes_those_that_wait() -> None:
    engine, _ = make(max_num_seqs=1)
    runs, waits, urgent = sequence(), sequence(), sequence(priority=-1)
    engine.add(runs)
    engine.compute(engine.schedule(0.0))
    engine.add(waits)
    engine.add(urgent)
    assert started(engine) == [urgent, waits]


def test_the_last_of_the_highest_value_is_preempted() -> None:
    """Though it is the oldest of all."""
    engine, _ = make(num_blocks=17)
    low = sequence(30, first=0, max_tokens=30, priority=1)
    high = sequence(30, first=40, max_tokens=30)
    for seq in (low, high):
        engine.add(seq)
    while not engine.num_preemptions:
        plan = engine.schedule(0.0)
        engine.compute(plan)
    assert plan.preempted == [low]
    assert (engine.has_preempted(0), engine.has_preempted(1)) == (False, True)
    run(engine)
    assert (high.num_preemptions, low.num_output_tokens, high.num_output_tokens) == (0, 30, 30)


def test_a_preempted_sequence_comes_after_newcomers_of_a_lower_value_and_before_those_of_its_own() -> None:
    engine, _ = make(num_blocks=17, max_num_seqs=2)
    old, young = sequence(30, first=0, max_tokens=30), sequence(30, first=40, max_tokens=30)
    for seq in (old, young):
        engine.add(seq)
    while not engine.has_preempted(0):
        engine.compute(engine.schedule(0.0))
    equal, urgent = sequence(2, first=90), sequence(2, first=95, priority=-1)
    engine.add(equal)
    engine.add(urgent)
    assert (engine.num_waiting_up_to(-1), engine.num_waiting_up_to(0)) == (1, 3)
    order = [token.sequence for _, result in turns(engine) for token in result.sampled]
    assert order.index(urgent) < order.index(young) < order.index(equal)


def test_a_prompt_that_is_half_computed_is_finished_first() -> None:
    engine, model = make(max_num_batched_tokens=4)
    low, high = sequence(12, first=0, priority=1, max_tokens=1), sequence(12, first=20, max_tokens=1)
    engine.add(low)
    engine.compute(engine.schedule(0.0))
    engine.add(high)
    run(engine)
    assert [chunk.sequence for batch in model.batches for chunk in batch] == [low] * 3 + [high] * 3


def test_forks_have_the_priority_of_their_prompt() -> None:
    engine, _ = make()
    engine.add(sequence(samples=2, priority=3))
    sampled = engine.compute(engine.schedule(0.0)).sampled
    assert [token.sequence.priority for token in sampled] == [3, 3]
