"""The machine's performance ceilings: `python -m benchmarks.harness.ceilings`.

Read bandwidth bounds a decode step, which reads weights and KV once; matmul speed bounds prefill. Both are measured in
the same run as the results compared with them, since clocks and other load on the machine vary from day to day.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from baton.settings import Settings, parse

GIB = 1024**3
GRAIN_BYTES = 64 * 1024
QUICK_NUM_BYTES = 4 * 1024 * 1024
QUICK_MATMUL_SIZE = 256
"""Sizes that a CPU can do in no time, for `measure`."""
READ_SHAPES = ((1024, 8, 4), (2048, 4, 4), (2048, 8, 8), (4096, 4, 8))
"""Configurations of the read kernel: int32 per load, number of loads, warps."""
NUM_TRIES = 5


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Of one machine at one time. Copying counts bytes read and bytes written. Matmuls: the fastest on an idle GPU, and
    sustained, i.e. back to back for long enough that its power limit lowers its clocks."""

    read_bytes_per_s: float
    copy_bytes_per_s: float
    matmul_flops_per_s: float
    sustained_matmul_flops_per_s: float
    matmul_dtype: str

    def __str__(self) -> str:
        read, copy = self.read_bytes_per_s / 1e12, self.copy_bytes_per_s / 1e12
        flops, sustained = self.matmul_flops_per_s / 1e12, self.sustained_matmul_flops_per_s / 1e12
        matmul = f"{self.matmul_dtype} matmul {flops:.1f} TFLOP/s, sustained {sustained:.1f}"
        return f"read {read:.3f} TB/s, copy {copy:.3f} TB/s, {matmul}"


class CeilingsSettings(Settings):
    """Measures memory bandwidth and matmul speed."""

    prog: ClassVar[str] = "benchmarks.harness.ceilings"

    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="what to measure; auto: cuda where there is one")
    num_bytes: int = Field(
        4 * GIB,
        ge=GRAIN_BYTES,
        multiple_of=GRAIN_BYTES,
        description=f"bytes to read, in steps of {GRAIN_BYTES}; far more than any cache holds",
    )
    matmul_size: int = Field(8192, ge=1, description="rows and columns of the matrices")


def measure(
    device: torch.device,
    num_bytes: int = 4 * GIB,
    matmul_size: int = 8192,
    matmul_dtype: torch.dtype | None = None,
) -> Ceilings:
    """Takes seconds on a GPU, mostly for compilation, and twice `num_bytes` of its memory. matmul_dtype: bfloat16, on a
    CPU float32, or float8_e4m3fn."""
    read_s, copy_s = _memory_s(device, num_bytes)
    dtype = matmul_dtype or (torch.bfloat16 if device.type == "cuda" else torch.float32)
    multiply = _matmul(device, matmul_size, dtype)
    matmul_s = best_s(multiply, device)
    sustained_s = _sustained_s(multiply, device, matmul_s)
    return Ceilings(
        read_bytes_per_s=num_bytes / read_s,
        copy_bytes_per_s=2 * num_bytes / copy_s,
        matmul_flops_per_s=2 * matmul_size**3 / matmul_s,
        sustained_matmul_flops_per_s=2 * matmul_size**3 / sustained_s,
        matmul_dtype=str(dtype).removeprefix("torch."),
    )


def _matmul(device: torch.device, size: int, dtype: torch.dtype) -> Callable[[], object]:
    """[size, size] @ [size, size]; of fp8, with a scale per row and per column, to bf16."""
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    if dtype != torch.float8_e4m3fn:
        return lambda: a @ b
    rows, columns = torch.ones(size, 1, device=device), torch.ones(1, size, device=device)
    return lambda: torch._scaled_mm(a, b.t(), rows, columns, out_dtype=torch.bfloat16, use_fast_accum=True)


def best_s(call: Callable[[], object], device: torch.device) -> float:
    """Seconds of the fastest of NUM_TRIES calls, after one warm-up call."""
    call()
    if device.type != "cuda":
        stamps = [time.perf_counter()]
        for _ in range(NUM_TRIES):
            call()
            stamps.append(time.perf_counter())
        return min(end - start for start, end in pairwise(stamps))
    events = [torch.cuda.Event(enable_timing=True) for _ in range(NUM_TRIES + 1)]  # type: ignore[no-untyped-call]
    events[0].record()
    for event in events[1:]:
        call()
        event.record()
    events[-1].synchronize()
    return min(float(start.elapsed_time(end)) for start, end in pairwise(events)) / 1e3


def _sustained_s(call: Callable[[], object], device: torch.device, call_s: float) -> float:
    """Mean seconds per call over half a second of calls, after as long a warm-up. On a CPU: `call_s`."""
    if device.type != "cuda":
        return call_s
    num_calls = max(1, int(0.5 / call_s))
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    for _ in range(num_calls):
        call()
    start.record()
    for _ in range(num_calls):
        call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3 / num_calls


def _memory_s(device: torch.device, num_bytes: int) -> tuple[float, float]:
    """Seconds to read `num_bytes` bytes, and to copy them."""
    source = torch.randint(-(2**31), 2**31 - 1, (num_bytes // 4,), dtype=torch.int32, device=device)
    target = torch.empty_like(source)
    copy_s = best_s(partial(target.copy_, source), device)
    read = _read_s if device.type == "cuda" else _read_on_cpu_s
    return read(source), copy_s


def _read_on_cpu_s(source: Tensor) -> float:
    return best_s(lambda: source.view(torch.float32).sum(), source.device)


def _read_s(source: Tensor) -> float:
    """Seconds of the fastest of READ_SHAPES. Asserts that each one read all of the data."""
    from benchmarks.harness.read_kernel import read_kernel

    fastest = float("inf")
    expected = int(source.sum(dtype=torch.int64))
    for block, unroll, warps in READ_SHAPES:
        sums = torch.empty(source.numel() // (block * unroll), dtype=torch.int64, device=source.device)
        launch = partial(read_kernel[sums.shape], source, sums, BLOCK=block, NUM_BLOCKS=unroll, num_warps=warps)
        fastest = min(fastest, best_s(launch, source.device))
        assert (int(sums.sum()) - expected) % 2**32 == 0
    return fastest


def main() -> None:
    settings = parse(CeilingsSettings)
    on_gpu = settings.device != "cpu" and torch.cuda.is_available()
    ceilings = measure(torch.device("cuda" if on_gpu else "cpu"), settings.num_bytes, settings.matmul_size)
    print(ceilings)
    print(json.dumps({"benchmark": "ceilings", **asdict(ceilings)}), flush=True)


if __name__ == "__main__":
    main()
