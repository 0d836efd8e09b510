"""The time that the router adds to the first token: `python -m benchmarks.router.overhead`.

One request at a time. Each pair sends the same token ids once over HTTP through the router and once directly to the
nodes over open gRPC streams, alternating which goes first; cache salts keep the second from finding the first one's
blocks. The tokens of both must be equal.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import ClassVar

from pydantic import Field, model_validator

from baton.sampling import SamplingParams
from baton.settings import ConnectAddress, Settings, parse
from benchmarks.harness.cluster import Addresses, running_cluster
from benchmarks.harness.direct import Direct
from benchmarks.harness.http_stream import Connection
from deploy.bench.stats import median_interval, percentile, summary, table

GOAL_MS = 3.0
WARM_UP_PAIRS = 10
MIN_TOKEN, MAX_TOKEN = 5, 4000  # in every vocabulary


class OverheadSettings(Settings):
    """Compares the time to the first token through the router with that of the same requests sent to its nodes."""

    prog: ClassVar[str] = "benchmarks.router.overhead"

    http: ConnectAddress | None = Field(None, description="router's HTTP address; unset: starts a cluster of its own")
    prefill: ConnectAddress | None = Field(None, description="a prefill node's address, with --http")
    decode: ConnectAddress | None = Field(None, description="a decode node's address, with --http")
    up: str = Field("--device=cpu", description="flags of the own cluster, as for baton-up")
    num_pairs: int = Field(200, ge=6, description="pairs of requests to measure")
    input_len: int = Field(128, ge=1, description="tokens of each prompt")
    output_len: int = Field(4, ge=2, description="tokens of each answer")
    seed: int = Field(0, description="of the prompts")

    @model_validator(mode="after")
    def _check(self) -> OverheadSettings:
        if len({bool(address) for address in (self.http, self.prefill, self.decode)}) > 1:
            raise ValueError("--http, --prefill, --decode: all or none")
        return self


@dataclass(slots=True)
class Measured:
    """Seconds to the first token; the two requests of a pair have the same index."""

    router: list[float]
    direct: list[float]

    @property
    def differences(self) -> list[float]:
        return [a - b for a, b in zip(self.router, self.direct, strict=True)]


async def measure(settings: OverheadSettings, addresses: Addresses) -> Measured:
    rng, measured = Random(settings.seed), Measured([], [])
    sampling = SamplingParams(temperature=0.0, max_tokens=settings.output_len, ignore_eos=True)
    async with Connection(addresses.http) as http, Direct(addresses.prefill[0], addresses.decode[0]) as direct:

        async def through_router(prompt: list[int]) -> tuple[float, tuple[int, ...]]:
            body = {"prompt": prompt, "temperature": 0, "max_tokens": settings.output_len, "ignore_eos": True}
            answer = await http.stream("/v1/completions", {**body, "cache_salt": secrets.token_hex(8)})
            return answer.first_token_s, tuple(answer.tokens)

        async def straight(prompt: list[int]) -> tuple[float, tuple[int, ...]]:
            return await direct.generate(prompt, sampling, secrets.token_hex(8))

        for i in range(WARM_UP_PAIRS + settings.num_pairs):
            prompt = [rng.randrange(MIN_TOKEN, MAX_TOKEN) for _ in range(settings.input_len)]
            ways = [(through_router, measured.router), (straight, measured.direct)]
            answers = set()
            for way, seconds in ways if i % 2 else reversed(ways):
                first_token_s, tokens = await way(prompt)
                answers.add(tokens)
                if i >= WARM_UP_PAIRS:
                    seconds.append(first_token_s)
            if len(answers) != 1:
                raise RuntimeError(f"the two ways gave different tokens: {answers}")
    return measured


async def run(settings: OverheadSettings) -> Measured:
    async with contextlib.AsyncExitStack() as stack:
        if settings.http and settings.prefill and settings.decode:
            addresses = Addresses(settings.http, [settings.prefill], [settings.decode])
        else:
            print("starting a cluster", file=sys.stderr)
            addresses = await stack.enter_async_context(running_cluster(settings.up))
        return await measure(settings, addresses)


def report(settings: OverheadSettings, measured: Measured) -> None:
    rows = {
        "through the router": [s * 1e3 for s in measured.router],
        "straight to the nodes": [s * 1e3 for s in measured.direct],
        "difference, paired": [s * 1e3 for s in measured.differences],
    }
    low, high = median_interval(rows["difference, paired"])
    median = percentile(rows["difference, paired"], 50)
    print(table({name: summary(values) for name, values in rows.items()}, "first token, ms"))
    print(f"the router adds {median:.2f} ms at the median, 95% confidence {low:.2f} to {high:.2f}; goal {GOAL_MS:g}")
    line = {
        "benchmark": "router_overhead",
        "num_pairs": settings.num_pairs,
        "input_len": settings.input_len,
        "router_ttft_ms_p50": round(percentile(rows["through the router"], 50), 3),
        "direct_ttft_ms_p50": round(percentile(rows["straight to the nodes"], 50), 3),
        "added_ms_p50": round(median, 3),
        "added_ms_ci95": [round(low, 3), round(high, 3)],
        "goal_ms": GOAL_MS,
    }
    print(json.dumps(line), flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    settings = parse(OverheadSettings, argv)
    report(settings, asyncio.run(run(settings)))


if __name__ == "__main__":
    main()
