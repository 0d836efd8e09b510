"""How an engine uses its pace: when it launches, and what it tells the pace of its launches."""

from __future__ import annotations

import dataclasses
from typing import Any, cast

import pytest

from engine.engine import Engine
from engine.pace import SHARE, SLACK_S
from engine.step import Begun
from engine.step_size import StepSize
from tests.engine.counting import SIZES, Counting, sequence


class Device:
    """An engine that runs ahead, or not, with one long sequence; its steps take 10 ms."""

    def __init__(self, ahead: bool = True) -> None:
        self.now, self.model = 0.0, cast(Any, Counting())
        self.model.slow = True
        self.engine = Engine(dataclasses.replace(SIZES, async_scheduling=ahead), self.model, clock=lambda: self.now)
        self.sequence = sequence(5, max_tokens=40)
        self.engine.add(self.sequence)

    def launch(self) -> None:
        self.engine.compute(self.engine.schedule(self.now), wait=False)

    def finish(self) -> None:
        next(step for step in self.model.steps if step.running).running = False

    def retire(self) -> None:
        self.now += 0.010
        self.finish()
        self.engine.retire()


def test_what_an_engine_adopts_is_new_in_one_step_only(monkeypatch: pytest.MonkeyPatch) -> None:
    device, told = Device(), []
    launched = device.engine._timing.pace.launched

    def note(*given: Any, newcomers_since: float | None, **named: Any) -> None:
        told.append(newcomers_since)
        launched(*given, newcomers_since=newcomers_since, **named)

    monkeypatch.setattr(device.engine._timing.pace, "launched", note)
    for adopts in (False, True, False):
        if adopts:
            seq = sequence(3, max_tokens=40)
            seq.block_table = device.engine.allocate(3 // SIZES.block_size + 1)
            device.engine.adopt(seq, {0: (7,)}, [])
        device.launch()
        device.retire()
    assert told == [0.0, pytest.approx(0.010), None], "the first of them started its prompt"


def test_what_a_launch_does_while_the_device_computes_delays_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    device, told = Device(), list[tuple[float, bool]]()
    launched = device.engine._timing.pace.launched

    def note(size: StepSize, decided: float, now: float, **named: Any) -> None:
        told.append((now - decided, named["idle"]))
        launched(size, decided, now, **named)

    def launch(chunks: Any, begun: Begun) -> Any:
        step = Counting.launch(device.model, chunks, begun)
        device.now += 0.003  # prepares the sampling; meanwhile the step before ends
        for earlier in device.model.steps[:-1]:
            earlier.running = False
        return step

    device.model.launch = launch
    monkeypatch.setattr(device.engine._timing.pace, "launched", note)
    device.launch()
    device.launch()
    assert told == [(0.0, False), (0.0, False)]
    assert [step.launch_s for step in device.engine._in_flight] == [0.003], "the host takes as long nevertheless"


def test_the_engine_tells_when_to_launch() -> None:
    device = Device()
    device.launch()
    assert device.engine.launch_at is None, "a prompt is in flight"
    device.launch()
    assert device.engine.launch_at is None, "there is no room"
    device.retire()
    assert device.engine.launch_at is None, "no decode step is known"
    device.launch()
    device.retire()
    assert device.engine.device_busy_since == device.now
    due = device.engine.launch_at
    assert due is not None
    assert abs(due - (device.now + SHARE * 0.010 - SLACK_S)) < 1e-9
    device.now = due
    device.launch()
    assert len(device.model.batches) == 4
    assert not device.engine.has_room


def test_the_engine_launches_at_once_behind_a_step_that_is_done_or_when_nothing_is_left() -> None:
    device = Device()
    for go_on in (device.launch, device.launch, device.retire, device.launch, device.retire):
        go_on()
    assert device.engine.launch_at is not None
    device.finish()
    assert device.engine.launch_at is None
    device.launch()
    device.engine.sequences.release(device.sequence)
    assert device.engine.has_room
    assert device.engine.launch_at is None


def test_an_engine_that_launches_early_waits_for_nobody() -> None:
    device = Device()
    for go_on in (device.launch, device.launch, device.retire, device.launch, device.retire):
        go_on()
    assert device.engine.launch_at is not None
    device.engine.launches_early = True
    assert device.engine.launch_at is None


def test_blocks_of_an_ended_sequence_are_released_after_its_step_is_retired() -> None:
    """Not before tokens are passed on, but before the next step is decided."""
    device = Device()
    device.launch()
    device.launch()
    free = device.engine.blocks.num_free
    device.engine.sequences.release(device.sequence)
    device.retire()
    device.retire()
    assert device.engine.blocks.num_free == free
    device.engine.check_integrity()
    device.engine.schedule(device.now)
    assert device.engine.blocks.num_free == device.engine.blocks.num_total
    device.engine.check_integrity()


def test_an_engine_that_does_not_run_ahead_puts_nothing_off() -> None:
    device = Device(ahead=False)
    for _ in range(5):
        assert device.engine.launch_at is None
        device.launch()
        device.retire()
    assert len(device.model.batches) == 5


def test_a_prompt_that_waits_for_a_load_hurries_no_step() -> None:
    device = Device()
    for go_on in (device.launch, device.launch, device.retire, device.launch, device.retire):
        go_on()
    engine, waits = device.engine, sequence(9, first=60)
    loading = engine.allocate(2)
    engine.blocks.begin_load(loading, waits.block_hashes(2, 4))
    engine.add(waits)
    assert engine.launch_at is None, "nobody has looked yet whether it can join the next step"
    device.launch()
    device.retire()
    assert engine.launch_at is not None
    engine.blocks.finish_load(loading)
    device.launch()
    assert waits.num_cached_tokens == 8
