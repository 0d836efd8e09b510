"""Compares a simulation with reality: `python -m benchmarks.simulation.check --profile FILE`.

A real pair of nodes and a simulated one get the same requests at the same times. The profile must be of that node, see
`benchmarks.simulation.fit_profile`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from functools import partial
from random import Random
from typing import ClassVar

from pydantic import Field

from baton.settings import Settings, parse
from benchmarks.harness.cluster import running_cluster
from benchmarks.harness.http_stream import Connection, Streamed
from benchmarks.harness.load import Load, Prompts
from benchmarks.simulation.fleet import Answer, Fleet
from benchmarks.simulation.policies import make_router
from deploy.bench.stats import percentile
from deploy.bench.trace import BLOCK_TOKENS, Entry

NUM_WARM_UP = 8
PERCENTS = (50, 90, 99)


class CheckSettings(Settings):
    """Compares the times of a real pair of nodes with those of a simulated one at the same arrivals."""

    prog: ClassVar[str] = "benchmarks.simulation.check"

    profile: str = Field(description="file with the times of these nodes")
    up: str = Field("--device=cpu --cpu-threads=1", description="flags of the real cluster, as for baton-up")
    rates: str = Field("2,4", description="requests per second, as N,N,...")
    num_requests: int = Field(60, ge=2, description="requests at each rate")
    input_len: int = Field(256, ge=1, description="tokens of each prompt")
    output_len: int = Field(32, ge=2, description="tokens of each answer")
    seed: int = Field(0, description="of the arrivals")


def simulated(settings: CheckSettings, per_s: float) -> list[Answer]:
    """Arrivals as those of `Load.arriving`."""
    random, at, entries = Random(settings.seed), 0.0, list[Entry]()
    num_blocks = -(-settings.input_len // BLOCK_TOKENS)
    for number in range(settings.num_requests):
        at += random.expovariate(per_s)
        ids = tuple(range(number * num_blocks, (number + 1) * num_blocks))
        entries.append(Entry(at * 1e3, settings.input_len, settings.output_len, ids))
    return Fleet(1, 1, settings.profile, partial(make_router, "cost")).replay(entries)


async def real(settings: CheckSettings, rates: Sequence[float]) -> list[list[Streamed]]:
    async with running_cluster(settings.up) as addresses:
        async with Connection(addresses.http) as connection:
            prompts = await Prompts.of(connection, settings.seed)
        load = Load(addresses.http, prompts, settings.input_len, settings.output_len)
        await load.many(NUM_WARM_UP, 2)
        return [await load.arriving(settings.num_requests, per_s, settings.seed) for per_s in rates]


def compare(per_s: float, served: Sequence[Streamed], made: Sequence[Answer]) -> dict[str, float]:
    """Milliseconds of both, by percentile."""
    times = {
        "ttft": ([a.first_token_s for a in served], [a.token_times[0] - a.arrived for a in made]),
        "itl": (
            [gap for a in served for gap in a.between_tokens_s],
            [b - c for a in made for b, c in zip(a.token_times[1:], a.token_times, strict=False)],
        ),
    }
    line = {"per_s": per_s}
    for name, (real_s, made_s) in times.items():
        for percent in PERCENTS:
            line[f"{name}_p{percent}_real_ms"] = round(1e3 * percentile(real_s, percent), 2)
            line[f"{name}_p{percent}_simulated_ms"] = round(1e3 * percentile(made_s, percent), 2)
    return line


def markdown(lines: Sequence[dict[str, float]]) -> str:
    rows = ["| requests/s | | real p50 / p90 / p99 | simulated | off by |", "| ---: | --- | --- | --- | --- |"]
    for line in lines:
        for name in ("ttft", "itl"):
            pairs = [(line[f"{name}_p{p}_real_ms"], line[f"{name}_p{p}_simulated_ms"]) for p in PERCENTS]
            cells = [" / ".join(f"{pair[i]:.1f}" for pair in pairs) for i in (0, 1)]
            off = " / ".join(f"{made / served - 1:+.0%}" if served else "-" for served, made in pairs)
            rows.append(f"| {line['per_s']:g} | {name.upper()} | {cells[0]} | {cells[1]} | {off} |")
    return "\n".join(rows)


def main(argv: Sequence[str] | None = None) -> None:
    settings = parse(CheckSettings, argv)
    rates = [float(rate) for rate in settings.rates.split(",")]
    served = asyncio.run(real(settings, rates))
    lines = [compare(per_s, own, simulated(settings, per_s)) for per_s, own in zip(rates, served, strict=True)]
    for line in lines:
        print(json.dumps({"benchmark": "simulation_check", **line}))
    print(markdown(lines), flush=True)


if __name__ == "__main__":
    main()
