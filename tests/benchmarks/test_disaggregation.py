"""What is compared with what, and that the benchmark runs on real clusters."""

from __future__ import annotations

import json

import pytest

from benchmarks import disaggregation
from benchmarks.disaggregation import Workload, cells_behind, goodput_of, medians, workloads_of
from benchmarks.serving.vllm import COLUMNS, VLLM, references


def test_workloads() -> None:
    assert workloads_of("1024/128@21.4x384:200:25,8/2@3x9:1:2.5") == [
        Workload(1024, 128, 21.4, 384, 200.0, 25.0),
        Workload(8, 2, 3.0, 9, 1.0, 2.5),
    ]
    assert workloads_of("") == []


@pytest.mark.parametrize("text", ["1024/128", "1024/128@21.4x384:200", "1/1@xx1:1:1"])
def test_workloads_that_make_no_sense(text: str) -> None:
    with pytest.raises(ValueError, match="workloads"):
        disaggregation.DisaggregationSettings(workloads=text)


def test_each_default_workload_has_figures_to_be_compared_with() -> None:
    loads = workloads_of(disaggregation.DisaggregationSettings().workloads)
    assert {(load.input_len, load.output_len, load.rate) for load in loads} == set(VLLM)
    assert all(len(reference.figures) == len(COLUMNS) for references in VLLM.values() for reference in references)


def test_a_set_is_compared_with_its_like_figure_by_figure() -> None:
    told = references("benchmarks/models/llama-3.1-8b", 1024, 128, 30.0)
    ours = (41.0, 57.9, 100.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0)
    assert cells_behind("singles", ours, told) == [
        "singles: TTFT p50 41.00, two of vLLM 41",
        "singles: TTFT p99 100.00, two of vLLM 78",
    ]
    assert cells_behind("pair", ours, told) == []
    assert references("baton-tiny", 1024, 128, 30.0) == []


def test_goodput_is_the_highest_rate_that_the_median_seed_keeps() -> None:
    loads = workloads_of("8/2@3x9:200:25,8/2@5x9:200:25,8/2@4x9:200:25,8/2@6x9:200:25,16/2@3x9:200:25")
    shares = [(1, 0.9, 0.8), (0.9, 0.8, 0.7), (1, 1, 0), (1, 1, 1), (0.1, 0.2, 1)]
    serving = [[{"attainment": share} for share in of] for of in shares]
    assert goodput_of(loads, serving) == {"8/2 within 200 and 25 ms": 4.0}


def test_medians_are_of_each_figure() -> None:
    assert medians([(1.0, 9.0), (2.0, 7.0), (5.0, 8.0)]) == (2.0, 8.0)


@pytest.mark.full
def test_a_pair_and_two_single_nodes_get_the_same_requests(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--workloads=40/8@20x6:100000:100000", "--alone=30,60", "--node=--device=cpu", "--seeds=0,7"]
    disaggregation.main([*sizes, "--singles=--prefill 0 --decode 2"])
    *_, last = capsys.readouterr().out.splitlines()
    line = json.loads(last)
    for name in ("pair", "singles"):
        ((served, second),) = line["serving"][name]
        assert second["seed"] == 7
        assert (served["num_prompts"], served["attainment"]) == (6, 1)
    assert served["handoff_ms_p99"] == 0, "single nodes hand nothing over"
    for row in line["alone"]["pair"].values():
        assert 0 < row["handoff"] < row["TTFT"]
        assert row["TTFT, ratio"] == pytest.approx(row["TTFT"] / row["single"], abs=0.001)
        assert row["at once, ratio"] == pytest.approx(row["at once"] / row["single"], abs=0.001)
