"""What the engine counts of its steps."""

from __future__ import annotations

import pytest

from engine.step_counters import StepCounters
from engine.step_size import StepSize
from tests.engine.counting import make, run, sequence


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_steps_and_their_tokens_are_counted_by_kind(async_scheduling):
    engine, _ = make(async_scheduling=async_scheduling)
    engine.add(sequence(5, max_tokens=3))
    run(engine)
    engine.add(sequence(40, first=60, max_tokens=2))
    totals = engine.counters.totals()
    assert totals.num_steps == {"prompt": 1, "decode": 2, "mixed": 0}
    assert totals.num_tokens == {"prompt": 5, "decode": 2}
    run(engine)
    assert engine.counters.totals().num_tokens["prompt"] == 45
    assert totals.num_tokens["prompt"] == 5, "a copy"


def test_prompts_beside_decodes_are_mixed():
    engine, _ = make()
    engine.add(sequence(5, max_tokens=4))
    engine.compute(engine.schedule(0.0))
    engine.add(sequence(7, first=60, max_tokens=1))
    run(engine)
    totals = engine.counters.totals()
    assert totals.num_steps == {"prompt": 1, "mixed": 1, "decode": 2}
    assert totals.num_tokens == {"prompt": 12, "decode": 3}


@pytest.mark.parametrize("only_launches", [False, True])
@pytest.mark.parametrize("num_stages", [1, 3])
def test_a_launch_that_computes_is_time_of_the_device(only_launches, num_stages):
    """The runner says which it is: on a CPU of several stages the first one's, on a GPU never."""
    engine, model = make(async_scheduling=True, num_stages=num_stages)
    model.only_launches = only_launches
    engine.add(sequence(5, max_tokens=3))
    run(engine)
    assert (engine.counters.totals().seconds["launch"] > 0.0) == only_launches


def test_what_watches_is_called_at_each_step_s_end():
    engine, model = make(async_scheduling=True)
    ends: list[int] = []
    engine.counters.watch(lambda: ends.append(len(model.batches)))
    engine.add(sequence(5, max_tokens=3))
    run(engine)
    assert len(ends) == len(model.batches)
    engine.counters.watch(None)
    engine.add(sequence(5, first=60, max_tokens=3))
    run(engine)
    assert len(ends) < len(model.batches)


@pytest.fixture
def clock(monkeypatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr("engine.step_counters.time.perf_counter", lambda: now[0])
    return now


def test_phases_of_a_step(clock):
    counters = StepCounters()
    for at, do in (
        (100.5, lambda: counters.scheduled(100.0, launches=True)),
        (101.0, lambda: counters.launched(100.75, computes=False)),
        (103.5, lambda: counters.retired(StepSize(1, 8), 1, 2.0, 103.25, goes_on=True)),
        (103.75, lambda: counters.scheduled(103.5, launches=True)),
        (104.0, lambda: counters.launched(103.75, computes=True)),
    ):
        clock[0] = at
        do()
    # the gap: from the end of the first step to the launch of the next
    assert counters.totals().seconds == {"schedule": 0.75, "launch": 0.25, "device": 2.25, "output": 0.25, "gap": 0.5}


@pytest.mark.parametrize("goes_on", [False, True])
def test_without_work_there_is_no_gap(clock, goes_on):
    counters = StepCounters()
    counters.retired(StepSize(1, 8), 1, 1.0, 100.0, goes_on)
    counters.scheduled(100.0, launches=False)  # what ran was aborted, or waits
    clock[0] = 4000.0
    counters.launched(4000.0, computes=False)
    assert counters.totals().seconds["gap"] == 0.0
