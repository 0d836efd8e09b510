"""The benchmark of sums over ranks, whose ranks are threads here."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.rank_sums import Bench, Row, SumsSettings
from engine.model.parallel.group import GlooRanks, RankGroup
from tests.engine.rank_threads import in_threads

torch.set_num_threads(1)

SETTINGS = SumsSettings(device="cpu", widths="64", rows="1,3", inputs="32", prompts="256", pieces="1,2", calls=1)


def rows_of(*, sums: bool = True) -> list[Row]:
    found: dict[int, list[Row]] = {}

    class Ranks(GlooRanks):
        def __init__(self, group: RankGroup) -> None:
            self.__dict__.update(group.__dict__)

        def all_reduce(self, x: Tensor) -> Tensor:
            return super().all_reduce(x) if sums else x

    def run(group: RankGroup) -> None:
        bench = Bench(SETTINGS, Ranks(group), torch.device("cpu"))
        bench.run()
        found[group.rank] = bench.rows

    with in_threads(2, run) as group:
        run(group)
    return found[0]


def test_each_case_has_its_times() -> None:
    few, more, product = rows_of()
    assert [few["rows"], more["rows"], product["rows"]] == [1, 3, 256]
    for row in (few, more):
        assert row["ratio"] == row["fused_us"] / row["separate_us"]
    assert {"product_us", "pieces_1_us", "pieces_2_us"} <= set(product)
    assert product["chosen"] == 1


def test_wrong_answers_have_no_times() -> None:
    """Sums that add nothing: each row says what has failed, and the others go on."""
    rows = rows_of(sums=False)
    assert all(row["failed"].startswith("WrongAnswers") and len(row) == 3 for row in rows)
    assert len(rows) == 3
