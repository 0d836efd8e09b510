"""A sequence with a lower priority value comes first, into a step and back after a preemption; but none starves."""

from __future__ import annotations

import itertools
from collections.abc import Sequence as Seq

from hypothesis import given
from hypothesis import strategies as st

from baton.priority import AGING_S
from baton.waiting_queue import WaitingQueue
from engine.engine import Engine
from engine.sequence import Sequence
from tests.engine.counting import make, run, sequence, turns

EDITS = st.lists(st.tuples(st.booleans(), st.integers(0, 9), st.integers(-2, 2)))


@given(EDITS, st.integers(-3, 3))
def test_a_queue_is_in_the_order_in_which_its_items_are_due(edits: Seq[tuple[bool, int, int]], upto: int) -> None:
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
    assert (engine.waiting.has_preempted(high.due_s), engine.waiting.has_preempted(low.due_s)) == (False, True)
    run(engine)
    assert (high.num_preemptions, low.num_output_tokens, high.num_output_tokens) == (0, 30, 30)


def test_a_preempted_sequence_comes_after_newcomers_of_a_lower_value_and_before_those_of_its_own() -> None:
    engine, _ = make(num_blocks=17, max_num_seqs=2)
    old, young = sequence(30, first=0, max_tokens=30), sequence(30, first=40, max_tokens=30)
    for seq in (old, young):
        engine.add(seq)
    while not engine.waiting.has_preempted(young.due_s):
        engine.compute(engine.schedule(0.0))
    equal, urgent = sequence(2, first=90), sequence(2, first=95, priority=-1)
    engine.add(equal)
    engine.add(urgent)
    assert (engine.waiting.num_up_to(urgent.due_s), engine.waiting.num_up_to(equal.due_s)) == (1, 3)
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


ARRIVALS = st.lists(st.tuples(st.integers(-3, 3), st.floats(0, 60), st.floats(0, 60)), max_size=12)


@given(ARRIVALS, st.booleans())
def test_a_later_sequence_overtakes_only_within_what_its_priority_is_worth(
    wanted: Seq[tuple[int, float, float]], in_lanes: bool
) -> None:
    """However many there are: so none waits behind more than come in that time. `age_s` counts as waiting, too."""
    engine, _ = make(max_num_seqs=1)
    seqs = [
        sequence(priority=priority, arrived_s=at_s, age_s=age_s, max_tokens=1, lane=i % 3 if in_lanes else None)
        for i, (priority, at_s, age_s) in enumerate(wanted)
    ]
    for seq in seqs:
        engine.add(seq)
    order = started(engine)
    assert set(order) == set(seqs)
    for first, second in itertools.combinations(order, 2):
        head_start_s = (first.arrived_s - first.age_s) - (second.arrived_s - second.age_s)
        assert head_start_s <= AGING_S * (second.priority - first.priority) + 1e-6
        if first.due_s == second.due_s:
            assert seqs.index(first) < seqs.index(second)


def test_one_that_has_waited_long_enough_comes_before_urgent_newcomers() -> None:
    engine, _ = make(max_num_seqs=1)
    waits = sequence(priority=2, arrived_s=100.0, age_s=30.0)
    early, late = (sequence(priority=0, arrived_s=at_s) for at_s in (89.0, 91.0))
    for seq in (waits, early, late):
        engine.add(seq)
    assert started(engine) == [early, waits, late]


def test_forks_have_waited_as_long_as_their_prompt() -> None:
    engine, _ = make()
    engine.add(sequence(samples=2, age_s=4.0))
    sampled = engine.compute(engine.schedule(0.0)).sampled
    assert [token.sequence.age_s for token in sampled] == [4.0, 4.0]
