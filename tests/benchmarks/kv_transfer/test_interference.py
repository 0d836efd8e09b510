"""Which gaps between tokens count towards which kind of window, and that the benchmark runs against a real cluster."""

from __future__ import annotations

import json

import pytest

from benchmarks.harness.http_stream import Streamed
from benchmarks.kv_transfer import interference
from benchmarks.kv_transfer.interference import Window, gaps_within


def test_a_gap_counts_where_both_its_ends_lie() -> None:
    windows = [Window(0.0, 10.0, False), Window(12.0, 20.0, True), Window(21.0, 30.0, False)]
    answer = Streamed(0.0, arrivals=[1.0, 2.0, 9.0, 11.0, 13.0, 16.0, 20.5, 22.0, 24.0])
    assert gaps_within([answer], windows, pushing=False) == [1.0, 7.0, 2.0]
    assert gaps_within([answer], windows, pushing=True) == [3.0]


@pytest.mark.parametrize(
    "up", ["--engine=simulated --profile=h200-8b", pytest.param("--device=cpu", marks=pytest.mark.full)]
)
def test_prompts_are_pushed_beside_watched_streams(up: str, capsys: pytest.CaptureFixture[str]) -> None:
    lengths = ["--input-len=20", "--output-len=400", "--push-len=200", "--window=0.3"]
    interference.main([f"--up={up}", "--streams=2", "--pushers=1", *lengths])
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["num_pushed"] > 0
    assert result["itl_in_peace_ms"]["p50"] > 0
    assert result["itl_while_pushing_ms"]["p50"] > 0
