"""What it costs to watch a cluster: `python -m benchmarks.observability`.

Two clusters of the same settings stand beside each other and are loaded in turns, one at a time:

    off   no traces, no request log, no KV events, no timelines kept, no console
    on    a trace of each request to a collector, JSON log lines, KV events with a subscriber, all pages of metrics
          read each second, the console open

A round sends the same prompts to both, first one at a time and then many at once; which cluster goes first alternates.
The answers of both must be equal, and all that watch must have seen those of `on`. `--watch` has some of it on, to see
what costs; with `--watch=` nothing is, to see how far two equal clusters are apart on this machine. Needs the extras
`otlp` and `kv-events`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field, field_validator

from baton.settings import Settings, parse
from benchmarks.checks import TINY, check_recall
from benchmarks.cluster import Addresses, running_cluster
from benchmarks.http_stream import Connection
from benchmarks.load import Load, Prompts
from benchmarks.observers import Observers, running_observers
from benchmarks.tables import Table
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

    prog: ClassVar[str] = "benchmarks.observability"

    up: str = Field("--device=cpu --prefill=1 --decode=1", description="flags of both clusters, as for baton-up")
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
        if unknown := set(watch) - set(PARTS):
            raise ValueError(f"must be of {', '.join(PARTS)}, not {', '.join(sorted(unknown))}")
        return watch


@dataclass(frozen=True, slots=True)
class Turn:
    """One cluster in one round. `*_cpu_s`: of the router and of the nodes, for all of the turn's requests."""

    first_token_s: float
    tokens_per_s: float
    router_cpu_s: float
    nodes_cpu_s: float


class Side:
    """A cluster, and the parts by which it is watched."""

    def __init__(
        self, settings: ObservabilitySettings, at: Addresses, observers: Observers, watch: Sequence[str]
    ) -> None:
        self._settings = settings
        self._at = at
        self._observers = observers
        self._watch = watch
        self.answers: list[list[int]] = []

    async def open(self) -> Load:
        async with Connection(self._at.http) as connection:
            prompts = await Prompts.of(connection, self._settings.seed)
        self.load = Load(self._at.http, prompts, self._settings.input_len, self._settings.output_len)
        return self.load

    async def turn(self, round_: int) -> Turn:
        settings = self._settings
        before = await self._observers.watch(self._at.http if "pages" in self._watch else None)
        router, nodes = _cpu_s(self._at)
        first = round_ * (settings.num_alone + settings.num_together)
        numbers = range(first, first + settings.num_alone + settings.num_together)
        bodies = [self.load.body(number) for number in numbers]
        alone = [{**body, "max_tokens": 2} for body in bodies[: settings.num_alone]]
        single = await self.load.send("/v1/completions", alone, 1)
        began = time.perf_counter()
        crowd = await self.load.send("/v1/completions", bodies[settings.num_alone :], settings.concurrency)
        took_s = time.perf_counter() - began
        await asyncio.sleep(SETTLE_S)
        router_after, nodes_after = _cpu_s(self._at)
        await self._check_watched(before, len(bodies))
        self.answers = [answer.tokens for answer in single]
        return Turn(
            statistics.median(answer.first_token_s for answer in single),
            sum(len(answer.tokens) for answer in crowd) / took_s,
            router_after - router,
            nodes_after - nodes,
        )

    async def _check_watched(self, before: Mapping[str, int], num_requests: int) -> None:
        """Stop watching. Raises RuntimeError if something of the turn did not arrive."""
        after = await self._observers.watch(None)
        for part, name, least in (
            ("traces", "traces", num_requests),
            ("events", "events", num_requests),
            ("pages", "rounds", 2),
        ):
            arrived = after[name] - before[name]
            if arrived < least if part in self._watch else arrived:
                raise RuntimeError(f"{arrived} {name} arrived, {least if part in self._watch else 0} are expected")


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
        off, on = [
            Side(settings, await _cluster(settings, observers, watch, stack), observers, watch)
            for watch in ((), settings.watch)
        ]
        for side in (off, on):
            await check_recall(await side.open(), TINY, 4)
            await side.turn(-1)  # warm-up
        return [await _round(off, on, number) for number in range(settings.num_rounds)]


async def _cluster(
    settings: ObservabilitySettings, observers: Observers, watch: Sequence[str], stack: contextlib.AsyncExitStack
) -> Addresses:
    flags = f"{settings.up} {flags_with(watch, observers)}"
    return await stack.enter_async_context(running_cluster(flags))


async def _round(off: Side, on: Side, number: int) -> tuple[Turn, Turn]:
    turns = {side: await side.turn(number) for side in ((off, on) if number % 2 else (on, off))}
    if off.answers != on.answers:
        raise RuntimeError("the two clusters gave different tokens")
    print(f"round {number}: {turns[off]} {turns[on]}", file=sys.stderr)
    return turns[off], turns[on]


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

    return {
        "first_token_ms": paired("time to first token, ms", "first_token_s", 1e3),
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
