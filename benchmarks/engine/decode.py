"""Decode ms/step through the engine's own step loop, sampling included: `python -m benchmarks.engine.decode`.

Sequences are adopted as on a decode node, with their KV computed elsewhere (here: random numbers), so no time is spent
on prompts. The time of a step is that between the ends of two consecutive turns of the loop. The floor is the time to
read the weights and the KV once, at the read bandwidth of the same run.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import torch
from pydantic import Field, field_validator

from baton.sampling import SamplingParams
from baton_kernels.fp8_kv import quantize
from benchmarks.engine import vllm_weights
from benchmarks.engine.bench import Bench, EngineBenchSettings, drain, note, step
from benchmarks.engine.experts import counting
from benchmarks.engine.report import main
from benchmarks.engine.shape import Cell, kv_bytes
from benchmarks.engine.tables import decode_table
from benchmarks.engine.trace import TraceSummary, summarize
from engine.engine import Engine
from engine.sequence import Sequence

CELLS = "1x1024,8x1024,32x1024,64x1024,128x1024,256x1024,32x8192"
SAMPLED_CELLS = "1x1024,32x1024,256x1024"
QUICK_CELLS = "1x20,3x40"
QUICK_STEPS = 24
WARM_STEPS = 20
TRACED_STEPS = 12
COUNTED_STEPS = 12
FILL_BLOCKS = 256  # at a time: some torch operations count elements in 32 bits
GREEDY = "greedy"
SAMPLINGS = {
    GREEDY: SamplingParams(temperature=0.0, ignore_eos=True),
    "top-p": SamplingParams(temperature=0.8, top_p=0.95, ignore_eos=True),
}


class DecodeBenchSettings(EngineBenchSettings):
    """Measures decode steps of the engine, in this process."""

    prog: ClassVar[str] = "benchmarks.engine.decode"

    cells: str = Field(CELLS, description="BATCHxCONTEXT,... to measure with greedy sampling")
    sampled_cells: str = Field(SAMPLED_CELLS, description="those to measure with temperature 0.8, top_p 0.95 too")
    num_steps: int = Field(220, ge=2, description=f"steps to measure in each, after {WARM_STEPS}")
    trace: Path | None = Field(None, description="file for a chrome trace of steps of the largest batch")

    @field_validator("cells", "sampled_cells")
    @classmethod
    def _check_cells(cls, cells: str) -> str:
        parse_cells(cells)
        return cells


def parse_cells(text: str) -> list[Cell]:
    """Raises ValueError."""
    pairs = [part.split("x") for part in text.split(",") if part]
    if not all(len(pair) == 2 and all(number.isdigit() and int(number) for number in pair) for pair in pairs):
        raise ValueError(f"must be BATCHxCONTEXT,BATCHxCONTEXT,... not {text!r}")
    return [(int(batch), int(context)) for batch, context in pairs]


@dataclass(frozen=True, slots=True)
class Measured:
    """`step_s`: the time of each step. `host_ms`: mean times of a step's parts on the host."""

    batch: int
    context: int
    sampling: str
    mean_context: float
    step_s: list[float]
    host_ms: dict[str, float]


def measure(bench: Bench) -> dict[str, Any]:
    """The section of the report."""
    settings = bench.settings
    assert isinstance(settings, DecodeBenchSettings)
    cells = parse_cells(QUICK_CELLS if settings.quick else settings.cells)
    sampled = parse_cells(QUICK_CELLS if settings.quick else settings.sampled_cells)
    num_steps = min(settings.num_steps, QUICK_STEPS) if settings.quick else settings.num_steps
    fill_pool(bench)
    judged = []
    for cell, sampling in [*((cell, GREEDY) for cell in cells), *((cell, "top-p") for cell in sampled)]:
        note(f"decode, batch {cell[0]} at {cell[1]}, {sampling}")
        judged.append(_judged(bench, measure_cell(bench, cell, sampling, num_steps, SAMPLINGS[sampling])))
    if bench.shape.experts is not None and bench.settings.num_ranks == 1:
        _count_experts(bench, judged)
    section: dict[str, Any] = {"num_steps": num_steps, "cells": judged}
    print(decode_table(section).plain())
    if settings.trace:
        section["trace"] = _trace(bench, max(cells), settings.trace)
    return section


def measure_even(bench: Bench) -> dict[str, Any] | None:
    """The same with weights as in vLLM's dummy format, for a mixture: how many experts a step reads depends on them.
    The model is useless afterwards. None for other models, or those with their own or with quantized weights."""
    if bench.shape.experts is None or not vllm_weights.fill(bench):
        return None
    note(f"decode, weights between -{vllm_weights.RANGE} and {vllm_weights.RANGE}")
    return measure(bench)


def _count_experts(bench: Bench, judged: list[dict[str, Any]]) -> None:
    """Add to each greedy cell the experts that its steps read, and the floor that follows."""
    with counting(bench) as chosen:
        for cell in (cell for cell in judged if cell["sampling"] == GREEDY):
            note(f"experts, batch {cell['batch']} at {cell['context']}")
            running = adopt(bench, (cell["batch"], cell["context"]), COUNTED_STEPS, SAMPLINGS[GREEDY])
            for _ in range(WARM_STEPS):
                step(bench.engine)
            experts = chosen.mean(COUNTED_STEPS)
            end(bench.engine, running)
            floor_ms = _floor_ms(bench, cell["batch"], cell["mean_context"], experts)
            cell["experts"] = round(experts, 2)
            cell["experts_floor_ms"] = round(floor_ms, 4)
            cell["experts_ratio"] = round(cell["mean_ms"] / floor_ms, 4)


def fill_pool(bench: Bench) -> None:
    """Fill all blocks with normally distributed random KV."""
    pool = bench.built.runner.pool
    with torch.inference_mode():
        for start in range(0, pool.num_blocks, FILL_BLOCKS):
            part = pool.tensor[start : start + FILL_BLOCKS]
            if not pool.layers[0].scale_dtype:
                part.normal_()
                continue
            shape = (*part.shape[:-1], pool.block_size, pool.layers[0].head_dim_k)
            elements, scales = quantize(torch.randn(shape, dtype=bench.dtype, device=part.device))
            part.copy_(torch.cat((elements.view(torch.uint8).flatten(-2), scales), dim=-1))
    if pool.tensor.is_cuda:
        torch.cuda.synchronize()


def adopt(bench: Bench, cell: Cell, num_steps: int, params: SamplingParams) -> list[Sequence]:
    """Adopt a batch at its context. Contexts differ slightly, so that the sequences do not all need their next block in
    the same step."""
    engine, (batch, context) = bench.engine, cell
    block_size = engine.config.block_size
    params = replace(params, max_tokens=num_steps + 2 * WARM_STEPS)
    running = []
    for i in range(batch):
        prompt = bench.prompt(context + i % block_size)
        seq = bench.sequence(prompt, params)
        seq.block_table = engine.allocate((len(prompt) // block_size + 1) * engine.tables.shape.width)
        running += engine.adopt(seq, {0: (prompt[-1],)}, [])
    return running


def end(engine: Engine, running: list[Sequence]) -> None:
    for seq in running:
        engine.sequences.release(seq)
    for _ in drain(engine):
        pass


def measure_cell(bench: Bench, cell: Cell, sampling: str, num_steps: int, params: SamplingParams) -> Measured:
    """`sampling`: the name of `params`."""
    engine, parts = bench.engine, bench.runner.times
    running = adopt(bench, cell, num_steps, params)
    for _ in range(WARM_STEPS):
        step(engine)
    parts.clear()
    scheduling, num_sampled, mean_context = 0.0, 0, _mean_context(running, num_steps)
    stamps = [time.perf_counter()]
    for _ in range(num_steps):
        plan = engine.schedule(time.monotonic())
        scheduling += time.perf_counter() - stamps[-1]
        num_sampled += len(engine.compute(plan).sampled)
        stamps.append(time.perf_counter())
    assert num_sampled == cell[0] * num_steps, "a sequence was left out of a step"
    total = stamps[-1] - stamps[0]
    host = {"schedule": scheduling, "launch": parts.launch, "wait": parts.wait}
    host["process"] = total - sum(host.values())
    end(engine, running)
    return Measured(
        *cell,
        sampling,
        mean_context,
        [after - before for before, after in pairwise(stamps)],
        {name: seconds / num_steps * 1e3 for name, seconds in host.items()},
    )


def _mean_context(running: list[Sequence], num_steps: int) -> float:
    """Mean number of tokens whose KV a sequence's query reads, including its own, over the next `num_steps` steps."""
    return statistics.fmean(seq.num_tokens for seq in running) + (num_steps - 1) / 2


def _judged(bench: Bench, measured: Measured) -> dict[str, Any]:
    """The entry of the JSON line, with the floor and vLLM's figure. The mean is compared, as it determines
    throughput."""
    floor_ms = _floor_ms(bench, measured.batch, measured.mean_context)
    mean_ms = statistics.fmean(measured.step_s) * 1e3
    vllm = bench.shape.vllm
    return {
        "batch": measured.batch,
        "context": measured.context,
        "sampling": measured.sampling,
        "mean_context": round(measured.mean_context, 1),
        "median_ms": round(statistics.median(measured.step_s) * 1e3, 4),
        "mean_ms": round(mean_ms, 4),
        "floor_ms": round(floor_ms, 4),
        "ratio": round(mean_ms / floor_ms, 4),
        "vllm_ms": vllm.decode_ms.get((measured.batch, measured.context)) if vllm else None,
        "host_ms": {name: round(ms, 4) for name, ms in measured.host_ms.items()},
    }


def _floor_ms(bench: Bench, batch: int, mean_context: float, experts: float | None = None) -> float:
    """experts: of each layer that a step reads; None: as many as are likely."""
    read = bench.shape.step_bytes(batch, kv_bytes(bench.built.layout, mean_context), experts)
    return read / bench.ceilings.read_bytes_per_s * 1e3


def _trace(bench: Bench, cell: Cell, file: Path) -> dict[str, float] | None:
    """Profile a few steps and summarize the GPU's activity. None without a GPU."""
    from torch.profiler import ProfilerActivity, profile

    running = adopt(bench, cell, TRACED_STEPS, SAMPLINGS[GREEDY])
    for _ in range(WARM_STEPS):
        step(bench.engine)
    activities = [ProfilerActivity.CPU]
    if bench.built.device.type == "cuda":
        torch.cuda.synchronize()
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as profiler:
        for _ in range(TRACED_STEPS):
            step(bench.engine)
    profiler.export_chrome_trace(str(file))
    end(bench.engine, running)
    summary: TraceSummary | None = summarize(file, TRACED_STEPS)
    print(summary or "the trace has nothing of a GPU")
    return {name: round(value, 2) for name, value in asdict(summary).items()} if summary else None


if __name__ == "__main__":
    main(DecodeBenchSettings, {"decode": measure, "decode_even": measure_even})
