"""What prompts cost the streams of a decode node that computes them itself: `python -m benchmarks.serving.mixed_steps`

For each target, a cluster of one decode node without prefill nodes is started with that `--target-itl`. Answers are
checked first. Then streams decode, and prompts of each length arrive one after another beside them. The table has, for
each target and length: the streams' gaps between two tokens while a prompt is there, and the prompts' times to the
first token. On a GPU: `--up="--model benchmarks/models/llama-3.1-8b --load-format dummy --max-model-len
40000" --targets 0,10,14,20 --lengths 512,2048,8192 --tie-tolerance 1.0`
"""

from __future__ import annotations

import asyncio
import json
import math
import sys
import time
from collections.abc import Sequence
from typing import Any, ClassVar

from pydantic import Field

from baton.address import HostPort
from baton.settings import Settings, parse
from benchmarks.harness.checks import WrongAnswers, check_concurrency
from benchmarks.harness.cluster import running_cluster
from benchmarks.harness.http_stream import Connection, RequestFailed, Streamed
from benchmarks.harness.load import Load, Prompts
from deploy.bench.stats import percentile, table

FIRST_WAIT_S = 1.0
"""Delay before the first prompt: by then all streams are decoding."""
PEACE = "none"
"""The row of the gaps before the first prompt."""


class MixedStepsSettings(Settings):
    """Compares the gaps of streams, and first tokens of prompts beside them, for several values of --target-itl."""

    prog: ClassVar[str] = "benchmarks.serving.mixed_steps"

    up: str = Field("--device=auto", description="flags of the clusters, as for baton-up")
    targets: str = Field("0,20", description="values of --target-itl in milliseconds, with commas; 0: not set")
    lengths: str = Field("256,1024", description="tokens of the prompts, with commas")
    prompts: int = Field(8, ge=1, description="prompts of each length, one after another")
    streams: int = Field(8, ge=1, description="streams that are watched")
    input_len: int = Field(256, ge=1, description="tokens of their prompts")
    output_len: int = Field(
        1500, ge=16, description="tokens of their answers; new streams follow until all is measured"
    )
    tie_tolerance: float = Field(1e-4, ge=0, description="as for benchmarks.serving.streams")
    seed: int = Field(0, description="of the prompts")


Window = tuple[float, float]
"""Its begin and its end, by `time.perf_counter`."""


def gaps_during(answers: Sequence[Streamed], windows: Sequence[Window]) -> list[float]:
    """Seconds between two tokens, of which any part lies in a window: the gap that a prompt causes begins before it
    arrives, and may end after its first token."""
    return [
        b - a
        for answer in answers
        for a, b in zip(answer.arrivals, answer.arrivals[1:], strict=False)
        if any(a <= ended and b >= began for began, ended in windows)
    ]


class Watched:
    """Streams that decode until `stop`; each that ends is followed by a new one."""

    def __init__(self, load: Load, count: int) -> None:
        self._load = load
        self._stopping = False
        self._answers = list[Streamed]()
        self._tasks = [asyncio.create_task(self._keep_going()) for _ in range(count)]

    async def _keep_going(self) -> None:
        while not self._stopping:
            self._answers.append(await self._load.one())

    async def stop(self) -> list[Streamed]:
        """Wait for the streams under way; all answers. Raises RequestFailed if one failed."""
        self._stopping = True
        await asyncio.gather(*self._tasks)
        return self._answers

    def cancel(self) -> None:
        for task in self._tasks:
            task.cancel()


async def measure(settings: MixedStepsSettings, target: float) -> dict[str, dict[str, float]]:
    """Rows by name: the gaps in peace, and those beside prompts of each length."""
    own = f"--target-itl={target:g}" if target else ""
    async with running_cluster(f"{settings.up} --prefill=0 --decode=1 {own}") as cluster:
        async with Connection(cluster.http) as connection:
            prompts = await Prompts.of(connection, settings.seed)
        checked = Load(cluster.http, prompts, settings.input_len, 16)
        await check_concurrency(checked, settings.streams, settings.tie_tolerance)
        return await _watch(settings, cluster.http, prompts)


async def _watch(settings: MixedStepsSettings, address: HostPort, prompts: Prompts) -> dict[str, dict[str, float]]:
    watched = Watched(Load(address, prompts, settings.input_len, settings.output_len), settings.streams)
    windows, first_tokens = dict[str, list[Window]](), dict[str, list[float]]()
    try:
        began = time.perf_counter() + FIRST_WAIT_S / 2  # without the streams' own prompts
        await asyncio.sleep(FIRST_WAIT_S)
        windows[PEACE], first_tokens[PEACE] = [(began, time.perf_counter())], []
        for length in _numbers(settings.lengths):
            name, load = f"{length:g}", Load(address, prompts, int(length), 1)
            await load.one()  # the node learns what such a prompt costs
            windows[name], first_tokens[name] = [], []
            for _ in range(settings.prompts):
                began = time.perf_counter()
                first_tokens[name].append((await load.one()).first_token_s)
                windows[name].append((began, time.perf_counter()))
        answers = await watched.stop()
    finally:
        watched.cancel()
    return {name: _row(gaps_during(answers, windows[name]), first_tokens[name]) for name in windows}


def _row(gaps_s: Sequence[float], first_tokens_s: Sequence[float]) -> dict[str, float]:
    """NaN of what there was none of."""
    return {
        "gap p50": percentile(gaps_s, 50) * 1e3,
        "gap p99": percentile(gaps_s, 99) * 1e3,
        "longest": max(gaps_s, default=math.nan) * 1e3,
        "TTFT p50": percentile(first_tokens_s, 50) * 1e3,
        "TTFT max": max(first_tokens_s, default=math.nan) * 1e3,
    }


def _numbers(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


async def run(settings: MixedStepsSettings) -> dict[str, Any]:
    """Check and measure with each target, print the table; returns the content of the JSON line."""
    rows = dict[str, dict[str, float]]()
    for target in _numbers(settings.targets):
        for length, row in (await measure(settings, target)).items():
            rows[f"target {target:g} prompt {length}"] = row
    print(table(rows, "milliseconds"))
    known = {name: {of: ms for of, ms in row.items() if not math.isnan(ms)} for name, row in rows.items()}
    return {"benchmark": "mixed_steps", "up": settings.up, "streams": settings.streams, "rows": known}


def main(argv: Sequence[str] | None = None) -> None:
    settings = parse(MixedStepsSettings, argv)
    try:
        result = asyncio.run(run(settings))
    except* (WrongAnswers, RequestFailed, OSError, RuntimeError, ValueError) as errors:
        sys.exit(f"{settings.prog}: {errors.exceptions[0]}")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
