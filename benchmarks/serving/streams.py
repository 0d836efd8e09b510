"""Streams over HTTP: `make bench`, or `python -m benchmarks.serving.streams --url http://HOST:PORT --concurrency 32`

N streams at once, or with `--request-rate`, requests at the times of a Poisson process.
One run checks the answers (see `benchmarks.harness.checks`), times two bounds (an empty HTTP round trip, and requests
on the idle cluster), then measures the load. Prompts are token ids of generated text, each with its own cache salt, so
that no prefix cache helps; answers have exactly --output-len tokens.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from pydantic import Field, field_validator

from baton.address import HostPort
from baton.settings import Settings, parse
from benchmarks.harness.checks import WrongAnswers, check_concurrency, check_recall
from benchmarks.harness.cluster import running_cluster
from benchmarks.harness.http_stream import Connection, RequestFailed, Streamed
from benchmarks.harness.load import Load, Prompts, address_of
from deploy.bench.stats import percentile, summary, table

NUM_ALONE = 5
NUM_PINGS = 50

HANDOFF = ("handoff", "commit", "transfer", "scatter", "step_wait", "gather", "wire")
"""Names in the answers' timings. Commit + transfer + step wait is the time from the prompt's end to the decode node's
first step; scatter is the last part of transfer. Gather + wire, on the prefill node, is the time from the prompt's end
until the last part is sent."""


class StreamsSettings(Settings):
    """Loads a cluster with concurrent streamed completions and tells their latencies."""

    prog: ClassVar[str] = "benchmarks.serving.streams"

    url: str | None = Field(None, description="where the router answers, as http://HOST:PORT; unset: an own cluster")
    up: str = Field("--device=auto", description="flags of the own cluster, as for baton-up")
    concurrency: int = Field(8, ge=1, description="streams at once")
    request_rate: float | None = Field(
        None, gt=0, description="requests per second that come by chance, however many are under way; unset: streams"
    )
    goodput: str = Field(
        "",
        description="limits in ms, as ttft:200,gap:25, for the share of requests that keep all of them: ttft, tpot, "
        "e2e, gap (the longest between two tokens)",
    )
    num_prompts: int = Field(64, ge=1, description="requests in all")
    input_len: int = Field(256, ge=1, description="tokens of each prompt")
    output_len: int = Field(64, ge=1, description="tokens of each answer")
    seed: int = Field(0, description="of the prompts")
    tie_tolerance: float = Field(
        1e-4, ge=0, description="difference of two logprobs that counts as a tie; higher where cluster computes in bf16"
    )

    @field_validator("url")
    @classmethod
    def _check_url(cls, url: str | None) -> str | None:
        if url is not None:
            address_of(url)
        return url

    @field_validator("goodput")
    @classmethod
    def _check_goodput(cls, goodput: str) -> str:
        limits_of(goodput)
        return goodput


def limits_of(goodput: str) -> dict[str, float]:
    """Limits in seconds by name. Raises ValueError."""
    pairs = [part.partition(":") for part in goodput.split(",") if part]
    try:
        limits = {name: float(number) / 1e3 for name, _, number in pairs}
    except ValueError:
        raise ValueError(f"must be NAME:MILLISECONDS,... not {goodput!r}") from None
    if unknown := limits.keys() - _LIMITED.keys():
        raise ValueError(f"knows {', '.join(_LIMITED)}, not {', '.join(sorted(unknown))}")
    return limits


_LIMITED: dict[str, Callable[[Streamed], float]] = {
    "ttft": lambda answer: answer.first_token_s,
    "tpot": lambda answer: answer.per_token_s,
    "e2e": lambda answer: answer.total_s,
    "gap": lambda answer: answer.longest_gap_s,
}


async def run(settings: StreamsSettings) -> dict[str, Any]:
    """Check, measure, print the table; returns the content of the JSON line."""
    async with contextlib.AsyncExitStack() as stack:
        if settings.url:
            address = address_of(settings.url)
        else:
            _note("starting a cluster")
            address = (await stack.enter_async_context(running_cluster(settings.up))).http
        return (await measure(settings, address, [settings.seed]))[0]


async def measure(settings: StreamsSettings, address: HostPort, seeds: Sequence[int]) -> list[dict[str, Any]]:
    """Check once, then measure with each seed, in place of the settings'; for each the content of a JSON line."""
    async with Connection(address) as connection:
        model = (await connection.ask("/v1/models"))["data"][0]["id"]
    _note("checking answers")
    load = await _load(settings, address, seeds[0])
    checked = await check_concurrency(load, settings.concurrency, settings.tie_tolerance)
    checked |= await check_recall(load, model, settings.concurrency)
    facts = {
        "benchmark": "serve",
        "model": model,
        "up": None if settings.url else settings.up,
        "concurrency": None if settings.request_rate else settings.concurrency,
        "request_rate": settings.request_rate,
        "num_prompts": settings.num_prompts,
        "input_len": settings.input_len,
        "output_len": settings.output_len,
        **checked,
    }
    return [{**facts, "seed": seed, **await _measure(settings, address, seed)} for seed in seeds]


async def _load(settings: StreamsSettings, address: HostPort, seed: int) -> Load:
    async with Connection(address) as connection:
        prompts = await Prompts.of(connection, seed)
    return Load(address, prompts, settings.input_len, settings.output_len)


async def _measure(settings: StreamsSettings, address: HostPort, seed: int) -> dict[str, Any]:
    async with Connection(address) as connection:
        ping_s = [await _ping(connection) for _ in range(NUM_PINGS)]
    load = await _load(settings, address, seed)
    alone = [await load.one() for _ in range(NUM_ALONE)]
    how = f"{settings.request_rate:g} a second" if settings.request_rate else f"{settings.concurrency} at once"
    _note(f"{settings.num_prompts} requests, {how}, seed {seed}")
    began = time.perf_counter()
    if settings.request_rate:
        answers = await load.arriving(settings.num_prompts, settings.request_rate, seed)
    else:
        answers = await load.many(settings.num_prompts, settings.concurrency)
    seconds = time.perf_counter() - began
    return {**_report(answers, alone, ping_s, seconds), **_kept(answers, settings.goodput)}


def _kept(answers: Sequence[Streamed], goodput: str) -> dict[str, Any]:
    """Print the share of requests within all limits; returns it for the JSON line."""
    limits = limits_of(goodput)
    if not limits:
        return {}
    kept = sum(all(_LIMITED[name](answer) <= limit for name, limit in limits.items()) for answer in answers)
    print(f"{kept / len(answers):.1%} of the requests keep {goodput}")
    return {"goodput": goodput, "attainment": round(kept / len(answers), 4)}


async def _ping(connection: Connection) -> float:
    began = time.perf_counter()
    await connection.ask("/health")
    return time.perf_counter() - began


def _report(
    answers: Sequence[Streamed], alone: Sequence[Streamed], ping_s: Sequence[float], seconds: float
) -> dict[str, Any]:
    """Print the table; returns its content for the JSON line."""
    rows = {name: summary([s * 1e3 for s in values]) for name, values in _latencies(answers).items()}
    lone = {f"{name}, alone, of {len(alone)}": values for name, values in _latencies(alone).items()}
    bounds = {name: summary([s * 1e3 for s in values]) for name, values in lone.items()}
    bounds["HTTP round trip"] = summary([s * 1e3 for s in ping_s])
    tokens = sum(len(answer.tokens) for answer in answers)
    late_ms = max(answer.late_s for answer in answers) * 1e3
    rates = {"output tokens/s": tokens / seconds, "requests/s": len(answers) / seconds}
    print(table({**rows, **bounds}, "milliseconds"))
    print(
        f"{tokens} tokens in {seconds:.1f} s: {tokens / seconds:.1f} tokens/s, "
        f"{len(answers) / seconds:.2f} requests/s, sent at most {late_ms:.1f} ms late"
    )
    return {
        "duration_s": round(seconds, 3),
        **{name.replace(" ", "_").replace("/", "_per_"): round(rate, 2) for name, rate in rates.items()},
        "sent_late_ms": round(late_ms, 3),
        **_flat(_latencies(answers), ""),
        **_flat(_latencies(alone), "alone_"),
        "http_round_trip_ms_p50": round(percentile(ping_s, 50) * 1e3, 3),
    }


def _latencies(answers: Sequence[Streamed]) -> dict[str, list[float]]:
    """Seconds: to the first token, between tokens, per token after the first, to the last; each request's longest gap
    between two tokens; from the first token to the second; and the handoff with its parts, as timed by the nodes."""
    return {
        "TTFT": [answer.first_token_s for answer in answers],
        "ITL": [gap for answer in answers for gap in answer.between_tokens_s],
        "TPOT": [answer.per_token_s for answer in answers if len(answer.tokens) > 1],
        "E2E": [answer.total_s for answer in answers],
        "longest gap": [answer.longest_gap_s for answer in answers if len(answer.tokens) > 1],
        "first gap": [answer.first_gap_s for answer in answers if len(answer.tokens) > 1],
        **{name.replace("_", " "): [answer.phase_s(name) for answer in answers] for name in HANDOFF},
    }


def _flat(latencies: dict[str, list[float]], prefix: str) -> dict[str, float]:
    """Entries such as `ttft_ms_p50`."""
    return {
        f"{prefix}{name.lower().replace(' ', '_')}_ms_{statistic}": round(value * 1e3, 3)
        for name, values in latencies.items()
        if values
        for statistic, value in summary(values).items()
    }


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    """Exits with 1 if an answer is wrong, before anything is measured, and if a request fails."""
    settings = parse(StreamsSettings, argv)
    try:
        line = asyncio.run(run(settings))
    except* (WrongAnswers, RequestFailed, OSError) as errors:
        sys.exit(f"{settings.prog}: {errors.exceptions[0]}")
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
