"""Keeps child processes running: starts them, passes on their lines, restarts those that died, stops them all.

A child's states, until the supervisor stops:

    start --> runs --> died: reported --> waits 0.5 s, 1 s, 2 s, ... 30 s --> start
                                          (0.5 s again after it ran for a minute)

A child that exits with an error code before the cluster was ready for the first time cannot start at all (wrong flags
or model): this ends the cluster, with the child's last line in view, instead of restarting it for ever.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from deploy.plan import Child, clean_environment

Write = Callable[[str, str], None]
"""Takes a child's name, or OURS, and one line without its end."""

OURS = "baton-up"
MAX_LINE_BYTES = 64 * 1024
LAST_LINES_S = 1.0
"""Time to read the last lines of a process that ended, in case a process that it started holds the pipe open."""


@dataclass(frozen=True, slots=True)
class Backoff:
    first_s: float = 0.5
    last_s: float = 30.0
    healthy_s: float = 60.0


DEFAULT_BACKOFF = Backoff()


class Supervisor:
    """Runs on the event loop of the main thread: the kernel kills children when the thread that started them ends.

    Until `proven` is set, `cannot_start` is called with the name and exit code of a child that exits with an error.
    """

    def __init__(
        self,
        children: Sequence[Child],
        write: Write,
        *,
        cannot_start: Callable[[str, int], None],
        backoff: Backoff = DEFAULT_BACKOFF,
    ) -> None:
        self.write = write
        self.cannot_start = cannot_start
        self.proven = False
        self.backoff = backoff
        self._keepers = [_Keeper(child, self) for child in children]

    def start(self) -> None:
        for keeper in self._keepers:
            keeper.start()

    def say(self, text: str) -> None:
        self.write(OURS, text)

    def signal(self, name: str, number: signal.Signals) -> None:
        """Send it to the child of that name, which is started again if it ends."""
        for keeper in self._keepers:
            if keeper.child.name == name:
                keeper.send(number)

    async def stop(self, names: Sequence[str], timeout_s: float) -> None:
        """Terminate the children of these names (SIGTERM), and kill those that are left after `timeout_s`."""
        keepers = [keeper for keeper in self._keepers if keeper.child.name in names]
        for keeper in keepers:
            keeper.terminate()
        tasks = [keeper.task for keeper in keepers if keeper.task]
        if not tasks:
            return
        _, running = await asyncio.wait(tasks, timeout=timeout_s)
        for keeper in keepers:
            if keeper.task in running:
                self.say(f"{keeper.child.name} has not ended within {timeout_s:g} s: killed")
                keeper.kill()
        if running:
            await asyncio.wait(running)

    async def kill(self) -> None:
        """End all children at once (SIGKILL)."""
        for keeper in self._keepers:
            keeper.kill()
        tasks = [keeper.task for keeper in self._keepers if keeper.task]
        if tasks:
            await asyncio.wait(tasks)


class _Keeper:
    """One child, across restarts."""

    def __init__(self, child: Child, supervisor: Supervisor) -> None:
        self.child = child
        self.task: asyncio.Task[None] | None = None
        self._supervisor = supervisor
        self._process: asyncio.subprocess.Process | None = None
        self._stop = asyncio.Event()

    def start(self) -> None:
        self.task = asyncio.create_task(self._run(), name=f"keeper {self.child.name}")

    def terminate(self) -> None:
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        self._end(signal.SIGKILL)

    def _end(self, number: signal.Signals) -> None:
        self._stop.set()
        self.send(number)

    def send(self, number: signal.Signals) -> None:
        """Nothing happens if it does not run."""
        if self._process and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):  # it ended, and asyncio does not know yet
                os.killpg(self._process.pid, number)  # its process group: includes whatever it started

    async def _run(self) -> None:
        backoff = self._supervisor.backoff
        wait_s = backoff.first_s
        while not self._stop.is_set():
            began = time.monotonic()
            try:
                code = await self._live()
                ended = _how_it_ended(code)
            except OSError as error:  # out of processes, descriptors or memory
                code, ended = 0, f"could not be started: {error.strerror}"
            if self._stop.is_set():
                return
            if code > 0 and not self._supervisor.proven:
                self._supervisor.cannot_start(self.child.name, code)
                return
            if time.monotonic() - began >= backoff.healthy_s:
                wait_s = backoff.first_s
            self._supervisor.say(f"{self.child.name} {ended}; it starts again in {wait_s:g} s")
            await self._pause(wait_s)
            wait_s = min(2 * wait_s, backoff.last_s)

    async def _live(self) -> int:
        """Run the process once, from start to end; its exit code, negative for a signal."""
        child = self.child
        command = [sys.executable, "-P", "-m", "deploy.child", str(os.getpid()), child.module, *child.arguments]
        self._process = process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env={**clean_environment(os.environ), **child.env},
            process_group=0,  # Ctrl-C is for us: we end them in order
        )
        if self._stop.is_set():  # stopped while the process was being started
            self.kill()
        assert process.stdout
        lines = asyncio.create_task(self._pass_on(process.stdout))
        code = await process.wait()
        await asyncio.wait([lines], timeout=LAST_LINES_S)
        lines.cancel()
        return code

    async def _pass_on(self, stream: asyncio.StreamReader) -> None:
        rest = b""
        while data := await stream.read(MAX_LINE_BYTES):
            *lines, rest = (rest + data).split(b"\n")
            if len(rest) > MAX_LINE_BYTES:
                lines, rest = [*lines, rest], b""
            for line in lines:
                self._supervisor.write(self.child.name, line.decode(errors="replace"))
        if rest:
            self._supervisor.write(self.child.name, rest.decode(errors="replace"))

    async def _pause(self, seconds: float) -> None:
        """Sleep for so long, or until the child is to stop."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._stop.wait()


def _how_it_ended(code: int) -> str:
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"
