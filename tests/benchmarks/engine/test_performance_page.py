"""docs/performance.md says what its committed runs measured."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from dataclasses import asdict
from itertools import pairwise
from typing import Any

import pytest

from benchmarks.engine import performance_page
from benchmarks.engine.performance_page import PAGE, PART, PARTS, RESULTS, plots, read_results, write_page
from benchmarks.engine.performance_plot import HEIGHT, Line, plot
from benchmarks.engine.trace import TraceSummary
from benchmarks.harness.tables import Table


def run_of(mean_ms: float, vllm_ms: float | None) -> dict[str, Any]:
    cell = {
        "batch": 8,
        "context": 1024,
        "sampling": "greedy",
        "median_ms": 4.4,
        "mean_ms": mean_ms,
        "floor_ms": 4.0,
        "ratio": mean_ms / 4,
        "vllm_ms": vllm_ms,
        "host_ms": {"schedule": 0.1, "launch": 0.2, "process": 0.3, "wait": 3.9},
    }
    return {
        "machine": {"device": "NVIDIA H200"},
        "decode": {"cells": [cell, {**cell, "batch": 1}, {**cell, "context": 8192}, {**cell, "sampling": "top-p"}]},
    }


def test_the_page_is_what_the_runs_say() -> None:
    results = read_results()
    assert PAGE.read_text() == write_page(PAGE.read_text(), results), (
        "run `python -m benchmarks.engine.performance_page`"
    )
    for file, picture in plots(results).items():
        assert (RESULTS / file).read_text() == picture


def test_the_page_has_every_part_once() -> None:
    assert sorted(name for _, name, _ in PART.findall(PAGE.read_text())) == sorted(PARTS)


@pytest.mark.parametrize(("mean_ms", "verdict"), [(4.75, "yes"), (4.76, "no")])
def test_a_table_is_written_between_its_marks(mean_ms: float, verdict: str) -> None:
    page = "before\n<!-- measured: decode -->\nold\n<!-- end -->\nafter\n"
    written = write_page(page, {"llama": run_of(mean_ms, 5.0)})
    assert written.startswith("before\n<!-- measured: decode -->\n**llama**")
    assert written.endswith("\n<!-- end -->\nafter\n")
    (row,) = [line for line in written.splitlines() if line.startswith("| 8 | 1024 | greedy")]
    assert f"| {verdict} |" in row
    assert write_page(written, {"llama": run_of(mean_ms, 5.0)}) == written
    assert performance_page.NOTHING in write_page(written, {})


def test_the_trace_is_told_where_there_is_one() -> None:
    run = run_of(4.5, 5.0)
    page = "<!-- measured: trace -->\n<!-- end -->"
    assert performance_page.NOTHING in write_page(page, {"a": run})
    summary = TraceSummary(12, 400.4, 14000.2, 13600, 399.6, 2, 30.3, 20.25)
    run["decode"]["trace"] = asdict(summary)
    assert "idle for 400 us of them, for 30 us in pauses of more than 3 us" in write_page(page, {"a": run})


def test_a_picture_has_the_lines_there_are() -> None:
    pictures = plots({"a": run_of(4.5, 5.0), "b": run_of(4.5, None), "c": {}})
    assert list(pictures) == ["a.svg", "b.svg"]
    svg = "{http://www.w3.org/2000/svg}"
    for file, num_lines in (("a.svg", 3), ("b.svg", 2)):
        root = ET.fromstring(pictures[file])
        assert len(root.findall(f"{svg}polyline")) == num_lines
        assert len(root.findall(f"{svg}circle")) == 2 * num_lines  # batches 1 and 8, context 1024, greedy
        texts = ["".join(text.itertext()) for text in root.findall(f"{svg}text")]
        assert "baton 4.50" in texts


def test_names_of_lines_do_not_overlap() -> None:
    lines = [Line(name, [1.0, value], "#123456") for name, value in (("a<", 9.9), ("b", 10.0), ("c", 10.1))]
    root = ET.fromstring(plot("t", "x", "y", ["1", "2"], lines))
    texts = root.findall("{http://www.w3.org/2000/svg}text[@font-weight='600']")[1:]
    ys = sorted(float(text.attrib["y"]) for text in texts)
    assert all(high - low >= 16 for low, high in pairwise(ys))
    assert all(0 < y < HEIGHT for y in ys)


def test_a_plain_table_is_aligned() -> None:
    assert Table(["a", "long"], [["123", "4"]]).plain() == "  a  long\n123     4"
