"""The cost of pushing KV to a decode node for its streams: `python -m benchmarks.kv_transfer.interference --url
http://HOST:PORT`

Alternates between windows in which streams decode undisturbed and windows in which long prompts are prefilled without a
pause, with their KV going to the same decode node; a separate process requests those. Answers are checked first, unless
an own cluster's nodes are simulated: their loop and engine are real, and cost what they cost, but their answers are
made up. The client compares the times between tokens in both kinds of windows, so both are of the same requests and the
same minutes. The prompts go through another router, if there is one, since the nodes are what is measured.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import multiprocessing
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection as Pipe
from typing import Any, ClassVar

from pydantic import Field

from baton.address import HostPort
from baton.settings import Settings, parse
from benchmarks.harness.checks import WrongAnswers, check_concurrency, check_recall
from benchmarks.harness.cluster import makes_answers_up, running_cluster
from benchmarks.harness.http_stream import Connection, RequestFailed, Streamed
from benchmarks.harness.load import Load, Prompts, address_of
from deploy.bench.stats import summary, table

GOAL = 1.1
"""The p99 of the time between tokens while prompts are pushed, relative to undisturbed windows."""
LEAD_IN_S = 0.5
"""Delay before a window begins: a pushed prompt's first KV is sent only once its first chunk is computed."""
STOP_S = 60.0


class InterferenceSettings(Settings):
    """Compares the time between tokens with and without long prompts being handed over to the same decode node."""

    prog: ClassVar[str] = "benchmarks.kv_transfer.interference"

    url: str | None = Field(None, description="where the router answers, as http://HOST:PORT; unset: an own cluster")
    push_url: str | None = Field(
        None,
        description="another router of the same nodes for the long prompts, as a busy cluster has; unset: --url, and "
        "of an own cluster a second router",
    )
    up: str = Field("--device=auto", description="flags of the own cluster, as for baton-up")
    streams: int = Field(8, ge=1, description="streams that are watched")
    input_len: int = Field(512, ge=1, description="tokens of their prompts")
    output_len: int = Field(2500, ge=16, description="tokens of their answers, which end the run")
    push_len: int = Field(32000, ge=1, description="tokens of the prompts that are pushed")
    pushers: int = Field(2, ge=1, description="how many of those are asked for at a time")
    window: float = Field(3.0, gt=0, description="seconds of peace, and of pushing, in turn")
    tie_tolerance: float = Field(1e-4, ge=0, description="as for benchmarks.serving.streams")
    seed: int = Field(0, description="of the prompts")


@dataclass(frozen=True, slots=True)
class Window:
    """Times are of `time.perf_counter`."""

    began: float
    ended: float
    pushing: bool


def gaps_within(answers: Sequence[Streamed], windows: Sequence[Window], pushing: bool) -> list[float]:
    """Seconds between two tokens that both arrived within one window of that kind."""
    chosen = [window for window in windows if window.pushing is pushing]
    return [
        b - a
        for answer in answers
        for a, b in zip(answer.arrivals, answer.arrivals[1:], strict=False)
        if any(window.began <= a and b <= window.ended for window in chosen)
    ]


class Pusher:
    """A process that requests long prompts between `start` and `stop`."""

    def __init__(self, address: HostPort, settings: InterferenceSettings) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_push, args=(theirs, address, settings), daemon=True)
        self._process.start()
        theirs.close()

    def start(self) -> None:
        self._pipe.send(True)

    async def stop(self) -> tuple[int, float]:
        """Wait for the last prompt; returns the number of prompts and the seconds they took. Raises RequestFailed."""
        self._pipe.send(False)
        if not await asyncio.to_thread(self._pipe.poll, STOP_S):
            raise RequestFailed(f"the pushed prompts do not end within {STOP_S:g} s")
        result = self._pipe.recv()
        if isinstance(result, str):
            raise RequestFailed(result)
        return int(result[0]), float(result[1])

    def close(self) -> None:
        self._process.kill()
        self._process.join()
        self._pipe.close()


def _push(pipe: Pipe, address: HostPort, settings: InterferenceSettings) -> None:
    with contextlib.suppress(EOFError):
        while pipe.recv():
            try:
                outcome: tuple[int, float] | str = asyncio.run(_push_until_stopped(pipe, address, settings))
            except (OSError, RequestFailed) as error:
                outcome = f"a pushed prompt failed: {error}"
            pipe.recv()
            pipe.send(outcome)


async def _push_until_stopped(pipe: Pipe, address: HostPort, settings: InterferenceSettings) -> tuple[int, float]:
    async with Connection(address) as connection:
        prompts = await Prompts.of(connection, settings.seed + 1)
    load = Load(address, prompts, settings.push_len, 2)
    count, began = 0, time.perf_counter()

    async def push() -> None:
        nonlocal count
        await load.one()
        count += 1
        while not pipe.poll():
            await load.one()
            count += 1

    async with asyncio.TaskGroup() as tasks:
        for _ in range(settings.pushers):
            tasks.create_task(push())
    return count, time.perf_counter() - began


async def run(settings: InterferenceSettings) -> dict[str, Any]:
    """Check, measure, print the table; returns the content of the JSON line."""
    async with contextlib.AsyncExitStack() as stack:
        if settings.url:
            address = address_of(settings.url)
            push_address = address_of(settings.push_url) if settings.push_url else address
        else:
            cluster = await stack.enter_async_context(running_cluster(settings.up, ""))
            address, push_address = cluster.http, cluster.more_http[0]
        async with Connection(address) as connection:
            model = (await connection.ask("/v1/models"))["data"][0]["id"]
            prompts = await Prompts.of(connection, settings.seed)
        load = Load(address, prompts, settings.input_len, settings.output_len)
        short = Load(address, prompts, settings.input_len, 16)
        checked: dict[str, Any] = {}
        if settings.url or not makes_answers_up(settings.up):
            checked = await check_concurrency(short, settings.streams, settings.tie_tolerance)
            checked |= await check_recall(short, model, settings.streams)
        pusher = Pusher(push_address, settings)
        stack.callback(pusher.close)
        pusher.start()
        await pusher.stop()  # warm-up: the first long prompt may take longer
        watched = asyncio.create_task(load.many(settings.streams, settings.streams))
        windows, num_pushed, push_s = await _windows(settings, pusher, watched)
        answers = await watched
    rows = {
        name: summary([s * 1e3 for s in gaps_within(answers, windows, pushing)])
        for name, pushing in (("ITL in peace", False), ("ITL while pushing", True))
    }
    print(table(rows, "milliseconds"))
    peace, pushing = (row["p99"] for row in rows.values())
    rate = num_pushed * settings.push_len / push_s if push_s else 0.0
    print(f"{num_pushed} prompts of {settings.push_len} tokens pushed, {rate:.0f} tokens/s, while they were")
    print(f"p99 is {pushing / peace:.3f} x that in peace (goal {GOAL})")
    return {
        "benchmark": "interference",
        "model": model,
        "streams": settings.streams,
        "push_len": settings.push_len,
        "num_pushed": num_pushed,
        "pushed_tokens_per_s": round(rate, 1),
        **checked,
        **{f"{name.replace(' ', '_').lower()}_ms": row for name, row in rows.items()},
        "p99_ratio": round(pushing / peace, 4),
        "goal": GOAL,
    }


async def _windows(
    settings: InterferenceSettings, pusher: Pusher, watched: asyncio.Task[list[Streamed]]
) -> tuple[list[Window], int, float]:
    """Alternate windows without and with pushing until the streams end; returns them, the number of pushed prompts and
    the seconds they took."""
    windows, num_pushed, push_s = list[Window](), 0, 0.0
    await asyncio.wait([watched], timeout=LEAD_IN_S)  # by then all streams are decoding
    while not watched.done():
        pushing = bool(windows) and not windows[-1].pushing
        if pushing:
            pusher.start()
            await asyncio.wait([watched], timeout=LEAD_IN_S)
        began = time.perf_counter()
        await asyncio.wait([watched], timeout=settings.window)
        windows.append(Window(began, time.perf_counter(), pushing))
        if pushing:
            count, took_s = await pusher.stop()
            num_pushed, push_s = num_pushed + count, push_s + took_s
    return windows, num_pushed, push_s


def main(argv: Sequence[str] | None = None) -> None:
    settings = parse(InterferenceSettings, argv)
    try:
        result = asyncio.run(run(settings))
    except* (WrongAnswers, RequestFailed, OSError) as errors:
        sys.exit(f"{settings.prog}: {errors.exceptions[0]}")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
