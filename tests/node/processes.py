"""Real nodes as processes, and a router by hand."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import grpc

from baton import wire
from baton.messages import Adopted, AttemptId, DecodeTarget, End, HandedOff, Prefill, Sample, Subscribe, Tokens, Update
from baton.node_info import NodeInfo
from baton.rpc.channels import CHANNEL_OPTIONS
from baton.sampling import SamplingParams
from baton.v1 import node_pb2, node_pb2_grpc
from tests import hangups
from tests.fork_server import ROOT, ForkedProcess, fork_server

WAIT_S = 90.0


Begin = Callable[[str, Sequence[str], int], "subprocess.Popen[bytes] | ForkedProcess"]
"""From a module, its arguments and a descriptor for its stderr."""


def _command(module: str, argv: Sequence[str], errors: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-m", module, *argv], stderr=errors)


def _forked(module: str, argv: Sequence[str], errors: int) -> ForkedProcess:
    with Path(os.devnull).open("wb") as nothing:
        return fork_server().start(module, argv, env=os.environ, cwd=ROOT, stdout=nothing, stderr=errors)


@dataclass
class Process:
    """One node's process. `errors`: what it writes to stderr. `lines` are those it logged."""

    popen: subprocess.Popen[bytes] | ForkedProcess
    errors: IO[str]
    lines: list[str] = field(default_factory=list)
    address: str = ""
    metrics: str = ""
    _ready: threading.Event = field(default_factory=threading.Event)
    _reader: threading.Thread = field(init=False)

    @classmethod
    def start(cls, module: str, checkpoint: Path, *flags: str) -> Process:
        """Start it; `wait_ready` tells when it serves."""
        with hangups.heard():
            return cls._start(module, checkpoint, flags, _command)

    @classmethod
    def fork(cls, module: str, checkpoint: Path, *flags: str) -> Process:
        """`start` it from a process that has imported torch."""
        return cls._start(module, checkpoint, flags, _forked)

    @classmethod
    def _start(cls, module: str, checkpoint: Path, flags: Sequence[str], begin: Begin) -> Process:
        argv = ["--model", str(checkpoint), "--listen", "127.0.0.1:0"]
        argv += ["--device", "cpu", "--cpu-threads", "1", "--metrics-port", "0", *flags]
        reading, writing = os.pipe()
        try:
            process = cls(begin(f"{module}.main", argv, writing), os.fdopen(reading))
        finally:
            os.close(writing)
        process._reader = threading.Thread(target=process._read)
        process._reader.start()
        return process

    def wait_ready(self) -> None:
        assert self._ready.wait(WAIT_S), "".join(self.lines)
        assert self.address, "".join(self.lines)

    def page(self, path: str) -> str:
        """A page of its metrics server. Raises HTTPError for what is not well."""
        with urllib.request.urlopen(f"{self.metrics}{path}", timeout=WAIT_S) as answer:
            return str(answer.read().decode())

    def metric(self, name: str) -> float:
        """The sum over all labels."""
        values = re.findall(rf"^{re.escape(name)}{{.*}} (\S+)$", self.page("/metrics"), re.MULTILINE)
        assert values, name
        return sum(map(float, values))

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Signal it, and wait for its end; the exit code."""
        if self.popen.poll() is None:
            self.popen.send_signal(number)
        try:
            return self.popen.wait(WAIT_S)
        finally:
            self.popen.kill()
            self._reader.join(WAIT_S)
            self.errors.close()

    def _read(self) -> None:
        for line in self.errors:
            self.lines.append(line)
            if found := re.search(r" ready address=(\S+) metrics=(\S+)/metrics", line):
                self.address, self.metrics = found.groups()
                self._ready.set()
        self._ready.set()


class Session:
    """A router's session with one node; all it says goes into `updates`."""

    def __init__(self, address: str, stub: type, epoch: int, updates: asyncio.Queue[Update]) -> None:
        self._address, self._stub, self._epoch, self._updates = address, stub, epoch, updates
        self.info: NodeInfo

    async def __aenter__(self) -> Session:
        self._channel = grpc.aio.insecure_channel(self._address, options=CHANNEL_OPTIONS)
        status = node_pb2_grpc.NodeStatusStub(self._channel)
        self.info = wire.read_node_info(await status.Describe(node_pb2.DescribeRequest(), timeout=WAIT_S))
        self._call = self._stub(self._channel).Session()
        await self.send(Subscribe(self._epoch, self.info.incarnation))
        await self._call.read()
        self._task = asyncio.create_task(self._read())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        self._call.cancel()
        await self._channel.close(None)

    async def send(self, message: wire.RouterToNode) -> None:
        await self._call.write(wire.write_router_message(message))

    async def _read(self) -> None:
        while True:
            message = wire.read_node_message(await self._call.read())
            if isinstance(message, tuple):
                for update in message:
                    self._updates.put_nowait(update)


class Router:
    """Both nodes, and the way of one request at a time."""

    def __init__(self, prefill: str, decode: str, epoch: int = 1) -> None:
        self.updates: asyncio.Queue[Update] = asyncio.Queue()
        self.prefill = Session(prefill, node_pb2_grpc.PrefillNodeStub, epoch, self.updates)
        self.decode = Session(decode, node_pb2_grpc.DecodeNodeStub, epoch, self.updates)
        self._epoch = epoch

    async def __aenter__(self) -> Router:
        await self.prefill.__aenter__()
        await self.decode.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.decode.__aexit__()
        await self.prefill.__aexit__()

    async def run(
        self, request_id: str, prompt: list[int], sampling: SamplingParams, *, alone: bool = False
    ) -> tuple[list[int], list[Update]]:
        """Tokens of sample 0 and all updates, of a handed-off request, or of one that the decode node does alone."""
        attempt_id, decode = AttemptId(self._epoch, request_id, 0), self.decode.info
        target = None if alone else DecodeTarget(decode.address, decode.incarnation)
        node = self.decode if alone else self.prefill
        incarnation = node.info.incarnation
        await node.send(Prefill(attempt_id, incarnation, tuple(prompt), (Sample(0),), sampling, 30.0, target))
        tokens: list[int] = []
        seen: list[Update] = []
        ends = 0
        async with asyncio.timeout(WAIT_S):
            while ends < (1 if alone else 2):
                update = await self.updates.get()
                seen.append(update)
                if isinstance(update.kind, Tokens) and update.kind.sample == 0:
                    tokens += update.kind.token_ids
                ends += isinstance(update.kind, End | HandedOff)
                if isinstance(update.kind, End) and update.kind.error:
                    raise update.kind.error
        assert alone or any(isinstance(u.kind, Adopted) for u in seen)
        return tokens, seen
