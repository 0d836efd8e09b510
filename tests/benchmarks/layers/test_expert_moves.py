"""The benchmark of experts that change places runs. Not how fast."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from benchmarks.layers import expert_moves
from benchmarks.layers.expert_moves import MovesSettings, exchanges, report

SIZES = {"hidden_size": 8, "intermediate_size": 16, "num_experts": 4, "moved": "1,2", "rounds": 3}


def check(printed: str) -> None:
    line = json.loads(printed.splitlines()[-1])
    assert [row["moved"] for row in line["rows"]] == [1, 2]
    assert all(row["ms"] > 0 for row in line["rows"])


def test_ranks_exchange_their_experts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As threads of this process, which start at once."""
    settings = MovesSettings.model_validate(SIZES)
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(exchanges, settings, 1, tmp_path / "meeting")
        report(exchanges(settings, 0, tmp_path / "meeting"))
        assert other.result(60) is not None
    check(capsys.readouterr().out)


@pytest.mark.full
def test_the_command_has_a_rank_in_a_process_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    expert_moves.main([f"--{name.replace('_', '-')}={size}" for name, size in SIZES.items()])
    check(capsys.readouterr().out)
