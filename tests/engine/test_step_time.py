"""What a step will take is learned from steps of other sizes, and a large step is never taken for a fast one."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.step_padding import StepPadding
from engine.step_size import StepSize
from engine.step_time import GROWTH, StepTime

TIMES = st.floats(1e-4, 10.0)
COUNTS = st.integers(1, 10_000)


def h200(size: StepSize) -> float:
    """About an 8B model's."""
    prompt_s = 2.2e-5 * size.num_prompt_tokens + 1.2e-9 * size.num_prompt_pairs
    return 3e-3 + 3e-5 * size.num_seqs + 3.8e-8 * size.num_context_tokens + prompt_s


def decodes(num: int) -> StepSize:
    return StepSize(num, num * 1000)


def mixed(num: int, start: int, length: int) -> StepSize:
    return replace(decodes(num), num_seqs=num + 1, num_prompt_tokens=length, num_prompt_pairs=length * (start + length))


def experienced(noise: float = 0.0) -> StepTime:
    """After a few hundred steps."""
    model, draw = StepTime(), random.Random(1)
    for number in range(300):
        num = draw.randint(8, 16)
        size = mixed(num, draw.randrange(0, 4000), draw.choice((96, 352, 608))) if number % 4 == 0 else decodes(num)
        model.predict(size)  # as for a plan: what a step then takes is compared with that
        model.learn(size, h200(size) * draw.uniform(1 - noise, 1 + noise))
    return model


@pytest.mark.parametrize("size", [decodes(12), mixed(12, 0, 480), mixed(9, 2000, 1000), mixed(30, 6000, 96)])
def test_steps_of_other_sizes_are_predicted(size: StepSize) -> None:
    predicted = experienced().predict(size)
    assert predicted is not None
    assert abs(predicted / h200(size) - 1) < 0.05


@pytest.mark.parametrize("size", [mixed(12, 0, 480), mixed(9, 2000, 600)])
def test_where_times_vary_the_prediction_is_on_the_safe_side(size: StepSize) -> None:
    predicted = experienced(noise=0.2).predict(size)
    assert predicted is not None
    assert 1.0 < predicted / h200(size) < 1.5


@pytest.mark.parametrize("size", [mixed(12, 0, 480), mixed(9, 2000, 600)])
def test_where_times_vary_the_least_one_is_on_the_safe_side_too(size: StepSize) -> None:
    least = experienced(noise=0.2).predict_least(size)
    assert least is not None
    assert 0.6 < least / h200(size) < 0.95
    assert experienced().predict_least(size) == pytest.approx(h200(size), rel=0.05)


def test_nothing_is_said_of_prompts_before_one_was_seen_nor_of_much_longer_ones() -> None:
    model = StepTime()
    assert model.predict(mixed(4, 0, 1)) is None
    model.learn(decodes(4), 0.004)
    assert model.predict(decodes(4)) is not None
    assert model.predict(mixed(4, 0, 1)) is None
    model.learn(mixed(4, 0, 32), 0.006)
    assert model.most_trusted_tokens == 32 * GROWTH
    assert model.predict(mixed(4, 0, 64)) is not None
    assert model.predict(mixed(4, 0, 65)) is None


def test_one_step_that_hung_changes_little_and_a_slower_device_is_noticed() -> None:
    model, size = experienced(), mixed(12, 0, 480)
    before = model.predict(size)
    model.learn(size, 60.0)
    after = model.predict(size)
    assert before is not None
    assert after is not None
    assert after < 1.7 * before
    for _ in range(40):
        model.learn(size, 2 * h200(size))
        model.learn(decodes(12), 2 * h200(decodes(12)))
        model.predict(size)
    slower = model.predict(size)
    assert slower is not None
    assert 1.8 < slower / h200(size) < 3.2


@pytest.mark.parametrize("size", [decodes(12), mixed(12, 0, 480)])
def test_a_step_whose_beginning_was_noticed_late_changes_little_and_a_faster_device_is_noticed(size: StepSize) -> None:
    model = experienced()
    before = model.predict(size)
    model.learn(size, h200(size) / 100)
    after = model.predict(size)
    assert before is not None
    assert after is not None
    assert 0.8 * before < after
    for _ in range(40):
        for faster in (mixed(12, 0, 480), decodes(12)):
            model.learn(faster, h200(faster) / 10)
            model.predict(size)
    learned = model.predict(size)
    assert learned is not None
    assert learned < 0.2 * before


def test_long_decoding_does_not_wipe_out_what_a_prompt_costs() -> None:
    model, size = experienced(), mixed(12, 0, 480)
    for _ in range(1000):
        model.learn(decodes(12), h200(decodes(12)))
    predicted = model.predict(size)
    assert predicted is not None
    assert abs(predicted / h200(size) - 1) < 0.05


def test_a_prompt_costs_what_its_padded_size_costs() -> None:
    model = StepTime(StepPadding(((0, (128,)), (32, (96, 352)))))
    for start in range(40):
        model.learn(mixed(8, 0, 50 + start), 0.008)
        model.learn(decodes(8), 0.004)
    short, long = model.predict(mixed(8, 0, 1)), model.predict(mixed(8, 0, 96))
    assert short is not None
    assert long is not None
    assert abs(short / long - 1) < 0.1


@given(
    st.lists(st.tuples(COUNTS, COUNTS, st.integers(0, 4096), TIMES), max_size=30),
    st.tuples(COUNTS, COUNTS, st.integers(0, 4096)),
    st.tuples(*[st.integers(0, 4096)] * 3),
)
def test_a_larger_step_is_never_predicted_to_be_faster(
    learned: list[tuple[int, int, int, float]], small: tuple[int, int, int], more: tuple[int, int, int]
) -> None:
    model = StepTime()
    for seqs, context, prompt, took_s in learned:
        model.learn(StepSize(seqs, context, prompt, prompt * prompt), took_s)
    size = StepSize(*small, small[2] ** 2)
    larger = StepSize(small[0] + more[0], small[1] + more[1], small[2] + more[2], (small[2] + more[2]) ** 2)
    first, second = model.predict(size), model.predict(larger)
    if second is not None:
        assert first is not None
        assert 0 <= first <= second
