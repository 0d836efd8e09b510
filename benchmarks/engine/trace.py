"""Computes the GPU's idle time per step from a trace of torch's profiler."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

GPU_KINDS = {"kernel", "gpu_memcpy", "gpu_memset"}
GAP_US = 3.0
"""Within a CUDA graph, kernels follow one another in 1 to 2 us; a longer pause is caused by the host or by waiting for
it."""


@dataclass(frozen=True, slots=True)
class TraceSummary:
    """A gap is a pause of the GPU longer than GAP_US. All but `num_steps` and `largest_gap_us` are per step."""

    num_steps: int
    num_kernels: float
    span_us: float
    busy_us: float
    idle_us: float
    gaps: float
    gaps_us: float
    largest_gap_us: float

    def __str__(self) -> str:
        return (
            f"GPU per step: {self.span_us:.0f} us, {self.num_kernels:.0f} kernels and copies, "
            f"idle {self.idle_us:.0f} us, of which {self.gaps_us:.1f} us in {self.gaps:.1f} pauses of more than "
            f"{GAP_US:g} us (the longest {self.largest_gap_us:.1f} us)"
        )


def summarize(file: Path, num_steps: int) -> TraceSummary | None:
    """None if the trace has no GPU activity."""
    events = json.loads(file.read_text())["traceEvents"]
    spans = sorted(_span(event) for event in events if event.get("cat") in GPU_KINDS)
    if not spans:
        return None
    pauses, busy, reached = [], 0.0, spans[0][0]
    for start, end in spans:
        pauses.append(start - reached)
        busy += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    gaps = [pause for pause in pauses if pause > GAP_US]
    total = reached - spans[0][0]
    return TraceSummary(
        num_steps=num_steps,
        num_kernels=len(spans) / num_steps,
        span_us=total / num_steps,
        busy_us=busy / num_steps,
        idle_us=(total - busy) / num_steps,
        gaps=len(gaps) / num_steps,
        gaps_us=sum(gaps) / num_steps,
        largest_gap_us=max(gaps, default=0.0),
    )


def _span(event: dict[str, Any]) -> tuple[float, float]:
    start = float(event["ts"])
    return start, start + float(event["dur"])
