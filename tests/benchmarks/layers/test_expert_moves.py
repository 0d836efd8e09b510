"""The benchmark of experts that change places runs. Not how fast."""

from __future__ import annotations

import json

import pytest

from benchmarks.layers import expert_moves


def test_it_runs(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--hidden-size=8", "--intermediate-size=16", "--num-experts=4"]
    expert_moves.main([*sizes, "--moved=1,2", "--rounds=3"])
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [row["moved"] for row in line["rows"]] == [1, 2]
    assert all(row["ms"] > 0 for row in line["rows"])
