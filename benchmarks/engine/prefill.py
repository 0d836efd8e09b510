"""Prefill: time to first token of a single prompt, and tokens/s of many: `python -m benchmarks.engine.prefill`.

The time is measured from `Engine.add` to the turn in which the host gets the first token. No prompt shares a block with
another. Steps of up to 2,048 tokens are captured, as on a prefill node. MFU is relative to the matmul ceiling of the
same run, and counts only what a prompt must compute, with causal attention and one token's logits.
"""

from __future__ import annotations

import statistics
import time
from typing import Any, ClassVar

from pydantic import Field, field_validator

from baton.sampling import SamplingParams
from benchmarks.engine import vllm_weights
from benchmarks.engine.bench import Bench, EngineBenchSettings, drain, note
from benchmarks.engine.report import main
from benchmarks.engine.tables import prefill_table
from prefill_node.settings import PrefillSettings

LENGTHS = "512,2048,8192,32768"
QUICK_LENGTHS = "16,100"
QUICK_SATURATED = (4, 32)
FIRST_TOKEN = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)


class PrefillBenchSettings(EngineBenchSettings):
    """Measures prompts in the engine, in this process."""

    prog: ClassVar[str] = "benchmarks.engine.prefill"

    captured_prompt_tokens: ClassVar[int] = PrefillSettings.captured_prompt_tokens

    lengths: str = Field(LENGTHS, description="tokens of the prompts that are alone, as N,N,...")
    num_repeats: int = Field(5, ge=1, description="prompts of each length, after one that does not count")
    pause: float = Field(0.5, ge=0, description="seconds before each of them, in which the engine has nothing to do")
    num_saturating: int = Field(64, ge=1, description="prompts that come at once")
    saturating_len: int = Field(2048, ge=1, description="tokens of each of them")

    @field_validator("lengths")
    @classmethod
    def _check_lengths(cls, lengths: str) -> str:
        parse_lengths(lengths)
        return lengths


def parse_lengths(text: str) -> list[int]:
    """Raises ValueError."""
    parts = text.split(",")
    if not all(part.isdigit() and int(part) for part in parts):
        raise ValueError(f"must be N,N,... not {text!r}")
    return [int(part) for part in parts]


def measure(bench: Bench) -> dict[str, Any]:
    """The section of the report."""
    settings = bench.settings
    assert isinstance(settings, PrefillBenchSettings)
    lengths = parse_lengths(QUICK_LENGTHS if settings.quick else settings.lengths)
    saturating = QUICK_SATURATED if settings.quick else (settings.num_saturating, settings.saturating_len)
    alone = []
    for length in lengths:
        note(f"prefill, one prompt of {length}")
        alone.append(_alone(bench, length, settings.num_repeats, 0.0 if settings.quick else settings.pause))
    note(f"prefill, {saturating[0]} prompts of {saturating[1]} at once")
    section = {
        "max_num_batched_tokens": bench.engine.config.max_num_batched_tokens,
        "alone": alone,
        "saturated": _saturated(bench, *saturating),
    }
    print(prefill_table(section).plain())
    return section


def measure_even(bench: Bench) -> dict[str, Any] | None:
    """The same with weights as in vLLM's dummy format, which its figures were measured with: at its power limit, a
    GPU's speed depends on the numbers. Run this last: the model is useless afterwards.

    None for a model with its own or with quantized weights.
    """
    if not vllm_weights.fill(bench):
        return None
    note(f"prefill, weights between -{vllm_weights.RANGE} and {vllm_weights.RANGE}")
    return measure(bench)


def _alone(bench: Bench, length: int, repeats: int, pause_s: float) -> dict[str, Any]:
    """Prompts on an idle engine; then as many back to back, when a GPU's clocks are lower."""
    prompts_s(bench, 1, length)
    seconds, in_a_row = [], []
    for _ in range(repeats):
        time.sleep(pause_s)
        seconds.append(prompts_s(bench, 1, length))
    for _ in range(repeats):
        in_a_row.append(prompts_s(bench, 1, length))
    vllm = bench.shape.vllm
    return {
        "num_tokens": length,
        "median_ms": round(statistics.median(seconds) * 1e3, 3),
        "in_a_row_ms": round(statistics.median(in_a_row) * 1e3, 3),
        "fastest_ms": round(min(seconds) * 1e3, 3),
        "slowest_ms": round(max(seconds) * 1e3, 3),
        "mfu": round(_mfu(bench, length, statistics.median(seconds)), 4),
        "vllm_ms": vllm.prefill_ms.get(length) if vllm else None,
    }


def _saturated(bench: Bench, count: int, length: int) -> dict[str, Any]:
    prompts_s(bench, min(count, 4), length)
    seconds = prompts_s(bench, count, length)
    vllm = bench.shape.vllm if length == 2048 else None
    return {
        "num_prompts": count,
        "num_tokens": length,
        "tokens_per_s": round(count * length / seconds, 1),
        "mfu": round(_mfu(bench, length, seconds / count), 4),
        "vllm_tokens_per_s": vllm.saturated_tokens_per_s if vllm else None,
    }


def prompts_s(bench: Bench, count: int, length: int) -> float:
    """Seconds from the first of `count` prompts to the last first token."""
    sequences = [bench.sequence(bench.prompt(length), FIRST_TOKEN) for _ in range(count)]
    began = last = time.perf_counter()
    for seq in sequences:
        bench.engine.add(seq)
    answered = set()
    for result in drain(bench.engine):
        if result.sampled:
            last = time.perf_counter()
        answered |= {sampled.sequence.attempt_id for sampled in result.sampled}
    assert len(answered) == count, "a prompt has no first token"
    return last - began


def _mfu(bench: Bench, length: int, seconds: float) -> float:
    return bench.shape.prompt_flops(length) / seconds / bench.ceilings.matmul_flops_per_s


if __name__ == "__main__":
    main(PrefillBenchSettings, {"prefill": measure})
