"""The report's sections as tables, for the terminal and for docs/performance.md."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.harness.tables import Table

MUST_BE_UNDER = 0.95
"""The goal for a decode step, relative to vLLM's time."""
EXPERTS = ("experts", "experts_floor_ms", "experts_ratio")


def decode_table(section: Mapping[str, Any]) -> Table:
    """A row for each batch, context and sampling. Of a mixture also the experts of each layer that a step reads."""
    has_experts = any("experts" in cell for cell in section["cells"])
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
            *(["experts", "their floor", "x their floor"] if has_experts else []),
        ],
        [_decode_row(cell, has_experts) for cell in section["cells"]],
    )


def _decode_row(cell: Mapping[str, Any], has_experts: bool) -> list[str]:
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
        *([_number(cell.get(name), 2) for name in EXPERTS] if has_experts else []),
    ]


def host_table(section: Mapping[str, Any]) -> Table:
    """The host's time in a step of each greedy cell by its parts, in ms."""
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
    """Single prompts by length, then many at once, with the time per prompt."""
    rows = [
        _prefill_row(1, one["num_tokens"], one["median_ms"], one["in_a_row_ms"], one["mfu"], one["vllm_ms"])
        for one in section["alone"]
    ]
    many = section["saturated"]
    length, vllm = many["num_tokens"], many["vllm_tokens_per_s"]
    per_prompt_ms = length / many["tokens_per_s"] * 1e3
    vllm_ms = length / vllm * 1e3 if vllm else None
    rows.append(_prefill_row(many["num_prompts"], length, per_prompt_ms, per_prompt_ms, many["mfu"], vllm_ms))
    return Table(["prompts", "tokens", "ms/prompt", "in a row", "tokens/s", "MFU", "vLLM ms", "to vLLM"], rows)


def _prefill_row(
    num_prompts: int, length: int, per_prompt_ms: float, in_a_row_ms: float, mfu: float, vllm_ms: float | None
) -> list[str]:
    return [
        str(num_prompts),
        str(length),
        f"{per_prompt_ms:.1f}",
        f"{in_a_row_ms:.1f}",
        f"{length / per_prompt_ms * 1e3:,.0f}",
        f"{mfu:.0%}",
        _number(vllm_ms, 1),
        _relative(per_prompt_ms, vllm_ms),
    ]


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
    """Our time relative to theirs, as a difference; negative is better."""
    return "-" if theirs is None else f"{ours / theirs - 1:+.1%}"


def _verdict(ours: float, theirs: float | None) -> str:
    return "-" if theirs is None else "yes" if ours <= MUST_BE_UNDER * theirs else "no"
