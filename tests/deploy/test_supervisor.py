"""Children that print, die, resist and outstay their welcome, under the supervisor."""

from __future__ import annotations

import asyncio
import io
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from deploy.lines import NamedLines
from deploy.plan import Child
from deploy.supervisor import MAX_LINE_BYTES, Backoff, Supervisor
from tests.deploy.spawned import PATH, wait_for_end

WAIT_S = 30.0
QUICK = Backoff(first_s=0.01, last_s=0.04, healthy_s=3600.0)

FOREVER = "import signal; print('up', flush=True); signal.pause()"
STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + FOREVER


class Heard:
    """What the supervisor wrote, as it comes."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, str]] = []
        self.not_started: list[tuple[str, int]] = []
        self._news = asyncio.Event()

    def write(self, name: str, line: str) -> None:
        self.lines.append((name, line))
        self._news.set()

    def cannot_start(self, name: str, code: int) -> None:
        self.not_started.append((name, code))
        self._news.set()

    def of(self, name: str) -> list[str]:
        return [line for who, line in self.lines if who == name]

    async def until(self, name: str, text: str, times: int = 1) -> None:
        """Until `name` said `text` so many times."""
        async with asyncio.timeout(WAIT_S):
            while sum(text in line for line in self.of(name)) < times:
                self._news.clear()
                await self._news.wait()

    async def until_not_started(self) -> None:
        async with asyncio.timeout(WAIT_S):
            while not self.not_started:
                self._news.clear()
                await self._news.wait()


@asynccontextmanager
async def supervised(
    tmp_path: Path, backoff: Backoff = QUICK, proven: bool = True, **programs: str
) -> AsyncIterator[tuple[Supervisor, Heard]]:
    """A supervisor of one child for each program, given as Python text. What is left at the end is killed."""
    children = []
    for name, text in programs.items():
        (tmp_path / f"{name}_program.py").write_text(text)
        env = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{PATH}"}
        children.append(Child(name, f"{name}_program", ("an", "argument"), env))
    heard = Heard()
    supervisor = Supervisor(children, heard.write, cannot_start=heard.cannot_start, backoff=backoff)
    supervisor.proven = proven
    supervisor.start()
    try:
        yield supervisor, heard
    finally:
        await supervisor.kill()


async def test_lines_carry_the_name_of_who_wrote_them(tmp_path: Path) -> None:
    a = "import sys; print('to stdout', sys.argv[1:], flush=True); print('to stderr', file=sys.stderr)\n" + FOREVER
    async with supervised(tmp_path, a=a, b=FOREVER) as (_, heard):
        await heard.until("a", "up")
        await heard.until("b", "up")
        assert heard.of("a") == ["to stdout ['an', 'argument']", "to stderr", "up"]


def test_a_full_disk_loses_lines_and_nothing_else() -> None:
    with Path("/dev/full").open("wb", buffering=0) as full:
        stream = io.TextIOWrapper(full, write_through=True)
        NamedLines(stream, ["a"])("a", "text")


def test_nobody_waits_for_a_reader_that_has_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton.process.patient_writer.PATIENCE_S", 0.01)
    reading, writing = os.pipe()
    with open(writing, "w") as stream:  # noqa: PTH123  (a descriptor)
        lines = NamedLines(stream, ["a"])
        for _ in range(200):
            lines("a", "x" * 1000)
        kept = os.read(reading, 2**20).count(b"\n")
        lines("a", "again")
        lost = f"a | lines lost: {200 - kept}, which nobody read, or for which the disk was full"
        assert os.read(reading, 2**20).decode() == f"{lost}\na | again\n"
    os.close(reading)


async def test_endless_line_comes_in_pieces_and_the_last_needs_no_end(tmp_path: Path) -> None:
    length = 3 * MAX_LINE_BYTES
    talk = f"import sys; sys.stdout.write('x' * {length}); sys.exit(2)"
    async with supervised(tmp_path, proven=False, a=talk) as (_, heard):
        await heard.until_not_started()
        assert "".join(heard.of("a")) == "x" * length
        assert max(map(len, heard.of("a"))) <= 2 * MAX_LINE_BYTES


async def test_dead_child_is_reported_and_starts_again_later_and_later(tmp_path: Path) -> None:
    async with supervised(tmp_path, a="import sys; sys.exit(7)", b=FOREVER) as (_, heard):
        await heard.until("baton-up", "a exited with code 7", times=4)
        waits = [line.rsplit(" ", 2)[1] for line in heard.of("baton-up")]
        assert waits[:4] == ["0.01", "0.02", "0.04", "0.04"]
        assert heard.of("b") in (["up"], [])


async def test_health_resets_the_back_off(tmp_path: Path) -> None:
    always_healthy = Backoff(first_s=0.01, last_s=10.0, healthy_s=0.0)
    async with supervised(tmp_path, always_healthy, a="import sys; sys.exit(7)") as (_, heard):
        await heard.until("baton-up", "it starts again in 0.01 s", times=3)


async def test_signal_that_killed_a_child_is_named(tmp_path: Path) -> None:
    suicide = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    async with supervised(tmp_path, proven=False, a=suicide) as (_, heard):
        await heard.until("baton-up", "a was killed by SIGKILL; it starts again")


async def test_child_that_never_could_start_is_not_started_again(tmp_path: Path) -> None:
    program = "import sys; print('--model: no such folder'); sys.exit(1)"
    async with supervised(tmp_path, proven=False, a=program) as (_, heard):
        await heard.until_not_started()
        assert heard.not_started == [("a", 1)]
        assert heard.of("a") == ["--model: no such folder"]
        assert heard.of("baton-up") == []


async def test_stop_asks_first_and_leaves_the_others_alone(tmp_path: Path) -> None:
    polite = "import signal, sys; signal.signal(signal.SIGTERM, lambda *_: (print('bye'), sys.exit(0)))\n" + FOREVER
    async with supervised(tmp_path, a=polite, b=FOREVER) as (supervisor, heard):
        await heard.until("a", "up")
        await heard.until("b", "up")
        await supervisor.stop(["a"], WAIT_S)
        assert heard.of("a") == ["up", "bye"]
        assert heard.of("baton-up") == []


async def test_stop_kills_who_does_not_listen(tmp_path: Path) -> None:
    async with supervised(tmp_path, a=STUBBORN) as (supervisor, heard):
        await heard.until("a", "up")
        await supervisor.stop(["a"], 0.05)
        assert heard.of("baton-up") == ["a has not ended within 0.05 s: killed"]


async def test_stop_while_waiting_to_start_again(tmp_path: Path) -> None:
    slow = Backoff(first_s=3600.0, last_s=3600.0)
    async with supervised(tmp_path, slow, a="import sys; sys.exit(7)") as (supervisor, heard):
        await heard.until("baton-up", "starts again in 3600 s")
        async with asyncio.timeout(WAIT_S):
            await supervisor.stop(["a"], 3600.0)


async def test_kill_takes_the_grandchildren_too(tmp_path: Path) -> None:
    parent = (
        "import subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import signal; signal.pause()'])\n"
        "print('grandchild', child.pid, flush=True)\n" + STUBBORN
    )
    async with supervised(tmp_path, a=parent) as (supervisor, heard):
        await heard.until("a", "up")
        await supervisor.kill()
        wait_for_end(int(heard.of("a")[0].split()[1]))


PARENT = """
import asyncio, sys
from deploy.plan import Child
from deploy.supervisor import Supervisor

async def main():
    child = Child("a", "a_program", ())
    supervisor = Supervisor([child], lambda name, line: print(line, flush=True), cannot_start=print)
    supervisor.start()
    await asyncio.Event().wait()

asyncio.run(main())
"""


def test_no_child_outlives_its_parent(tmp_path: Path) -> None:
    (tmp_path / "a_program.py").write_text("import os; print(os.getpid(), flush=True)\n" + STUBBORN)
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{PATH}"}
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True, env=env) as parent:
        assert parent.stdout
        child = int(parent.stdout.readline())
        assert parent.stdout.readline() == "up\n"
        parent.send_signal(signal.SIGKILL)
        parent.wait(WAIT_S)
        wait_for_end(child)
