"""All that may watch a cluster, in one process: `benchmarks.serving.observability` starts it.

    router        --OTLP/HTTP-->  an OpenTelemetry collector that only counts
    nodes         --ZMQ-------->  a subscriber of KV events
    router, nodes <--/metrics---  what Prometheus asks for, each second
    router        <--/debug/----  what an open console asks for, each second

It has the lowest priority: those whom it stands for run on other machines. Lines of JSON go in and out: first its
addresses out, then {"watch": "HOST:PORT" or null} in, the router to ask each second, and what has arrived so far out.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Mapping

import zmq
import zmq.asyncio
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from baton.address import HostPort
from benchmarks.harness.http_stream import LIMIT_BYTES, Connection

PERIOD_S = 1.0
NICENESS = 19
_MAX_LINE_BYTES = 2**20
_DONE = b"HTTP/1.1 200 OK\r\ncontent-type: application/x-protobuf\r\ncontent-length: 0\r\n\r\n"
_CONSOLE = ("/debug/console", "/debug/requests?limit=50")


class Observers:
    """The process, as the benchmark sees it. `collector`: a URL; `subscriber`: where nodes connect to."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.collector = self.subscriber = ""

    async def watch(self, router: HostPort | None) -> Counter[str]:
        """Ask this router and its nodes each second from now on; None: nobody. Returns what has arrived: spans, traces,
        events (of KV) and rounds
        of all pages. Raises RuntimeError if the process is gone."""
        assert self._process.stdin
        self._process.stdin.write(json.dumps({"watch": router and str(router)}).encode() + b"\n")
        return Counter(await self.read())

    async def read(self) -> dict[str, int]:
        assert self._process.stdout
        line = await self._process.stdout.readline()
        if not line:
            raise RuntimeError("the observers are gone")
        found: dict[str, int] = json.loads(line)
        return found


@contextlib.asynccontextmanager
async def running_observers() -> AsyncIterator[Observers]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "benchmarks.serving.observers"), stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        observers, ports = Observers(process), {}
        ports = await observers.read()
        observers.collector = f"http://127.0.0.1:{ports['collector']}/v1/traces"
        observers.subscriber = f"tcp://127.0.0.1:{ports['subscriber']}"
        yield observers
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


class _Watcher:
    """What the process does."""

    def __init__(self) -> None:
        self.arrived: Counter[str] = Counter()
        self._bodies: list[bytes] = []
        self._task: asyncio.Task[None] | None = None

    async def collect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection of an exporter. Bodies are counted later: a collector elsewhere takes no time here."""
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                length = int(head.split(b"content-length:")[1].split(b"\r\n")[0])
                self._bodies.append(await reader.readexactly(length))
                writer.write(_DONE)
        writer.close()

    async def subscribe(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            await socket.recv_multipart()
            self.arrived["events"] += 1

    def count(self) -> Counter[str]:
        traces: set[bytes] = set()
        for body in self._bodies:
            request = ExportTraceServiceRequest.FromString(gzip.decompress(body) if body[:2] == b"\x1f\x8b" else body)
            for resource in request.resource_spans:
                for scope in resource.scope_spans:
                    self.arrived["spans"] += len(scope.spans)
                    traces.update(span.trace_id for span in scope.spans if span.name == "llm_request")
        self._bodies.clear()
        self.arrived["traces"] += len(traces)
        return self.arrived

    async def watch(self, order: Mapping[str, str | None]) -> None:
        """Raises what went wrong with the pages of the previous router."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
            self._task = None
        if (router := order["watch"]) is not None:
            self._task = asyncio.create_task(self._ask(HostPort.parse(router)))

    async def _ask(self, router: HostPort) -> None:
        async with Connection(router) as front:
            nodes = [HostPort.parse(node["metrics_address"]) for node in (await front.ask("/debug/nodes"))["nodes"]]
            while True:
                for path in ("/metrics", *_CONSOLE):
                    await front.page(path)
                for node in nodes:
                    async with Connection(node) as connection:  # a node closes it after one page
                        await connection.page("/metrics")
                self.arrived["rounds"] += 1
                await asyncio.sleep(PERIOD_S)


async def serve() -> None:
    os.nice(NICENESS)
    watcher = _Watcher()
    collector = await asyncio.start_server(watcher.collect, "127.0.0.1", 0, limit=LIMIT_BYTES)
    socket = zmq.asyncio.Context().socket(zmq.SUB)
    socket.subscribe(b"kv@")
    ports = {"collector": collector.sockets[0].getsockname()[1], "subscriber": socket.bind_to_random_port("tcp://*")}
    events = asyncio.create_task(watcher.subscribe(socket))
    print(json.dumps(ports), flush=True)
    reader = asyncio.StreamReader(_MAX_LINE_BYTES)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        await watcher.watch(json.loads(line))
        print(json.dumps(watcher.count()), flush=True)
    events.cancel()


if __name__ == "__main__":
    asyncio.run(serve())
