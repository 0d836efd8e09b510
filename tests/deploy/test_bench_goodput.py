"""The search of `baton bench` for the highest rate at which requests keep their limits."""

from __future__ import annotations

import asyncio
import statistics
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.bench.goodput import Limits, highest_rate
from deploy.bench.load import Outcome
from deploy.bench.main import Bench
from deploy.bench.plan import Planner
from deploy.bench.report import report
from tests.deploy.bench_stub import Stub, results_of, settings_of


def test_a_failed_request_is_not_within_limits():
    good = Outcome(0, 0, 1, (0.1, 0.2, 0.3), output_tokens=3)
    late = Outcome(0, 0, 1, (0.6, 0.7), output_tokens=2)
    slow = Outcome(0, 0, 1, (0.1, 0.9), output_tokens=2)
    assert Limits(0.5, 0.15).share([good, late, slow, Outcome(0, 0, 0, error="timeout")]) == 0.25


@given(st.floats(0.2, 60))
def test_the_search_ends_close_below_the_highest_rate(limit):
    async def attains(rate: float) -> bool:
        return rate <= limit

    found = asyncio.run(highest_rate(attains, 0.125, 64.0, 10))
    assert found <= limit <= found * 1.01


async def test_the_search_knows_both_ends():
    async def never(rate: float) -> bool:
        return False

    async def always(rate: float) -> bool:
        return True

    assert await highest_rate(never, 1, 2, 3) == 0
    assert await highest_rate(always, 1, 2, 3) == 2


async def test_the_offered_rate_of_conversations_is_told():
    """Later turns come after a time to think: a short run offers less than was asked for."""
    flags = ("--workload=multi-turn", "--think-time=0.2", "--num-turns=4", "--num-prompts=40", "--num-warmups=0")
    search = ("--goodput-ttft=5", "--goodput-itl=5", "--goodput-min-rate=200", "--goodput-max-rate=400")
    async with Stub() as stub:
        results = await results_of(stub, *flags, *search, "--seeds=1,2")
    assert results.goodput is not None
    assert results.goodput["per_seed"] == [400, 400]
    for seed, offered in zip((1, 2), results.goodput["offered_per_s"], strict=True):
        (trial,) = (trial for trial in results.goodput["trials"][f"seed {seed}"] if trial["rate"] == 400)
        dues = [outcome.due for outcome in results.outcomes[f"seed {seed}, trial 2 at 400.000/s"]]
        assert offered == trial["offered_per_s"] == pytest.approx(39 / max(dues))
        assert offered < 300
    assert f"{results.goodput['offered_per_s'][1]:.2f} offered" in report(results.runs, results.goodput, {})


async def test_goodput_is_the_median_of_the_seeds():
    async with Stub() as stub:
        flags = ("--goodput-ttft=5", "--goodput-itl=5", "--goodput-max-rate=400", "--goodput-min-rate=200")
        results = await results_of(stub, *flags, "--seeds=1,2", "--num-prompts=2", "--num-warmups=0")
    assert results.goodput is not None
    assert results.goodput["requests_per_s"] == 400
    assert [trial["share"] for trial in results.goodput["trials"]["seed 1"]] == [1, 1]


@pytest.mark.parametrize(
    ("per_seed", "told"),
    [
        ([64.0, 64.0], "64.000 or more requests/s (median of 64.000 or more, 64.000 or more; offered: 31.500, 29.000)"),
        ([0.0], "less than 0.125 requests/s (median of less than 0.125; offered: 31.500)"),
        ([2.0, 8.0], "2.000 requests/s (median of 2.000, 8.000; offered: 31.500, 29.000)"),
    ],
)
def test_goodput_beyond_the_rates_that_were_tried_is_a_bound(per_seed, told):
    rates = {"requests_per_s": statistics.median_low(per_seed), "per_seed": per_seed, "offered_per_s": [31.5, 29.0]}
    rates["offered_per_s"] = rates["offered_per_s"][: len(per_seed)]
    assert report({}, {**rates, "min_rate": 0.125, "max_rate": 64.0}, {}) == f"goodput: {told}"


@pytest.mark.parametrize(("kept", "found"), [((0, 64), 0), ((8, 64), 8), ((64, 8), 8), ((2, 64, 64), 64)])
async def test_goodput_is_a_rate_that_was_tried_or_a_bound(kept, found):
    """Not the mean of a rate and a bound."""
    settings = settings_of(
        "http://a", "--goodput-ttft=5", "--goodput-itl=5", f"--seeds={','.join(map(str, range(1, len(kept) + 1)))}"
    )
    bench = Bench(settings, Planner(settings))

    async def measure(name, seed, rate):
        bench.results.runs[name] = {"offered_per_s": rate}
        return [Outcome(0, 0, 1, (0.1,), error="" if rate <= kept[seed - 1] else "late")]

    with patch.object(bench, "_measure", measure):
        goodput = await bench._search()
    assert goodput["requests_per_s"] in (*goodput["per_seed"], 0)
    assert goodput["requests_per_s"] == pytest.approx(found, rel=0.1)


async def test_rates_that_are_almost_the_same_have_prompts_of_their_own():
    async with Stub() as stub:
        flags = ("--goodput-ttft=5", "--goodput-itl=5", "--goodput-steps=2")
        close = ("--goodput-min-rate=400", "--goodput-max-rate=400.0001")
        settings = settings_of(stub.url, *flags, *close, "--seeds=1", "--num-prompts=1", "--num-warmups=0")
        bench = Bench(settings, Planner(settings))
        with patch.object(Limits, "share", side_effect=[1, 0, 1, 0]):
            results = await bench.run()
    assert len(results.runs) == 4
    assert len({body["prompt"] for body in stub.bodies}) == 4
