"""A run of the engine's benchmarks: answers are checked, then each section measures; one JSON line at the end.

Each of `engine_decode`, `engine_prefill` and `engine_throughput` has one section; `engine_all` runs all with one model.
"""

from __future__ import annotations

import json
import platform
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

import torch

import baton
from baton.settings import parse
from benchmarks.checks import WrongAnswers
from benchmarks.engine_bench import Bench, EngineBenchSettings, note, open_bench
from benchmarks.engine_check import check, reference_of

Section = Callable[[Bench], dict[str, Any]]
"""Measures, prints a table, returns what the JSON line says of it."""


def main(
    settings_class: type[EngineBenchSettings], sections: dict[str, Section], argv: Sequence[str] | None = None
) -> None:
    """Exits with 1, before anything is measured, when an answer is wrong or the engine cannot be built."""
    settings = parse(settings_class, argv)
    arguments = sys.argv[1:] if argv is None else argv
    try:
        line = json.dumps(run(settings, sections, shlex.join(["python", "-m", settings.prog, *arguments])))
    except (ValueError, WrongAnswers) as error:
        sys.stderr.write(f"{settings.prog}: {error}\n")
        sys.exit(1)
    if settings.output:
        settings.output.write_text(line + "\n")
    print(line, flush=True)


def run(settings: EngineBenchSettings, sections: dict[str, Section], command: str) -> dict[str, Any]:
    """What the JSON line says. Raises WrongAnswers before anything is measured, ValueError as `build` does."""
    bench, build_s = open_bench(settings)
    note("checking answers")
    checked = check(bench, reference_of(bench))
    vllm = bench.shape.vllm
    return {
        "benchmark": "engine",
        "model": settings.model,
        "load_format": settings.load_format,
        "dtype": bench.built.layout.dtype,
        "command": command,
        "machine": _machine(bench.built.device),
        "compared_with": f"vLLM {vllm.version}, the same shape, one {vllm.machine}" if vllm else None,
        "build_s": round(build_s, 2),
        "ceilings": asdict(bench.ceilings),
        "checked": checked,
        **{name: section(bench) for name, section in sections.items()},
    }


def _machine(device: torch.device) -> dict[str, str]:
    """Where and with what: date, device and versions."""
    named = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU ({platform.machine()})"
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "device": named,
        "python": platform.python_version(),
        "baton": baton.__version__,
        **{package: version(package) for package in ("torch", "triton", "transformers")},
    }
