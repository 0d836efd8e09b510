"""How long streams pause when their decode node is lost: `python -m benchmarks.serving.failover`.

Each stream is answered twice, first undisturbed. The second time, a decode node is killed, hangs, or is told to stop,
when all streams run: those that it had go on at another node, from the token that their clients got last. If it is told
to stop, it hands them over with their KV, and nothing is computed again. Their tokens must be equal.
On a GPU they need not be, since another batch rounds otherwise; then the figures alone count (--no-check).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from signal import SIGCONT, SIGKILL, SIGSTOP, SIGTERM
from typing import Any, ClassVar, Literal

from pydantic import Field

from baton.settings import Settings, parse
from benchmarks.harness.cluster import Addresses, running_cluster
from benchmarks.harness.http_stream import Connection, Streamed
from deploy.bench.stats import percentile, table

MIN_TOKEN, MAX_TOKEN = 5, 4000  # in every vocabulary
POLL_S = 0.01
HANG_S = 10.0
"""Longer than it takes to notice."""

Loss = Literal["kill", "hang", "drain"]
SIGNALS = {"kill": SIGKILL, "hang": SIGSTOP, "drain": SIGTERM}


class FailoverSettings(Settings):
    """Loses one of the decode nodes of a cluster of its own while it streams, and measures what clients see."""

    prog: ClassVar[str] = "benchmarks.serving.failover"

    up: str = Field("--device=cpu --prefill=1 --decode=2", description="flags of the cluster, as for baton-up")
    loss: Loss = Field("kill", description="what becomes of the node: kill (SIGKILL), hang (SIGSTOP), drain (SIGTERM)")
    num_streams: int = Field(64, ge=1, description="streams on each decode node")
    input_len: int = Field(128, ge=1, description="tokens of each prompt")
    output_len: int = Field(256, ge=8, description="tokens of each answer")
    after: int = Field(64, ge=1, description="tokens that each stream has when the node is lost")
    check: bool = Field(True, description="compare the tokens with those of the undisturbed run")
    seed: int = Field(0, description="of the prompts and of every second stream, which draws at random")


@dataclass(frozen=True)
class Measured:
    """Of the streams that lost their node. Times are in seconds: `pauses` from the last token before the loss to the
    next one; `usual` is the longest time between two tokens of each of them in the undisturbed run."""

    pauses: list[float]
    usual: list[float]
    num_streams: int
    num_different: int


async def measure(settings: FailoverSettings, addresses: Addresses) -> Measured:
    bodies = _bodies(settings, settings.num_streams * len(addresses.decode))
    async with contextlib.AsyncExitStack() as stack:
        connections = [await stack.enter_async_context(Connection(addresses.http)) for _ in bodies]
        calm = await _stream_all(connections, bodies, [Streamed(0.0) for _ in bodies])
        answers = [Streamed(0.0) for _ in bodies]
        running = asyncio.create_task(_stream_all(connections, bodies, answers))
        while min(len(answer.tokens) for answer in answers) < settings.after:
            await asyncio.sleep(POLL_S)
            if running.done():
                raise RuntimeError("streams ended before all had begun: ask for a longer --output-len")
        lost_at = time.perf_counter()
        addresses.signal(addresses.decode[0], SIGNALS[settings.loss])
        if settings.loss == "hang":
            await asyncio.wait([running], timeout=HANG_S)
            addresses.signal(addresses.decode[0], SIGCONT)
        await running
    pairs = [(a, b) for a, b in zip(calm, answers, strict=True) if _went_on_elsewhere(b)]
    return Measured(
        [_pause(answer, lost_at) for _, answer in pairs],
        [before.longest_gap_s for before, _ in pairs],
        len(bodies),
        sum(a.tokens != b.tokens for a, b in zip(calm, answers, strict=True)),
    )


def _went_on_elsewhere(answer: Streamed) -> bool:
    return bool(answer.timings.get("attempts", 1) > 1 or answer.timings.get("moves", 0))


def _bodies(settings: FailoverSettings, count: int) -> list[dict[str, Any]]:
    rng = Random(settings.seed)
    shared = {"max_tokens": settings.output_len, "ignore_eos": True, "stream_options": {"include_usage": True}}
    return [
        {
            **shared,
            "prompt": [rng.randrange(MIN_TOKEN, MAX_TOKEN) for _ in range(settings.input_len)],
            **({"temperature": 1.0, "seed": i} if i % 2 else {"temperature": 0}),
        }
        for i in range(count)
    ]


async def _stream_all(
    connections: Sequence[Connection], bodies: Sequence[dict[str, Any]], answers: Sequence[Streamed]
) -> list[Streamed]:
    """Each with a salt of its own: the other decode node must not have an answer's KV from the undisturbed run."""
    salted = [{**body, "cache_salt": secrets.token_hex(8)} for body in bodies]
    pairs = zip(connections, salted, answers, strict=True)
    return await asyncio.gather(*(conn.stream("/v1/completions", body, answer) for conn, body, answer in pairs))


def _pause(answer: Streamed, lost_at: float) -> float:
    """The longest time without a token that ended after the loss."""
    pairs = zip(answer.arrivals, answer.arrivals[1:], strict=False)
    return max((b - a for a, b in pairs if b > lost_at), default=0.0)


def report(settings: FailoverSettings, measured: Measured) -> None:
    rows = {
        name: {"p50": percentile(values, 50) * 1e3, "p90": percentile(values, 90) * 1e3, "worst": max(values) * 1e3}
        for name, values in (("pause", measured.pauses), ("undisturbed", measured.usual))
    }
    print(table(rows, "longest gap, ms"))
    line = {
        "benchmark": "failover",
        "loss": settings.loss,
        "num_streams": measured.num_streams,
        "num_moved": len(measured.pauses),
        "num_different": measured.num_different,
        "pause_ms_p50": round(rows["pause"]["p50"], 1),
        "pause_ms_worst": round(rows["pause"]["worst"], 1),
        "undisturbed_ms_worst": round(rows["undisturbed"]["worst"], 1),
    }
    print(json.dumps(line), flush=True)
    if settings.check and measured.num_different:
        raise RuntimeError(f"{measured.num_different} answers differ from those of the undisturbed run")


async def run(settings: FailoverSettings) -> Measured:
    print("starting a cluster", file=sys.stderr)
    async with running_cluster(settings.up) as addresses:
        measured = await measure(settings, addresses)
        if not measured.pauses:
            raise RuntimeError("no stream has lost its node")
        return measured


def main(argv: Sequence[str] | None = None) -> None:
    settings = parse(FailoverSettings, argv)
    report(settings, asyncio.run(run(settings)))


if __name__ == "__main__":
    main()
