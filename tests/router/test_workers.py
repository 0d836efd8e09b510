"""`--workers 2` with real processes: they share both ports, a dead one comes back, and the pages speak for all."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from baton.address import HostPort
from baton.node_info import NodeRole
from router import supervisor
from router.startup import StartError
from router.workers.ports import SharedPort
from tests.router.conftest import says
from tests.router.fake_node import FakeCluster

ROOT = Path(__file__).parents[2]
ENV = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'proto'}"}
PATIENCE_S = 60.0
COUNT = 2


class Workers:
    """A router's supervisor as a process, and what its lines say."""

    def __init__(self, nodes: FakeCluster) -> None:
        addresses = [f"--{role.value}={','.join(map(str, nodes.addresses(role)))}" for role in NodeRole]
        flags = [*addresses, "--http=127.0.0.1:0", "--grpc=127.0.0.1:0", f"--workers={COUNT}", "--drain-timeout=5"]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "router.main", *flags], env=ENV, stderr=subprocess.PIPE, text=True
        )

    async def line(self, *marks: str) -> str:
        """The next line with all marks."""
        assert self.process.stderr is not None
        async with asyncio.timeout(PATIENCE_S):
            while line := await asyncio.to_thread(self.process.stderr.readline):
                if all(mark in line for mark in marks):
                    return line
        raise AssertionError(f"it ended before it said {marks}")

    async def up(self) -> dict[int, int]:
        """The process ids of all workers, once each has both nodes."""
        pids, num_links = dict[int, int](), 0
        while len(pids) < COUNT or num_links < 2 * COUNT:
            line = await self.line(" up\n")
            if " pid=" in line:
                pids[int(_after(line, "worker="))] = int(_after(line, "pid="))
            num_links += " role=" in line
        return pids


def _after(line: str, mark: str) -> str:
    return line.partition(mark)[2].split()[0]


@asynccontextmanager
async def streaming(client: httpx.AsyncClient, **fields: Any) -> AsyncIterator[AsyncIterator[str]]:
    body = {"messages": [{"role": "user", "content": "hi"}], "stream": True, **fields}
    async with client.stream("POST", "/v1/chat/completions", json=body) as response:
        assert response.status_code == 200
        yield response.aiter_lines()


def text_of(lines: list[str]) -> str:
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    return "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])


async def test_a_killed_worker_comes_back_and_the_others_streams_go_on():
    hold = asyncio.Event()
    nodes = FakeCluster(says("hello world", hold=hold, hold_at=1))
    await nodes.add(NodeRole.PREFILL)
    await nodes.add(NodeRole.DECODE)
    workers = Workers(nodes)
    try:
        address = HostPort.parse(_after(await workers.line(f"workers={COUNT} "), "http="))
        pids = await workers.up()
        async with httpx.AsyncClient(base_url=f"http://{address}", timeout=PATIENCE_S) as client:
            async with streaming(client) as lines:
                seen = [await anext(lines)]
                at = (await client.get("/metrics")).text
                (busy,) = map(int, re.findall(r'num_requests{.*worker="(\d+)"} 1.0', at))
                other = next(worker for worker in pids if worker != busy)
                assert (await client.get("/load")).json() == {"server_load": 1}
                os.kill(pids[other], signal.SIGKILL)
                await workers.line(f"worker={other} ", "ended, and is started again")
                assert f'baton:worker_up{{role="router",worker="{other}"}} 0.0' in (await client.get("/metrics")).text
                again = int(_after(await workers.line(f"worker={other} ", " up"), "pid="))
                assert again not in pids.values()
                hold.set()
                seen += [line async for line in lines]
            assert text_of(seen) == "hello world"
            page = (await client.get("/metrics")).text
            for worker in pids:
                assert f'baton:worker_up{{role="router",worker="{worker}"}} 1.0' in page
        workers.process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(workers.process.wait, PATIENCE_S) == 0
    finally:
        workers.process.kill()
        workers.process.wait()
        workers.process.stderr.close()
        await nodes.close()


def test_a_port_that_others_share_is_not_taken_from_them():
    held = SharedPort(HostPort("127.0.0.1", 0))
    with pytest.raises(OSError, match="in use"):
        _listening_at(held.address)
    held.close()


def _listening_at(address: HostPort) -> None:
    with socket.create_server((address.host, address.port), reuse_port=True):
        SharedPort(address)


async def test_a_worker_that_hangs_is_killed_and_comes_back(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(supervisor, "HANG_S", 1.0)
    started: asyncio.Queue[supervisor.Worker] = asyncio.Queue()

    class Noted(supervisor.Worker):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            started.put_nowait(self)

    def command(index: int, up_fd: int, directory: str) -> list[str]:
        """Says that it is up until it is stopped."""
        return [sys.executable, "-c", f"import os, time\nwhile True: os.write({up_fd}, b'up'); time.sleep(0.1)"]

    monkeypatch.setattr(supervisor, "Worker", Noted)
    stop, hurry = asyncio.Event(), asyncio.Event()
    running = asyncio.create_task(supervisor.Supervisor(1, command, 0.1).run(stop, hurry))
    async with asyncio.timeout(PATIENCE_S):
        first = await started.get()
        assert await first.up()
        os.kill(first.pid, signal.SIGSTOP)
        second = await started.get()
        assert await second.up()
        assert first._process.returncode == -signal.SIGKILL
        stop.set()
        assert await running


async def test_a_worker_that_cannot_be_started_for_now_leaves_the_others_alone(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(supervisor, "FIRST_BACKOFF_S", 0.01)
    starts, comes_back = [0, 0], asyncio.Event()

    def command(index: int, up_fd: int, directory: str) -> list[str]:
        """Worker 0 ends at once, and has no room to start again at first."""
        starts[index] += 1
        if starts[0] == 2:
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        if starts[0] == 3:
            comes_back.set()
        return says_that_it_is_up(up_fd, 3600 * index)

    stop, hurry = asyncio.Event(), asyncio.Event()
    running = asyncio.create_task(supervisor.Supervisor(2, command, 0.1).run(stop, hurry))
    async with asyncio.timeout(PATIENCE_S):
        await asyncio.wait((running, asyncio.create_task(comes_back.wait())), return_when=asyncio.FIRST_COMPLETED)
        assert not running.done()
        stop.set()
        assert await running
    assert starts[1] == 1


@pytest.mark.parametrize(
    ("name", "says"), [("not-there", "no folder for their sockets: No such file"), ("x" * 90, "too long for a socket")]
)
async def test_sockets_that_can_have_no_folder_end_the_start_with_one_line(
    name: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    folder = tmp_path / name
    if "x" in name:
        folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    with pytest.raises(StartError, match=rf"^--workers: .*{says}"):
        await supervisor.Supervisor(2, lambda *_: [], 0.1).run(asyncio.Event(), asyncio.Event())
    assert not folder.exists() or not any(folder.iterdir())


async def test_a_stop_does_not_wait_for_a_worker_that_would_be_started_again_later(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(supervisor, "FIRST_BACKOFF_S", 2 * PATIENCE_S)
    stop, hurry, ended = asyncio.Event(), asyncio.Event(), asyncio.Event()

    class Noted(supervisor.Worker):
        async def ended(self) -> int:
            code = await super().ended()
            ended.set()
            return code

    monkeypatch.setattr(supervisor, "Worker", Noted)
    running = asyncio.create_task(
        supervisor.Supervisor(1, lambda index, up_fd, directory: says_that_it_is_up(up_fd, 0), 0.1).run(stop, hurry)
    )
    async with asyncio.timeout(PATIENCE_S):
        await ended.wait()
        stop.set()
        assert await running


def says_that_it_is_up(up_fd: int, lasts_s: float) -> list[str]:
    """What it runs, instead of a router."""
    return [sys.executable, "-c", f"import os, time; os.write({up_fd}, b'up'); time.sleep({lasts_s})"]


STARTS_A_WORKER = """
import subprocess, sys, time
arguments = [sys.executable, "-m", "router.worker", *sys.argv[1:]]
worker = subprocess.Popen(arguments, stdin=subprocess.PIPE, pass_fds=(int(sys.argv[2]),), start_new_session=True)
print(worker.pid, flush=True)
time.sleep(3600)
"""


def test_a_worker_keeps_saying_that_it_serves_and_ends_with_its_parent_even_if_it_is_stopped(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    http, grpc = (SharedPort(HostPort("127.0.0.1", 0)) for _ in range(2))
    addresses = str(http.address), str(grpc.address)
    flags = "--decode=127.0.0.1:9", "--workers=2", f"--http={addresses[0]}", f"--grpc={addresses[1]}"
    folder = tmp_path / "sockets"
    folder.mkdir()
    own = "0", str(writing), str(folder), *addresses
    parent = subprocess.Popen(
        [sys.executable, "-c", STARTS_A_WORKER, *own, *flags], env=ENV, stdout=subprocess.PIPE, pass_fds=(writing,)
    )
    os.close(writing)
    assert parent.stdout is not None
    worker = int(parent.stdout.readline())
    try:
        assert [os.read(reading, 3) for _ in range(3)] == [b"up\n"] * 3
        os.kill(worker, signal.SIGSTOP)
        parent.kill()
        parent.wait()
        while os.read(reading, 64):
            pass
        assert not folder.exists()
    finally:
        parent.kill()
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker, signal.SIGKILL)
        parent.stdout.close()
        os.close(reading)
        http.close()
        grpc.close()


def test_a_worker_that_can_have_no_socket_ends_with_one_line(tmp_path: Path) -> None:
    ports = [SharedPort(HostPort("127.0.0.1", 0)) for _ in range(2)]
    try:
        with Path(os.devnull).open("wb") as up:
            fd = up.fileno()
            own = "0", str(fd), str(tmp_path / "none"), *(str(port.address) for port in ports)
            command = [sys.executable, "-m", "router.worker", *own, "--decode=127.0.0.1:9", "--workers=2"]
            options: Any = {"capture_output": True, "text": True, "timeout": PATIENCE_S}
            ran = subprocess.run(command, env=ENV, input="", pass_fds=(fd,), check=False, **options)
    finally:
        for port in ports:
            port.close()
    assert ran.returncode == 1
    assert ran.stderr == "baton-router: --workers: no socket for what they tell each other: No such file or directory\n"
