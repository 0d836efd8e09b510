"""What a node that serves takes longer than its engine alone is found in its answers."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest

from benchmarks.harness.http_stream import Streamed
from benchmarks.simulation.fit_served import Served, _alone, _without_queue
from engine.simulated.profile import load_profile
from engine.step_size import StepSize

PROFILE = "h200-8b"
LENGTHS = (128, 512)
NUM_GAPS = 30


def answer(length: int, more_s: float, first_s: float, factors: Sequence[float]) -> Streamed:
    """Of nodes that take `more_s` longer for a step, `first_s` for the first of a sequence, and 5 ms and 20 us a token
    for a prompt; steps vary by these factors."""
    profile = load_profile(PROFILE)
    arrived, first, second = _alone(PROFILE, length)
    ttft = first - arrived + 5e-3 + 20e-6 * length
    arrivals = [ttft, ttft + (second - first) + more_s + first_s]
    for number, factor in zip(range(1, NUM_GAPS), itertools.cycle(factors), strict=False):
        arrivals.append(arrivals[-1] + factor * (more_s + profile.step_s(StepSize(1, length + number + 1))))
    return Streamed(0.0, arrivals)


def test_what_was_added_is_found() -> None:
    served = Served.of(PROFILE, {n: [answer(n, 1e-3, 2e-3, (0.5, 1.0, 1.0, 1.0, 3.0))] * 4 for n in LENGTHS})
    assert served.step_us == pytest.approx(1000, rel=0.01)
    assert served.per_adopted_seq_us == pytest.approx(2000, rel=0.01)
    assert (served.prompt_us, served.per_prompt_token_us) == pytest.approx((5000, 20), rel=0.01)
    step = served.spread.step
    assert [step[0], step[len(step) // 2], step[-1]] == pytest.approx([0.5, 1.0, 3.0], rel=0.01)
    assert served.spread.prompt_step == pytest.approx([1.0] * len(step), rel=0.01)
    decodes, prompts = served.added_to([1, 2, 3], [1, 2, 3, 4, 5])
    assert decodes == pytest.approx([1001, 2, 3], rel=0.01)
    assert prompts == pytest.approx([5001, 2, 3, 24, 5], rel=0.01)
    assert "1000, 2000 for a sequence that was handed over, 5000 and 20.0 a token" in str(served)


def test_nodes_that_are_faster_than_their_engine_alone_get_nothing_added() -> None:
    served = Served.of(PROFILE, {LENGTHS[0]: [answer(LENGTHS[0], -1e-3, -2e-3, (1.0,))]})
    assert (served.step_us, served.per_adopted_seq_us) == (0, 0)
    assert 0 < served.spread.step[0] < 1


def test_prompts_that_waited_for_others_are_left_out() -> None:
    streams = [Streamed(sent, [sent + 1.0, sent + 9.0]) for sent in (0.0, 0.5, 3.0, 4.0)]
    assert _without_queue(streams) == streams[2:]
    with pytest.raises(ValueError, match="no prompt was alone"):
        _without_queue(streams[:2])
