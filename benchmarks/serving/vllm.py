"""vLLM 0.26's figures for requests over HTTP: the shape of Llama 3.1 8B in bf16, random weights, on two H200s.

Each set got the same requests at the times of a Poisson process. Its prefill and decode pair transfers KV over NVLink;
its two single instances are behind a round-robin router.
"""

from __future__ import annotations

from dataclasses import dataclass

COLUMNS = (
    *("TTFT p50", "TTFT p90", "TTFT p99"),
    *("TPOT mean", "TPOT p99"),
    *("ITL p50", "ITL p90", "ITL p99"),
    "longest gap",
)
Figures = tuple[float, ...]
"""Milliseconds, in the order of COLUMNS; the longest gap between two tokens is the median over requests."""


@dataclass(frozen=True, slots=True)
class Reference:
    """`beside`: our set that it is compared with."""

    beside: str
    name: str
    figures: Figures


VLLM: dict[tuple[int, int, float], list[Reference]] = {
    (1024, 128, 21.4): [
        Reference("pair", "vLLM, blocks of 16", (83, 141, 205, 5.74, 6.26, 5.58, 6.63, 10.8, 12.9)),
        Reference("pair", "vLLM, blocks of 128", (72, 126, 177, 5.48, 5.80, 5.45, 6.22, 6.85, 6.9)),
        Reference("singles", "two of vLLM", (39, 47, 71, 6.66, 7.54, 5.55, 10.9, 19.3, 19.8)),
    ],
    (1024, 128, 30.0): [
        Reference("pair", "vLLM, blocks of 16", (106, 233, 300, 6.28, 6.99, 5.99, 7.16, 15.2, 15.0)),
        Reference("singles", "two of vLLM", (41, 58, 78, 7.78, 9.55, 5.89, 16.9, 24.4, 24.5)),
    ],
    (8192, 256, 3.0): [
        Reference("pair", "vLLM, blocks of 128", (374, 763, 1247, 6.46, 7.48, 6.56, 7.68, 11.2, 11.7)),
        Reference("singles", "two of vLLM", (236, 313, 590, 9.21, 13.0, 6.45, 7.60, 196, 200)),
    ],
}
"""By tokens in, tokens out and requests per second."""
MODEL = "llama-3.1-8b"


def references(model: str, input_len: int, output_len: int, rate: float) -> list[Reference]:
    """The references for such requests; none for models whose name is not of this shape."""
    return VLLM.get((input_len, output_len, rate), []) if MODEL in model.lower() else []
