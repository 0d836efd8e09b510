"""What a router costs per streamed token, per request and per open stream: `python -m benchmarks.router.streams`.

A router process stands between scripted nodes (`benchmarks.router.scripted_nodes`) and raw clients
(`benchmarks.router.stream_clients`). CPU is the router's own, from the kernel's books. One round:

    burst       all streams are opened at once; the nodes give each its first token and no more yet
    tokens      the nodes give a token to every stream each interval, to the end of all
    requests    while as many streams are open and silent, others ask for two tokens each, one after another

All answers are checked. `--memory 100000` shows instead what open streams take, and whether memory stays flat over so
many requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import ClassVar

import uvloop
from pydantic import Field

from baton.address import HostPort
from baton.process.open_files import raise_open_files
from baton.settings import Settings, parse
from benchmarks.harness.cluster import LOCAL
from benchmarks.harness.tables import Table
from benchmarks.router.scripted_nodes import CHECKPOINT, answer_tokens
from benchmarks.router.stream_clients import Answer, Client, chat_request
from deploy.bench.stats import percentile
from deploy.ports import HeldPort
from deploy.ready import wait_until_serving
from router.text.tokenizer import Tokenizer

PROMPT = "Please tell me everything that you know about routers, and do not leave anything out. " * 6
WARM_UP_REQUESTS = 100
NUM_CONNECTIONS = 32
SHORT = 2
"""Tokens of the answer to a request that is measured as such: one of each node."""
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_START_S = 60.0


class StreamsSettings(Settings):
    """Measures the CPU time that a router takes per token and per request, with nodes that have no model."""

    prog: ClassVar[str] = "benchmarks.router.streams"

    num_streams: int = Field(1000, ge=1, description="streams open at once")
    interval_ms: float = Field(100.0, ge=0, description="time between two tokens of a stream; 0: as fast as they go")
    output_len: int = Field(128, ge=3, description="tokens of each streamed answer")
    num_requests: int = Field(3000, ge=0, description="short requests while the streams are open")
    memory: int = Field(0, ge=0, description="instead: the memory after each tenth of so many short requests")
    num_rounds: int = Field(3, ge=1, description="rounds, of which the medians count")
    router: str = Field("", description="further flags of the router")


class RouterProcess:
    """The process that is measured, with its children."""

    def __init__(self, nodes: Sequence[str], flags: Sequence[str], http: HostPort, grpc: HostPort) -> None:
        command = [sys.executable, "-m", "router.main", *nodes, f"--http={http}", f"--grpc={grpc}"]
        self.address = http
        with tempfile.TemporaryFile() as log:
            self._process = subprocess.Popen([*command, "--max-connections=4096", *flags], stderr=log)

    def cpu_s(self) -> float:
        return sum(_cpu_s(pid) for pid in self._pids())

    def rss_bytes(self) -> int:
        return sum(_rss_bytes(pid) for pid in self._pids())

    def stop(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(_START_S)
        except subprocess.TimeoutExpired:
            self._process.kill()

    def _pids(self) -> list[int]:
        own = self._process.pid
        children = Path(f"/proc/{own}/task/{own}/children").read_text().split()
        return [own, *map(int, children)]


def _cpu_s(pid: int) -> float:
    after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(after_name[11]) + int(after_name[12])) / _TICKS_PER_S


def _rss_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class Round:
    """The figures of one round, and their names in the report."""

    cpu_per_token_us: float
    cpu_per_request_ms: float
    cpu_per_opening_ms: float
    tokens_per_s: float
    tokens_per_chunk: float
    first_token_p50_ms: float
    first_token_p99_ms: float


@dataclass(frozen=True, slots=True)
class Memory:
    """MB of a router: at first; with all streams open, for the first and the second time and after the requests; and
    after each tenth of the requests."""

    start: float
    streams: list[float]
    grown: list[float]


class Measurement:
    def __init__(self, settings: StreamsSettings, router: RouterProcess) -> None:
        self._settings = settings
        self._router = router
        tokenizer = Tokenizer((CHECKPOINT / "tokenizer.json").read_bytes())
        self._expected = {
            count: tokenizer.decode(answer_tokens(tokenizer, count)) for count in (SHORT, settings.output_len)
        }

    async def warm_up(self) -> None:
        await self.short_requests(WARM_UP_REQUESTS)
        clients = await self._open(min(200, self._settings.num_streams), 5.0)
        await self._finish(clients)

    async def round(self) -> Round:
        wanted, router = self._settings, self._router
        start_cpu = router.cpu_s()
        clients = await self._open(wanted.num_streams, wanted.interval_ms)
        open_cpu, began = router.cpu_s(), time.perf_counter()
        answers = await self._finish(clients)
        streamed_cpu, took_s = router.cpu_s(), time.perf_counter() - began - 1.0
        num_tokens = wanted.num_streams * (wanted.output_len - 1)
        first_tokens_ms = [answer.first_token_s * 1e3 for answer in answers]
        return Round(
            cpu_per_token_us=(streamed_cpu - open_cpu) / num_tokens * 1e6,
            cpu_per_request_ms=await self._per_request_ms(),
            cpu_per_opening_ms=(open_cpu - start_cpu) / wanted.num_streams * 1e3,
            tokens_per_s=num_tokens / took_s,
            tokens_per_chunk=num_tokens / sum(answer.num_chunks - 1 for answer in answers),
            first_token_p50_ms=percentile(first_tokens_ms, 50),
            first_token_p99_ms=percentile(first_tokens_ms, 99),
        )

    async def _per_request_ms(self) -> float:
        wanted = self._settings
        if not wanted.num_requests:
            return 0.0
        held = await self._open(wanted.num_streams, 10.0, start=wanted.num_streams + 1)
        before = self._router.cpu_s()
        await self.short_requests(wanted.num_requests)
        took_s = self._router.cpu_s() - before
        for client in held:
            client.close()
        await asyncio.sleep(1.0)  # until the router has noticed: not measured
        return took_s / wanted.num_requests * 1e3

    async def _open(self, count: int, interval_ms: float, start: int | None = None) -> list[Client]:
        """Connect and ask, all at once; returns when each has its first token."""
        salt = f"interval_ms={interval_ms:g} start={start or count}"
        request = chat_request(PROMPT, self._settings.output_len, salt)
        clients = await asyncio.gather(*(Client.connect(self._router.address) for _ in range(count)))
        for client in clients:
            client.send(request)
        await asyncio.gather(*(client.begun for client in clients))
        return clients

    async def _finish(self, clients: Sequence[Client]) -> list[Answer]:
        answers = [await client.answer() for client in clients]
        for client, answer in zip(clients, answers, strict=True):
            client.close()
            answer.check(self._expected[self._settings.output_len])
        return answers

    async def short_requests(self, count: int) -> None:
        """So many short requests, one after another on each of some connections."""
        request = chat_request(PROMPT, SHORT, None)
        numbers = iter(range(count))

        async def one_by_one() -> None:
            client = await Client.connect(self._router.address)
            for _ in numbers:
                client.send(request)
                (await client.answer()).check(self._expected[SHORT])
            client.close()

        await asyncio.gather(*(one_by_one() for _ in range(NUM_CONNECTIONS)))

    async def memory(self, count: int, steps: int = 10) -> Memory:
        """While the streams are open, and after each tenth of so many requests."""
        start = self._router.rss_bytes()
        streams = [await self._with_streams_open() for _ in range(2)]
        grown = [self._router.rss_bytes() / 1e6]
        for _ in range(steps):
            await self.short_requests(count // steps)
            grown.append(self._router.rss_bytes() / 1e6)
        streams.append(await self._with_streams_open())
        return Memory(start / 1e6, [rss / 1e6 for rss in streams], grown)

    async def _with_streams_open(self) -> int:
        """The router's bytes while all streams are open and silent; they are given up then."""
        wanted = self._settings.num_streams
        held = await self._open(wanted, 10.0, start=wanted + 1)
        rss = self._router.rss_bytes()
        for client in held:
            client.close()
        await asyncio.sleep(1.0)  # until the router has noticed: not measured
        return rss


def _start_nodes() -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "benchmarks.router.scripted_nodes"], stdout=subprocess.PIPE, text=True
    )


@contextlib.asynccontextmanager
async def running(flags: Sequence[str]) -> AsyncIterator[RouterProcess]:
    """A router that is ready, and its nodes."""
    nodes = _start_nodes()
    try:
        assert nodes.stdout is not None
        addresses = [f"--{nodes.stdout.readline().strip()}" for _ in range(2)]
        with HeldPort(LOCAL) as http, HeldPort(LOCAL) as grpc:
            router = RouterProcess(addresses, flags, http.address, grpc.address)
            try:
                async with asyncio.timeout(_START_S):
                    await wait_until_serving(grpc.address)
                yield router
            finally:
                router.stop()
    finally:
        nodes.kill()
        nodes.wait()


async def run(settings: StreamsSettings) -> None:
    async with running(settings.router.split()) as router:
        measurement = Measurement(settings, router)
        if settings.memory:
            await measurement.short_requests(WARM_UP_REQUESTS)
            report_memory(settings, await measurement.memory(settings.memory))
        else:
            await measurement.warm_up()
            report(settings, [await measurement.round() for _ in range(settings.num_rounds)])


def report(settings: StreamsSettings, rounds: Sequence[Round]) -> None:
    names = [field.name for field in fields(Round)]
    medians = {name: statistics.median(getattr(r, name) for r in rounds) for name in names}
    every = [[name, f"{medians[name]:.2f}", *(f"{getattr(r, name):.2f}" for r in rounds)] for name in names]
    print(Table(["", "median", *(f"round {i}" for i in range(1, len(rounds) + 1))], every).plain())
    shape = {name: getattr(settings, name) for name in ("num_streams", "interval_ms", "output_len", "router")}
    figures = {name: round(value, 3) for name, value in medians.items()}
    print(json.dumps({"benchmark": "router_streams", **shape, **figures}), flush=True)


def report_memory(settings: StreamsSettings, memory: Memory) -> None:
    step = settings.memory // (len(memory.grown) - 1)
    rows = [["at first", f"{memory.start:.1f}"]]
    for when, megabytes in zip(("the first time", "again", "after the requests"), memory.streams, strict=True):
        rows.append([f"{settings.num_streams} streams open, {when}", f"{megabytes:.1f}"])
    rows += [[f"{i * step} requests", f"{megabytes:.1f}"] for i, megabytes in enumerate(memory.grown)]
    kb_per_stream = (memory.streams[0] - memory.start) * 1e3 / settings.num_streams
    rows.append(["an open stream, kB", f"{kb_per_stream:.1f}"])
    print(Table(["", "RSS, MB"], rows).plain())
    figures = {
        "num_requests": settings.memory,
        "num_streams": settings.num_streams,
        "rss_mb": [round(megabytes, 1) for megabytes in memory.grown],
        "streams_mb": [round(megabytes, 1) for megabytes in memory.streams],
        "kb_per_stream": round(kb_per_stream, 1),
    }
    print(json.dumps({"benchmark": "router_streams_memory", **figures}), flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    settings = parse(StreamsSettings, argv)
    raise_open_files()
    uvloop.run(run(settings))


if __name__ == "__main__":
    main()
