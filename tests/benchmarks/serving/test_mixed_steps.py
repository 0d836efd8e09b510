"""Which gaps count as a prompt's doing, and that the benchmark runs against real clusters."""

from __future__ import annotations

import json
import math

import pytest

from benchmarks.harness.http_stream import Streamed
from benchmarks.serving import mixed_steps
from benchmarks.serving.mixed_steps import gaps_during


def test_a_gap_counts_where_a_prompt_was_there_for_some_of_it() -> None:
    answer = Streamed(0.0, arrivals=[1.0, 2.0, 5.0, 6.0, 9.0])
    assert gaps_during([answer], [(3.0, 4.0)]) == [3.0]
    assert gaps_during([answer], [(1.5, 2.5), (8.0, 10.0)]) == [1.0, 3.0, 3.0]
    assert gaps_during([answer], [(10.0, 11.0)]) == []


def test_what_was_not_measured_is_no_zero() -> None:
    row = mixed_steps._row([], [0.5])
    assert math.isnan(row["gap p99"])
    assert math.isnan(row["longest"])
    assert (row["TTFT p50"], row["TTFT max"]) == (500.0, 500.0)
    assert math.isnan(mixed_steps._row([0.1], [])["TTFT p50"])


@pytest.mark.full
def test_prompts_are_computed_beside_streams(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--streams=2", "--input-len=20", "--output-len=400", "--lengths=200", "--prompts=2"]
    mixed_steps.main(["--up=--device=cpu", "--targets=0,20", *sizes])
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert list(rows) == [f"target {target} prompt {length}" for target in (0, 20) for length in ("none", "200")]
    assert all(row["longest"] >= row["gap p50"] > 0 for row in rows.values())
    assert rows["target 20 prompt 200"]["TTFT p50"] > 0
