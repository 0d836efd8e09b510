"""A run of the engine's benchmarks: checks answers, measures each section, and ends with one JSON line.

`decode`, `prefill` and `throughput` have one section each; `all` runs all of them with one model.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

import baton
from baton.settings import flag_name, parse
from benchmarks.engine.bench import Bench, EngineBenchSettings, note, open_bench
from benchmarks.engine.check import check, reference_of
from benchmarks.harness.checks import WrongAnswers
from node.ranks.process import run_rank
from node.ranks.ranks import Ranks, fork_ranks

Section = Callable[[Bench], dict[str, Any] | None]
"""Measures, prints a table, and returns the section of the JSON line."""


def main(
    settings_class: type[EngineBenchSettings], sections: dict[str, Section], argv: Sequence[str] | None = None
) -> None:
    """Exits with 1 if an answer is wrong or the engine cannot be built, before any section is measured; or if a section
    fails, after the JSON line of the sections before it."""
    settings = parse(settings_class, argv)
    line: dict[str, Any] = {}
    ranks = fork_ranks(settings, run_rank)
    try:
        run(settings, sections, line, ranks)
    except (ValueError, WrongAnswers) as error:
        sys.stderr.write(f"{settings.prog}: {error}\n")
        sys.exit(1)
    except Exception as error:  # noqa: BLE001 - the process's boundary: GPU time is expensive, so keep the results
        traceback.print_exc()
        line["failed"] = repr(error)
    finally:
        if ranks is not None:
            ranks.close()
    text = json.dumps(line)
    if settings.output:
        settings.output.write_text(text + "\n")
    print(text, flush=True)
    if ranks is not None and torch.cuda.is_available():
        os._exit("failed" in line)  # NCCL would wait for the other ranks, which have ended
    if "failed" in line:
        sys.exit(1)


def run(
    settings: EngineBenchSettings, sections: dict[str, Section], line: dict[str, Any], ranks: Ranks | None = None
) -> None:
    """Fill `line`, section by section. Raises WrongAnswers before any section is measured, ValueError as `build`
    does."""
    bench, build_s = open_bench(settings, ranks)
    checked: Any = "no: each rank has random weights of its own; tests/node/test_gpu_ranks.py checks ranks' answers"
    if ranks is None:
        note("checking answers")
        checked = check(bench, reference_of(bench))
    vllm = bench.shape.vllm
    line |= {
        "benchmark": "engine",
        "model": settings.model,
        "load_format": settings.load_format,
        "dtype": str(bench.dtype).removeprefix("torch."),
        "kv_dtype": bench.built.layout.layers[0].dtype,
        "command": _command(settings),
        "machine": _machine(bench.built.device),
        "compared_with": f"vLLM {vllm.version}, the same shape, {vllm.machine}" if vllm else None,
        "build_s": round(build_s, 2),
        "ceilings": asdict(bench.ceilings),
        "checked": checked,
    }
    for name, section in sections.items():
        line[name] = section(bench)


def _command(settings: EngineBenchSettings) -> str:
    """The command that repeats the run, with files in the working directory."""
    words = ["python", "-m", settings.prog]
    for name in type(settings).model_fields:
        value = getattr(settings, name)
        if name in settings.model_fields_set and value is not False:
            values = [] if value is True else [value.name if isinstance(value, Path) else str(value)]
            words += [flag_name(name), *values]
    return shlex.join(words)


def _machine(device: torch.device) -> dict[str, str]:
    """Date, device and versions."""
    named = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU ({platform.machine()})"
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "device": named,
        "python": platform.python_version(),
        "baton": baton.__version__,
        **{package: str(import_module(package).__version__) for package in ("torch", "triton", "transformers")},
    }
