"""The report's sections as tables, for the terminal and for docs/performance.md alike."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.tables import Table

MUST_BE_UNDER = 0.95
"""Of vLLM's time: what a decode step has to be under."""


def decode_table(section: Mapping[str, Any]) -> Table:
    """A row for each batch, context and sampling."""
    return Table(
        [
            "batch",
            "context",
            "sampling",
            "ms/step",
            "median",
            "floor",
            "x floor",
            "vLLM",
            "to vLLM",
            "5% under",
            "host waits",
        ],
        [_decode_row(cell) for cell in section["cells"]],
    )


def _decode_row(cell: Mapping[str, Any]) -> list[str]:
    return [
        str(cell["batch"]),
        str(cell["context"]),
        cell["sampling"],
        f"{cell['mean_ms']:.2f}",
        f"{cell['median_ms']:.2f}",
        f"{cell['floor_ms']:.2f}",
        f"{cell['ratio']:.2f}",
        _number(cell["vllm_ms"], 2),
        _relative(cell["mean_ms"], cell["vllm_ms"]),
        _verdict(cell["mean_ms"], cell["vllm_ms"]),
        f"{cell['host_ms']['wait']:.2f}",
    ]


def host_table(section: Mapping[str, Any]) -> Table:
    """Where the host's time goes in a step of each greedy cell: ms."""
    parts = ("schedule", "launch", "process", "wait")
    cells = [cell for cell in section["cells"] if cell["sampling"] == "greedy"]
    return Table(
        ["batch", "context", *parts, "ms/step"],
        [
            [
                str(cell["batch"]),
                str(cell["context"]),
                *(f"{cell['host_ms'][part]:.2f}" for part in parts),
                f"{cell['mean_ms']:.2f}",
            ]
            for cell in cells
        ],
    )


def prefill_table(section: Mapping[str, Any]) -> Table:
    """One prompt alone by length, then many at once, whose time is per prompt."""
    rows = [
        [
            "1",
            str(told["num_tokens"]),
            f"{told['median_ms']:.1f}",
            f"{told['num_tokens'] / told['median_ms'] * 1e3:,.0f}",
            f"{told['mfu']:.0%}",
            f"{_number(told['vllm_ms'], 1)}",
            _relative(told["median_ms"], told["vllm_ms"]),
        ]
        for told in section["alone"]
    ]
    many = section["saturated"]
    per_prompt, theirs = (
        many["num_tokens"] / rate * 1e3 if rate else None for rate in (many["tokens_per_s"], many["vllm_tokens_per_s"])
    )
    assert per_prompt is not None
    last = [
        str(many["num_prompts"]),
        str(many["num_tokens"]),
        f"{per_prompt:.1f}",
        f"{many['tokens_per_s']:,.0f}",
        f"{many['mfu']:.0%}",
        _number(theirs, 1),
        _relative(per_prompt, theirs),
    ]
    return Table(["prompts", "tokens", "ms/prompt", "tokens/s", "MFU", "vLLM ms", "to vLLM"], [*rows, last])


def throughput_table(section: Mapping[str, Any]) -> Table:
    """One row."""
    vllm = section["vllm_total_tokens_per_s"]
    rate = section["total_tokens_per_s"]
    return Table(
        ["requests", "in", "out", "seconds", "tokens/s", "output tokens/s", "vLLM tokens/s", "to vLLM"],
        [
            [
                str(section["num_requests"]),
                str(section["input_len"]),
                str(section["output_len"]),
                f"{section['duration_s']:.2f}",
                f"{rate:,.0f}",
                f"{section['output_tokens_per_s']:,.0f}",
                f"{vllm:,.0f}" if vllm else "-",
                f"{rate / vllm - 1:+.1%}" if vllm else "-",
            ]
        ],
    )


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _relative(ours: float, theirs: float | None) -> str:
    """How much more time we take; less than nothing is good."""
    return "-" if theirs is None else f"{ours / theirs - 1:+.1%}"


def _verdict(ours: float, theirs: float | None) -> str:
    return "-" if theirs is None else "yes" if ours <= MUST_BE_UNDER * theirs else "no"
