"""The parent of the workers: starts them, starts those again that end or hang, and stops them when it is asked to.

start --"up" from each--> running --SIGTERM--> draining --all ended, or the deadline--> exit 0
  `--one ended before it was up--> the others are stopped, exit 1
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from baton.rpc.silence import until_silent
from router.startup import StartError
from router.workers.siblings import WorkerPlace

log = logging.getLogger(__name__)

FIRST_BACKOFF_S = 0.1
LAST_BACKOFF_S = 10.0
START_S = 120.0
"""How long a worker may take until it serves."""
HANG_S = 10.0
"""A worker that has said nothing for so long is killed; one that is well says something every half second."""
KILL_S = 5.0
"""Beyond the time that its requests have, how long a worker may take to end."""
_MAX_SOCKET_PATH_BYTES = 107
"""Linux's limit (man 7 unix), without the zero at the end."""

Command = Callable[[int, int, str], Sequence[str]]
"""Of worker `index`, given the descriptor to say on that it is up, and the folder of the workers' sockets."""


class Worker:
    """One process. It is in a session of its own, so that a terminal's signals reach it only through its parent; it
    ends when its stdin does, so it does not outlive its parent."""

    def __init__(self, index: int, command: Command, directory: str) -> None:
        self._reading, writing = os.pipe()
        try:
            self._process = subprocess.Popen(
                command(index, writing, directory), stdin=subprocess.PIPE, pass_fds=(writing,), start_new_session=True
            )
        except BaseException:
            os.close(self._reading)
            raise
        finally:
            os.close(writing)
        loop = asyncio.get_running_loop()
        self._up: asyncio.Future[bool] = loop.create_future()
        self._closed = asyncio.Event()
        self._heard: Callable[[], None] = lambda: None
        loop.add_reader(self._reading, self._read)

    @property
    def pid(self) -> int:
        return self._process.pid

    async def up(self) -> bool:
        """Whether it serves, in time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(START_S):
                return await asyncio.shield(self._up)
        self.signal(signal.SIGKILL)
        return False

    async def ended(self) -> int:
        """Its exit code, once it has closed the pipe, which it does by ending; one that hangs is killed."""
        try:
            async with until_silent(HANG_S) as watch:
                self._heard = watch.heard
                await self._closed.wait()
        except TimeoutError:
            log.error("pid=%d has been silent for %g s, and is killed", self.pid, HANG_S)
            self.signal(signal.SIGKILL)
            await self._closed.wait()
        code = await asyncio.to_thread(self._process.wait)
        assert self._process.stdin is not None
        self._process.stdin.close()
        return code

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)  # does nothing once it was waited for

    def _read(self) -> None:
        said = os.read(self._reading, 64)
        self._heard()
        if not self._up.done():
            self._up.set_result(bool(said))
        if not said:
            asyncio.get_running_loop().remove_reader(self._reading)
            os.close(self._reading)
            self._closed.set()


class Supervisor:
    """Runs `count` workers from `run` to its end. `run` raises StartError if their sockets can have no folder."""

    def __init__(self, count: int, command: Command, drain_timeout_s: float) -> None:
        self._count = count
        self._command = command
        self._drain_timeout_s = drain_timeout_s
        self._live: dict[int, Worker] = {}
        self._stopping = asyncio.Event()

    async def run(self, stop: asyncio.Event, hurry: asyncio.Event) -> bool:
        """Until `stop`; with `hurry` running requests are cut off. False: a worker could not start."""
        with _sockets_folder(self._count) as directory:
            keeping = {asyncio.create_task(self._keep(index, directory)) for index in range(self._count)}
            stopping = asyncio.create_task(stop.wait())
            first: set[asyncio.Future[Any]] = {stopping, *keeping}
            done, _ = await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
            self._stopping.set()
            stopping.cancel()
            await self._drain(keeping, hurry)
        return all(task.result() for task in keeping & done)

    async def _keep(self, index: int, directory: str) -> bool:
        """Have that worker running until the end. False: its first process ended before it was up."""
        backoff_s, first = FIRST_BACKOFF_S, True
        while not self._stopping.is_set():
            began = time.monotonic()
            was_up, how = await self._run_once(index, directory)
            if self._stopping.is_set():
                break
            if first and not was_up:
                log.error("worker=%d %s could not start", index, how)
                return False
            first = False
            if was_up and time.monotonic() - began > LAST_BACKOFF_S:
                backoff_s = FIRST_BACKOFF_S
            log.warning("worker=%d %s ended, and is started again in %.1f s", index, how, backoff_s)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(backoff_s):
                    await self._stopping.wait()
            backoff_s = min(2 * backoff_s, LAST_BACKOFF_S)
        return True

    async def _run_once(self, index: int, directory: str) -> tuple[bool, str]:
        """Whether it was up, and how it ended, for logs."""
        try:
            worker = self._live[index] = Worker(index, self._command, directory)
        except OSError as error:  # the machine lacks memory, processes or files for now: the other workers go on
            return False, f"error={error.strerror!r}"
        was_up = await worker.up()
        if was_up:
            log.info("worker=%d pid=%d up", index, worker.pid)
        code = await worker.ended()
        del self._live[index]
        return was_up, f"code={code}"

    async def _drain(self, keeping: set[asyncio.Task[bool]], hurry: asyncio.Event) -> None:
        """Ask all to end, once more if there is hurry, and kill those that are late."""
        self._signal(signal.SIGTERM)
        hurrying = asyncio.create_task(hurry.wait())
        everyone = asyncio.gather(*keeping, return_exceptions=True)
        either: set[asyncio.Future[Any]] = {hurrying, everyone}
        await asyncio.wait(either, timeout=self._drain_timeout_s + KILL_S, return_when=asyncio.FIRST_COMPLETED)
        hurrying.cancel()
        if not everyone.done():
            self._signal(signal.SIGTERM)
            await asyncio.wait({everyone}, timeout=KILL_S)
            self._signal(signal.SIGKILL)
        await everyone

    def _signal(self, number: signal.Signals) -> None:
        for worker in self._live.values():
            worker.signal(number)


def _sockets_folder(count: int) -> tempfile.TemporaryDirectory[str]:
    """For the sockets of so many workers; only this user may enter it. Raises StartError."""
    try:
        folder = tempfile.TemporaryDirectory(prefix="baton-router-")
    except OSError as no_folder:
        raise StartError(f"--workers: no folder for their sockets: {no_folder.strerror}") from no_folder
    path = WorkerPlace(0, count, Path(folder.name)).socket_of(count - 1)
    if len(os.fsencode(path)) > _MAX_SOCKET_PATH_BYTES:
        folder.cleanup()
        raise StartError(f"--workers: {path} is too long for a socket: set TMPDIR to a shorter folder")
    return folder
