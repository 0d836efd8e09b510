"""Steps on a CPU, in fp32, bf16, int8 and AWQ, beside transformers and llama.cpp: `python -m benchmarks.engine.cpu`.

Writes a checkpoint with random weights, and for llama.cpp a GGUF file of the same weights. Each side is a process of
its own (`benchmarks.engine.cpu.side`), and they take turns, sample by sample, so that what else the machine does meets
them all. First each side's greedy answers are compared with the logits of transformers in fp32. Times are the fastest
of all samples, which on a shared machine is what a side can do; medians are in the JSON line. `--peers-python` names a
Python with the packages of the other sides: transformers, and torchao, gguf and llama-cpp-python, which no node needs.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field, field_validator

from baton.process.resources import num_cpus
from baton.settings import Settings, parse
from benchmarks.engine.cpu.answers import check
from benchmarks.engine.cpu.side import DECODES, PROMPTS
from benchmarks.harness.random_checkpoint import write_checkpoint
from benchmarks.harness.tables import Table
from tools.quantize import FORMATS, write

SIDES = {
    "fp32": ("baton", "transformers"),
    "bf16": ("baton", "transformers"),
    "int8": ("baton", "transformers-torchao", "transformers-torch-dynamic", "llama.cpp"),
    "awq": ("baton",),
}
"""By dtype. int8: transformers has several ways; torchao's weight-only is the fastest that is maintained,
`torch.ao.quantization.quantize_dynamic` is faster, but deprecated. llama.cpp: Q8_0. awq: 4 bits, computed in bf16;
answers are compared with those of the values that they stand for."""
TIMEOUT_S = 900


class CpuBenchSettings(Settings):
    """Measures decode steps and prompts on a CPU."""

    prog: ClassVar[str] = "benchmarks.engine.cpu"

    shape: str = Field("qwen2.5-0.5b", description="folder of benchmarks/models")
    folder: Path | None = Field(
        None, description="for the checkpoint and the GGUF file, and beside it for AWQ; unset: a temporary one"
    )
    dtypes: str = Field(",".join(SIDES), description="to measure, one after another")
    peers_python: str = Field(sys.executable, description="Python that has the packages of the other sides")
    threads: int = Field(num_cpus(), ge=1, description="of each side")
    rounds: int = Field(5, ge=1, description="samples per cell and side")
    output: Path | None = Field(None, description="file to write the JSON line to as well")

    @field_validator("dtypes")
    @classmethod
    def _check_dtypes(cls, dtypes: str) -> str:
        if unknown := set(dtypes.split(",")) - SIDES.keys():
            raise ValueError(f"{', '.join(sorted(unknown))}: must be of {', '.join(SIDES)}")
        return dtypes


@dataclass(slots=True)
class Side:
    """A process that answers one line with another."""

    name: str
    process: subprocess.Popen[str]
    samples: dict[str, list[float]] = field(default_factory=dict)

    @classmethod
    def start(cls, name: str, dtype: str, folder: Path, settings: CpuBenchSettings) -> Side:
        python = sys.executable if name == "baton" else settings.peers_python
        command = [python, "-m", "benchmarks.engine.cpu.side", name, dtype, str(folder), str(settings.threads)]
        environment = {**os.environ, "OMP_NUM_THREADS": str(settings.threads)}
        pipe = subprocess.PIPE
        return cls(name, subprocess.Popen(command, text=True, env=environment, stdin=pipe, stdout=pipe))

    def ask(self, **request: Any) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name} ended: its log is above")
        return json.loads(line)

    def close(self) -> None:
        if self.process.stdin is not None:
            self.process.stdin.close()
        try:
            self.process.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def main() -> None:
    settings = parse(CpuBenchSettings)
    with tempfile.TemporaryDirectory() as temporary:
        folder = settings.folder or Path(temporary) / settings.shape
        write_checkpoint(settings.shape, folder)
        results = {dtype: measure(dtype, folder, settings) for dtype in settings.dtypes.split(",")}
    print(table(results).markdown())
    line = json.dumps({"shape": settings.shape, "threads": settings.threads, "ms": results})
    print(line)
    if settings.output is not None:
        settings.output.write_text(line + "\n", encoding="utf-8")


def measure(dtype: str, folder: Path, settings: CpuBenchSettings) -> dict[str, Any]:
    """Of each side: what its answers are worth, and {cell: [fastest, median]} in milliseconds. Raises WrongAnswers."""
    folder, reference = _folders(dtype, folder)
    sides: list[Side] = []
    found: dict[str, Any] = {}
    try:
        for name in SIDES[dtype]:  # one after another: some need memory for the weights twice while they load
            sides.append(Side.start(name, dtype, folder, settings))
            sides[-1].ask(kind="load")
        answers = {side.name: side.ask(kind="answers") for side in sides}
        shortfalls = check(reference, dtype, answers)
        for _ in range(settings.rounds):
            for kind, sizes in (("decode", DECODES), ("prompt", PROMPTS)):
                for size in sizes:
                    for side in sides:
                        side.samples.setdefault(f"{kind} {size}", []).extend(side.ask(kind=kind, size=size))
        for side in sides:
            times = {cell: [min(times), statistics.median(times)] for cell, times in side.samples.items()}
            found[side.name] = {"shortfall": round(shortfalls[side.name], 4), "cells": times}
            print(dtype, side.name, found[side.name], file=sys.stderr, flush=True)
    finally:
        for side in sides:
            side.close()
    return found


def _folders(dtype: str, plain: Path) -> tuple[Path, Path]:
    """Of the checkpoint, and of one with its values that transformers can read."""
    if dtype not in FORMATS:
        return plain, plain
    own, values = (plain.with_name(f"{plain.name}-{dtype}{end}") for end in ("", "-values"))
    write(plain, own, dtype)
    write(plain, values, dtype, dequantized=True)
    return own, values


def table(results: dict[str, dict[str, Any]]) -> Table:
    cells = [f"decode {size}" for size in DECODES] + [f"prompt {size}" for size in PROMPTS]
    rows = [
        [f"{dtype}: {name}", *(f"{side['cells'][cell][0]:.1f}" for cell in cells)]
        for dtype, sides in results.items()
        for name, side in sides.items()
    ]
    return Table(["ms, fastest", *cells], rows)
