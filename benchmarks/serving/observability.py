"""What it costs to watch a cluster: `python -m benchmarks.serving.observability`.

Two clusters of the same settings stand beside each other:

    off   no traces, no request log, no KV events, no timelines kept, no console
    on    a trace of each request to a collector, JSON log lines, KV events with a subscriber, all pages of metrics
          read each second, the console open

A round sends the same prompts to both: first one at a time, each to one cluster and then to the other; then many at
once, to one cluster after the other. Which goes first alternates. The answers of both must be equal, and all that watch
must have seen those of `on`. `--watch` has some of it on, to see what costs; with `--watch=` nothing is, to see how far
two equal clusters are apart on this machine. Needs the extras `otlp` and `kv-events`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field, field_validator

from baton.settings import Settings, parse
from benchmarks.harness.checks import TINY, check_recall
from benchmarks.harness.cluster import Addresses, makes_answers_up, running_cluster
from benchmarks.harness.http_stream import Connection
from benchmarks.harness.load import Load, Prompts
from benchmarks.harness.tables import Table
from benchmarks.serving.observers import Observers, running_observers
from deploy.bench.stats import median_interval

MAX_LOST_PERCENT, MAX_ADDED_MS = 2.0, 0.3
EXPORT_S = 1.0
"""How long spans wait for others to be sent with them: the SDK's default, 5 s, is longer than a turn may be."""
SETTLE_S = 2.5
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
PARTS = ("traces", "log", "events", "pages")
OFF = {"log": "--log-level=warning", "pages": "--no-console --max-timeline-bytes=0"}


class ObservabilitySettings(Settings):
    """Measures what traces, request logs, KV events, metrics and the console cost together."""

    prog: ClassVar[str] = "benchmarks.serving.observability"

    up: str = Field(
        "--device=cpu --prefill=1 --decode=1",
        description="flags of both clusters, as for baton-up: of baton-tiny, or simulated",
    )
    num_rounds: int = Field(20, ge=6, description="rounds; each gives one difference")
    num_alone: int = Field(60, ge=1, description="requests of a turn that are sent one at a time")
    num_together: int = Field(200, ge=1, description="requests of a turn that are sent together")
    concurrency: int = Field(16, ge=1, description="of those that are sent together")
    input_len: int = Field(128, ge=1, description="tokens of each prompt")
    output_len: int = Field(32, ge=2, description="tokens of each answer of those that are sent together")
    seed: int = Field(0, description="of the prompts")
    watch: tuple[str, ...] = Field(PARTS, description="what is on, of traces, log, events and pages; empty: nothing")

    @field_validator("watch")
    @classmethod
    def _known(cls, watch: tuple[str, ...]) -> tuple[str, ...]:
        watch = tuple(part for text in watch for part in text.split(",") if part)
        if unknown := set(watch) - set(PARTS):
            raise ValueError(f"must be of {', '.join(PARTS)}, not {', '.join(sorted(unknown))}")
        return watch


@dataclass(frozen=True, slots=True)
class Turn:
    """One cluster in one round. `first_token_s`: of each request that was alone; `*_cpu_s`: of the router and of the
    nodes, for all requests."""

    first_token_s: list[float]
    tokens_per_s: float
    router_cpu_s: float
    nodes_cpu_s: float


class Side:
    """One of the two clusters. `watch`: the parts by which it is watched."""

    def __init__(self, at: Addresses, watch: Sequence[str], load: Load, connection: Connection) -> None:
        self.at = at
        self.watch = watch
        self.connection = connection
        self._load = load

    def body(self, number: int) -> dict[str, Any]:
        return self._load.body(number)

    async def tokens_per_s(self, numbers: Sequence[int], concurrency: int) -> float:
        bodies, began = [self.body(number) for number in numbers], time.perf_counter()
        answers = await self._load.send("/v1/completions", bodies, concurrency)
        return sum(len(answer.tokens) for answer in answers) / (time.perf_counter() - began)


class Comparison:
    def __init__(self, settings: ObservabilitySettings, observers: Observers) -> None:
        self._settings = settings
        self._observers = observers

    async def round(self, off: Side, on: Side, number: int) -> tuple[Turn, Turn]:
        """Raises RuntimeError if the answers differ, or if something of them was not seen by those that watch."""
        settings, sides = self._settings, (off, on) if number % 2 else (on, off)
        first = (number + 1) * (settings.num_alone + settings.num_together)
        together = range(first + settings.num_alone, first + settings.num_alone + settings.num_together)
        before = {side: _cpu_s(side.at) for side in sides}
        arrived = await self._watch(on)
        first_token_s = await self._alone(sides, range(first, together.start))
        await self._watch(None)
        rates = {}
        for side in sides:
            await self._watch(side)
            rates[side] = await side.tokens_per_s(together, settings.concurrency)
            await asyncio.sleep(SETTLE_S)
        _check_seen(on.watch, await self._watch(None) - arrived, settings.num_alone + settings.num_together)
        cpu_s = {side: [b - a for a, b in zip(before[side], _cpu_s(side.at), strict=True)] for side in sides}
        turns = {side: Turn(first_token_s[side], rates[side], *cpu_s[side]) for side in sides}
        return turns[off], turns[on]

    async def _watch(self, side: Side | None) -> Counter[str]:
        return await self._observers.watch(side.at.http if side and "pages" in side.watch else None)

    async def _alone(self, sides: Sequence[Side], numbers: Sequence[int]) -> dict[Side, list[float]]:
        """Each prompt to one after the other, and the next one the other way round."""
        seconds: dict[Side, list[float]] = {side: [] for side in sides}
        for number in numbers:
            tokens = []
            for side in sides if number % 2 else reversed(sides):
                answer = await side.connection.stream("/v1/completions", {**side.body(number), "max_tokens": 2})
                seconds[side].append(answer.first_token_s)
                tokens.append(answer.tokens)
            if tokens[0] != tokens[1]:
                raise RuntimeError(f"the two clusters gave different tokens: {tokens}")
        return seconds


def _check_seen(watch: Sequence[str], seen: Counter[str], num_requests: int) -> None:
    least = {"traces": ("traces", num_requests), "events": ("events", num_requests), "pages": ("rounds", 2)}
    for part, (name, wanted) in least.items():
        wanted *= part in watch
        if seen[name] < wanted or (seen[name] and not wanted):
            raise RuntimeError(f"{seen[name]} {name} arrived, {wanted} are expected")


def _cpu_s(at: Addresses) -> tuple[float, float]:
    """Seconds of CPU that the router and the nodes have taken so far."""
    nodes = {f"--listen={address}" for address in (*at.prefill, *at.decode)}
    router_s = nodes_s = 0.0
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            arguments = set((folder / "cmdline").read_text().split("\0"))
            if not (is_router := f"--http={at.http}" in arguments) and not arguments & nodes:
                continue
            ticks = (folder / "stat").read_text().rpartition(")")[2].split()[11:13]
        except OSError:
            continue  # it has ended
        seconds = sum(map(int, ticks)) / _TICKS_PER_S
        router_s, nodes_s = router_s + seconds * is_router, nodes_s + seconds * (not is_router)
    return router_s, nodes_s


def flags_with(watch: Sequence[str], observers: Observers) -> str:
    """Of a cluster of which these parts are on."""
    events = json.dumps({"enable_kv_cache_events": True, "endpoint": observers.subscriber}, separators=(",", ":"))
    on = {
        "traces": f"--otlp-traces-endpoint={observers.collector}",
        "log": "--log-format=json",
        "events": f"'--kv-events-config={events}'",
    }
    return " ".join((on if part in watch else OFF).get(part, "") for part in PARTS)


async def run(settings: ObservabilitySettings) -> list[tuple[Turn, Turn]]:
    """The turns of off and on in each round."""
    os.environ |= {"OTEL_BSP_SCHEDULE_DELAY": str(int(EXPORT_S * 1e3)), "NO_PROXY": "127.0.0.1"}
    async with contextlib.AsyncExitStack() as stack:
        observers = await stack.enter_async_context(running_observers())
        print("starting two clusters", file=sys.stderr)
        off, on = [await _side(settings, observers, watch, stack) for watch in ((), settings.watch)]
        comparison, rounds = Comparison(settings, observers), []
        for number in range(-1, settings.num_rounds):  # the first one is a warm-up
            rounds.append(await comparison.round(off, on, number))
            print(f"round {number} of {settings.num_rounds}", file=sys.stderr)
        return rounds[1:]


async def _side(
    settings: ObservabilitySettings, observers: Observers, watch: Sequence[str], stack: contextlib.AsyncExitStack
) -> Side:
    """A cluster that gives right answers. Raises WrongAnswers."""
    flags = f"{settings.up} {flags_with(watch, observers)}"
    at = await stack.enter_async_context(running_cluster(flags))
    connection = await stack.enter_async_context(Connection(at.http))
    load = Load(at.http, await Prompts.of(connection, settings.seed), settings.input_len, settings.output_len)
    if not makes_answers_up(settings.up):
        await check_recall(load, TINY, 4)
    return Side(at, watch, load, connection)


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure of all rounds, in its unit; `differences` of on and off, one each round."""

    name: str
    off: list[float]
    on: list[float]
    differences: list[float]
    unit: str = ""

    @property
    def interval(self) -> tuple[float, float]:
        return median_interval(self.differences)

    def row(self) -> list[str]:
        low, high = self.interval
        off, on, median = map(statistics.median, (self.off, self.on, self.differences))
        return [self.name, f"{off:.2f}", f"{on:.2f}", f"{median:+.2f}{self.unit}", f"{low:+.2f} to {high:+.2f}"]

    def line(self) -> dict[str, float]:
        low, high = self.interval
        return {"median": round(statistics.median(self.differences), 3), "low": round(low, 3), "high": round(high, 3)}


def figures(settings: ObservabilitySettings, rounds: Sequence[tuple[Turn, Turn]]) -> dict[str, Figure]:
    per_request_ms = 1e3 / (settings.num_alone + settings.num_together)

    def paired(name: str, field: str, factor: float = 1.0, relative: bool = False) -> Figure:
        off, on = ([getattr(turn, field) * factor for turn in turns] for turns in zip(*rounds, strict=True))
        pairs = list(zip(off, on, strict=True))
        differences = [100 * (b / a - 1) if relative else b - a for a, b in pairs]
        return Figure(name, off, on, differences, "%" if relative else "")

    off_ms, on_ms = ([[s * 1e3 for s in turn.first_token_s] for turn in turns] for turns in zip(*rounds, strict=True))
    added_ms = [
        statistics.median(b - a for a, b in zip(*pair, strict=True)) for pair in zip(off_ms, on_ms, strict=True)
    ]
    return {
        "first_token_ms": Figure("time to first token, ms", [*chain(*off_ms)], [*chain(*on_ms)], added_ms),
        "throughput_percent": paired("output tokens/s", "tokens_per_s", relative=True),
        "router_cpu_ms": paired("CPU of the router, ms per request", "router_cpu_s", per_request_ms),
        "nodes_cpu_ms": paired("CPU of the nodes, ms per request", "nodes_cpu_s", per_request_ms),
    }


def report(settings: ObservabilitySettings, rounds: Sequence[tuple[Turn, Turn]]) -> None:
    found = figures(settings, rounds)
    columns = ("", "off", "on" if settings.watch else "off", "difference, paired", "95% confidence")
    print(Table(columns, [figure.row() for figure in found.values()]).markdown())
    line: dict[str, Any] = {
        "benchmark": "observability",
        "watch": settings.watch,
        "num_rounds": len(rounds),
        **{name: figure.line() for name, figure in found.items()},
        "max_added_first_token_ms": MAX_ADDED_MS,
        "max_lost_throughput_percent": MAX_LOST_PERCENT,
    }
    print(json.dumps(line), flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    settings = parse(ObservabilitySettings, argv)
    report(settings, asyncio.run(run(settings)))


if __name__ == "__main__":
    main()
