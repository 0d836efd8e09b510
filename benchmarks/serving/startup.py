"""From launch to ready: `python -m benchmarks.serving.startup --checkpoint /dev/shm/llama-3.1-8b --shape llama-3.1-8b`.

Launches a real node process twice, first with nothing compiled, then with the caches of the first run (kernels in
Triton's, bytecode in Python's), and measures the stages in its log and the time to the first `ok` of its health page.
For a time to count, a decode node must give the same tokens in both runs, and either node must pass its integrity
check. The weights are in the page cache. With --caches of an earlier run both starts are warm.
"""

from __future__ import annotations

import asyncio
import json
import os
import platform
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from baton.address import HostPort
from baton.process.resources import num_cpus
from baton.sampling import SamplingParams
from baton.settings import Settings, parse
from benchmarks.harness.checks import WrongAnswers
from benchmarks.harness.direct import generate_alone

GOAL_S = 15.0
STOP_S = 60.0
MOST_READERS = 16
PIECE_BYTES = 16 * 2**20
PROMPT = range(5, 19)  # less than a block, so the second time is not a prefix hit, which would round differently
GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
STAGE = re.compile(r"logger=\S+ ([a-z ]+?) \w+=.* seconds=([\d.]+)")
READY = re.compile(r" ready address=(\S+) metrics=(\S+)/metrics")


class StartupSettings(Settings):
    """Measures the time from the launch of a node to its readiness."""

    prog: ClassVar[str] = "benchmarks.serving.startup"

    model: str | None = Field(None, description="model to start, as for a node; unset: that of --checkpoint")
    checkpoint: Path | None = Field(None, description="folder for a random checkpoint, made there unless it exists")
    shape: str = Field("llama-3.1-8b", description="folder of benchmarks/models that gives --checkpoint its shape")
    role: Literal["prefill", "decode"] = Field("decode", description="node to start")
    node: str = Field("", description="further flags of the node, in one string")
    timeout: float = Field(600.0, gt=0, description="seconds that a start may take")
    caches: Path | None = Field(
        None,
        description="folder for what is compiled, kept afterwards; with that of an earlier run, both starts are warm; "
        "unset: a new one",
    )

    @model_validator(mode="after")
    def _check(self) -> StartupSettings:
        if (self.model is None) == (self.checkpoint is None):
            raise ValueError("--model, --checkpoint: one of them")
        return self


@dataclass(slots=True)
class Start:
    """Seconds since the launch. `stages`: by name, the end and the duration as logged, of several ranks those of the
    last one; a stage may be part of the next one."""

    ready_s: float = 0.0
    stages: dict[str, tuple[float, float]] = field(default_factory=dict)
    answer: tuple[int, ...] = ()


def main() -> None:
    settings = parse(StartupSettings)
    try:
        line = run(settings)
    except (RuntimeError, WrongAnswers) as error:
        sys.stderr.write(f"{settings.prog}: {error}\n")
        sys.exit(1)
    print(json.dumps(line), flush=True)


def run(settings: StartupSettings) -> dict[str, Any]:
    """Measure, print the tables, and return the content of the JSON line. Raises RuntimeError, WrongAnswers."""
    model = settings.model or str(settings.checkpoint)
    if settings.checkpoint:
        _write_checkpoint(settings.shape, settings.checkpoint)
    num_bytes = _into_page_cache(Path(model))
    # One event loop for all runs: grpc's threads do not survive the end of theirs.
    with tempfile.TemporaryDirectory(prefix="baton-caches-") as new, asyncio.Runner() as loop:
        caches = settings.caches or Path(new)
        names = ("again", "warm") if caches.exists() and any(caches.iterdir()) else ("cold", "warm")
        starts = {name: _start(settings, model, caches, loop) for name in names}
    if len({start.answer for start in starts.values()}) > 1:
        raise WrongAnswers(f"two runs, two answers: {[start.answer for start in starts.values()]}")
    for name, start in starts.items():
        print(_table(name, start))
    return {
        "benchmark": "startup",
        "model": model,
        "role": settings.role,
        "node": settings.node,
        "weights_gib": round(num_bytes / 2**30, 2),
        "machine": platform.node(),
        "cores": num_cpus(),
        "num_answered": len(starts["warm"].answer),
        "goal_s": GOAL_S,
        **{f"{name}_ready_s": round(start.ready_s, 2) for name, start in starts.items()},
        **{
            f"{name}_stages": {stage: round(took, 2) for stage, (_, took) in start.stages.items()}
            for name, start in starts.items()
        },
    }


def _write_checkpoint(shape: str, folder: Path) -> None:
    """In a separate process, so that this one holds no GPU memory."""
    code = "import sys; from benchmarks.harness.random_checkpoint import write_checkpoint; from pathlib import Path; "
    code += "write_checkpoint(sys.argv[1], Path(sys.argv[2]))"
    if subprocess.run([sys.executable, "-c", code, shape, str(folder)], check=False).returncode:
        raise RuntimeError(f"--checkpoint: cannot make {folder}")


def _into_page_cache(folder: Path) -> int:
    """Read the weight files; returns their size in bytes, 0 for a model that is not a folder."""
    with ThreadPoolExecutor(min(MOST_READERS, num_cpus())) as threads:
        return sum(threads.map(_read, folder.glob("*.safetensors")))


def _read(file: Path) -> int:
    total, into = 0, bytearray(PIECE_BYTES)
    with file.open("rb", buffering=0) as data:
        while size := data.readinto(into):
            total += size
    return total


def _start(settings: StartupSettings, model: str, caches: Path, loop: asyncio.Runner) -> Start:
    """Launch a node, wait until it is ready, check it, stop it. Raises RuntimeError with its last log lines."""
    argv = [sys.executable, "-m", f"{settings.role}_node.main", "--model", model]
    argv += ["--listen", "127.0.0.1:0", "--metrics-port", "0", *shlex.split(settings.node)]
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    environment |= {"TRITON_CACHE_DIR": str(caches / "triton"), "PYTHONPYCACHEPREFIX": str(caches / "python")}
    launched = time.perf_counter()
    with subprocess.Popen(argv, stderr=subprocess.PIPE, text=True, env=environment) as process:
        late = threading.Timer(settings.timeout, process.kill)
        late.start()
        try:
            return _follow(settings, process, launched, loop)
        finally:
            late.cancel()
            _stop(process)


def _follow(settings: StartupSettings, process: subprocess.Popen[str], launched: float, loop: asyncio.Runner) -> Start:
    start, lines = Start(), []
    assert process.stderr
    for line in process.stderr:
        at = time.perf_counter() - launched
        lines.append(line)
        if found := READY.search(line):
            address, pages = HostPort.parse(found[1]), found[2]
            _page_says_ok(f"{pages}/health")
            start.ready_s = time.perf_counter() - launched
            last = max(end for end, _ in start.stages.values())
            start.stages["serving"] = start.ready_s, start.ready_s - last
            if settings.role == "decode":
                start.answer = _answer(address, loop)
            _page_says_ok(f"{pages}/integrity")
            return start
        if stage := STAGE.search(line):
            if not start.stages:
                began = at - float(stage[2])
                start.stages["imports"] = began, began
            start.stages[stage[1]] = at, float(stage[2])
    raise RuntimeError("the node did not get ready:\n" + "".join(lines[-20:]))


def _answer(address: HostPort, loop: asyncio.Runner) -> tuple[int, ...]:
    answers = [loop.run(generate_alone(address, PROMPT, GREEDY)) for _ in range(2)]
    if answers[0] != answers[1] or len(answers[0]) != GREEDY.max_tokens:
        raise WrongAnswers(f"asked twice, the node answered {answers}")
    return answers[0]


def _page_says_ok(url: str) -> None:
    with urllib.request.urlopen(url, timeout=STOP_S) as page:
        text = page.read().decode().strip()
    if text != "ok":
        raise WrongAnswers(f"{url} says {text}")


def _stop(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.communicate(timeout=STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()


def _table(name: str, start: Start) -> str:
    rows = [f"{stage:20} {at:9.2f} {took:9.2f}" for stage, (at, took) in start.stages.items()]
    return "\n".join([f"{f'caches {name}':20} {'at, s':>9} {'took, s':>9}", *rows])


if __name__ == "__main__":
    main()
