"""The benchmark of sums over ranks, whose ranks are threads here."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from benchmarks.layers.rank_sums import Bench, Row, SumsSettings
from engine.model.parallel import sequence_parallel
from engine.model.parallel.group import RankGroup
from engine.model.parallel.sequence_parallel import RowMemory
from tests.engine.rank_threads import in_threads
from tests.engine.shared_rows import DividedRows

torch.set_num_threads(1)

SETTINGS = SumsSettings(
    device="cpu", widths="64", rows="1,3", inputs="32,64", outputs=32, prompts="48,200", pieces="1,2", calls=1
)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sequence_parallel, "TILE_ROWS", 2)


def rows_of(*, sums: bool = True) -> list[Row]:
    found: dict[int, list[Row]] = {}
    shared: dict[int, RowMemory] = {}

    class Ranks(DividedRows):
        def all_reduce(self, x: Tensor) -> Tensor:
            return super().all_reduce(x) if sums else x

        def norms_sum(self, num_rows: int, row_bytes: int) -> bool:
            return True

    def run(group: RankGroup) -> None:
        bench = Bench(SETTINGS, Ranks(group, shared), torch.device("cpu"))
        bench.run()
        found[group.rank] = bench.rows

    with in_threads(2, run) as group:
        run(group)
    return found[0]


def test_each_case_has_its_times() -> None:
    few, more, layer, long = rows_of()
    assert [few["rows"], more["rows"], layer["rows"], long["rows"]] == [1, 3, 48, 200]
    for row in (few, more):
        assert row["ratio"] == row["fused_us"] / row["separate_us"]
    whole = {"rows", "outputs", "products_us", "whole_us"}
    assert set(layer) == whole | {"pieces_1_us", "pieces_2_us"}
    assert set(long) == whole, "a step that is too long to be divided"


def test_wrong_answers_have_no_times() -> None:
    """Sums that add nothing: each row says what has failed, and the others go on."""
    rows = rows_of(sums=False)
    assert all(row["failed"].startswith("WrongAnswers") and len(row) == 3 for row in rows)
    assert len(rows) == 4
