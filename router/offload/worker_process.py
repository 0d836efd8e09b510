"""A process for work that cannot be interrupted otherwise: one line in, one line out, and killed when it is late."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

_START_S = 30.0


class WorkerProcess:
    """Runs `python -m MODULE`, which writes a line once it is ready, and then one line for each line it reads.

    `subprocess` starts it without the fork handlers of gRPC, which uvloop would run in the child.
    """

    def __init__(self, module: str) -> None:
        command = (sys.executable, "-m", module)
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._thread = ThreadPoolExecutor(1, module.rpartition(".")[2])

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    async def started(self, setup: str = "") -> bool:
        """Whether it is ready, in time. Call it first, and once. setup: its first line, if it wants one."""
        try:
            return bool(await self.answer(setup, _START_S))
        except TimeoutError:
            return False

    async def answer(self, question: str, timeout_s: float) -> str:
        """Its next line, after the question if that is not empty; one at a time. Empty: it has ended. Raises
        TimeoutError if none came in time, and ends it, since its next line would answer this question. If this is
        cancelled, it still waits for that line: the next question then needs no new process."""
        answered = asyncio.create_task(self._answer(question, timeout_s))
        try:
            return await asyncio.shield(answered)
        except asyncio.CancelledError:
            await asyncio.wait([answered])
            answered.exception()
            raise

    def end(self) -> None:
        """Kill it. A call that waits for its answer returns. Idempotent."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):  # what was not written yet
                pipe.close()
        self._thread.shutdown(wait=False)

    async def _answer(self, question: str, timeout_s: float) -> str:
        asked = asyncio.get_running_loop().run_in_executor(self._thread, self._ask, question)
        line = ""
        try:
            async with asyncio.timeout(timeout_s):
                line = await asyncio.shield(asked)
        finally:
            if not line:
                self.end()
        return line

    def _ask(self, question: str) -> str:
        """Blocks until the answer; empty if the process has ended."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            if question:
                self._process.stdin.write(question + "\n")
                self._process.stdin.flush()
            return self._process.stdout.readline()
        except (BrokenPipeError, ValueError):  # ValueError: `end` has closed the pipes
            return ""
