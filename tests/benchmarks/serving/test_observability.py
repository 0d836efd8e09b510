"""What `benchmarks.serving.observability` makes of its rounds, and what it does not believe."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from baton.settings import parse
from benchmarks.serving.observability import PARTS, ObservabilitySettings, Turn, _check_seen, flags_with, report
from benchmarks.serving.observers import running_observers

SETTINGS = ObservabilitySettings(num_alone=2, num_together=8)
SEEN = Counter(traces=10, events=12, rounds=2, spans=90)


def test_differences_are_those_of_pairs(capsys: pytest.CaptureFixture[str]) -> None:
    """Each round is faster than the one before, by more than on and off differ."""
    rounds = [
        (Turn([0.1 / n, 0.3 / n], 100.0 * n, 0.1, 1.0), Turn([0.1 / n + 0.001, 0.3 / n + 0.003], 99.0 * n, 0.2, 1.5))
        for n in range(1, 8)
    ]
    report(SETTINGS, rounds)
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert line["first_token_ms"] == {"median": 2.0, "low": 2.0, "high": 2.0}
    assert line["throughput_percent"]["median"] == pytest.approx(-1)
    assert (line["router_cpu_ms"]["median"], line["nodes_cpu_ms"]["median"]) == pytest.approx((10, 50))


@pytest.mark.parametrize("missing", [{"traces": 9}, {"events": 9}, {"rounds": 1}])
def test_what_nobody_saw_was_not_measured(missing: dict[str, int]) -> None:
    _check_seen(PARTS, SEEN, 10)
    with pytest.raises(RuntimeError, match="are expected"):
        _check_seen(PARTS, Counter({**SEEN, **missing}), 10)


def test_nothing_is_seen_of_what_is_off() -> None:
    _check_seen((), Counter(), 10)
    with pytest.raises(RuntimeError, match="10 traces arrived, 0 are expected"):
        _check_seen((), SEEN, 10)


def test_parts_have_names(capsys: pytest.CaptureFixture[str]) -> None:
    assert parse(ObservabilitySettings, ["--watch="]).watch == ()
    assert parse(ObservabilitySettings, ["--watch=log,pages"]).watch == ("log", "pages")
    with pytest.raises(SystemExit):
        parse(ObservabilitySettings, ["--watch=all"])
    assert "must be of traces, log, events, pages, not all" in capsys.readouterr().err


async def test_what_is_off_is_told_so() -> None:
    async with running_observers() as observers:
        assert await observers.watch(None) == Counter()
        assert flags_with(("traces",), observers).split() == [
            f"--otlp-traces-endpoint={observers.collector}",
            "--log-level=warning",
            "--no-console",
            "--max-timeline-bytes=0",
        ]
