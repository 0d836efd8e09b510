"""What a router learns of its nodes' speed."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.placement.rates import FADING_S, PRIOR_S_PER_TOKEN, FadingMean, Mean, PrefillTime


@given(st.floats(1e-6, 1e-4), st.lists(st.integers(200, 10_000), min_size=1, max_size=50))
def test_the_time_of_a_token_is_found(s_per_token: float, sizes: list[int]) -> None:
    learned = PrefillTime()
    for size in sizes:
        learned.learn(size, s_per_token * size)
    assert learned.predict(500) == pytest.approx(s_per_token * 500)


@given(
    st.floats(0.001, 0.02),
    st.floats(1e-6, 1e-4),
    st.lists(st.sampled_from([20, 60, 1000, 4000]), min_size=120, max_size=150),
)
def test_a_constant_is_told_from_the_price_of_a_token(constant_s: float, s_per_token: float, sizes: list[int]) -> None:
    learned = PrefillTime()
    for size in [20, 4000, *sizes]:
        learned.learn(size, constant_s + s_per_token * size)
    for size in (20, 1000, 4000):
        assert learned.predict(size) == pytest.approx(constant_s + s_per_token * size, rel=0.5)


def test_many_short_prompts_do_not_make_long_ones_look_slow() -> None:
    learned = PrefillTime()
    for _ in range(8):
        learned.learn(1024, 0.024)
    for _ in range(300):
        learned.learn(30, 0.008)
    assert learned.predict(1024) == pytest.approx(0.024, rel=0.1)
    assert learned.predict(30) == pytest.approx(0.008, rel=0.1)


def test_a_node_is_tried_with_long_prompts_though_only_short_ones_are_known() -> None:
    learned = PrefillTime()
    for _ in range(50):
        learned.learn(20, 0.01)
    assert learned.predict(4000) < 0.05 + 4000 * PRIOR_S_PER_TOKEN
    learned.learn(4000, 0.1)
    assert learned.predict(4000) == pytest.approx(0.1, rel=0.1)


def test_two_prompts_that_end_with_one_step_count_together() -> None:
    learned = PrefillTime()
    for _ in range(20):
        learned.learn(1000, 0.2)
        learned.learn(1000, 0.0)
    assert learned.predict(1000) == pytest.approx(0.1, rel=0.04)


@given(st.lists(st.tuples(st.integers(-1, 10_000), st.floats(-1.0, 100.0)), max_size=40), st.integers(0, 5000))
def test_predictions_are_never_negative_and_rise_with_the_size(seen: list[tuple[int, float]], size: int) -> None:
    learned = PrefillTime()
    for num_tokens, took_s in seen:
        learned.learn(num_tokens, took_s)
    assert 0 <= learned.predict(size) <= learned.predict(size + 1000)


def test_one_slow_prompt_changes_little_and_a_slow_node_is_noticed() -> None:
    prior = PrefillTime()
    learned = PrefillTime(prior)
    assert learned.predict(100) == pytest.approx(100 * PRIOR_S_PER_TOKEN)
    prior.learn(100, 0.4)
    assert learned.predict(100) == pytest.approx(0.4)
    for _ in range(50):
        learned.learn(1000, 0.1)
    learned.learn(1000, 60.0)
    assert learned.predict(1000) < 0.13
    for _ in range(100):
        learned.learn(1000, 0.4)
    assert learned.predict(1000) > 0.35


def test_the_first_prompt_of_all_nodes_tells_how_slow_they_are() -> None:
    learned = PrefillTime()
    learned.learn(1000, 60.0)
    assert learned.predict(1000) == pytest.approx(60.0, rel=0.01)


def test_a_mean_forgets() -> None:
    mean = Mean()
    for value in (1.0, 3.0):
        mean.learn(value)
    assert mean.value == pytest.approx(2.0, rel=0.02)
    for _ in range(200):
        mean.learn(5.0)
    assert mean.value == pytest.approx(5.0, rel=0.01)


def test_what_is_not_observed_any_more_fades_and_the_next_observation_counts() -> None:
    mean = FadingMean()
    assert mean.at(5.0) == 0.0
    mean.learn(2.0, 5.0)
    assert mean.at(5.0) == mean.at(4.0) == 2.0
    assert mean.at(5.0 + FADING_S) == pytest.approx(2.0 / math.e)
    mean.learn(0.01, 5.0 + 5 * FADING_S)
    assert mean.at(5.0 + 5 * FADING_S) < 0.03
    for i in range(200):
        mean.learn(1.0, 100.0 + i / 10)
    assert mean.at(120.0) == pytest.approx(1.0, rel=0.02)
