"""Checks structured outputs before a node sees them: whether they compile, in time, in a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import subprocess
import sys
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor

from baton.errors import InternalError, InvalidRequest, Overloaded
from baton.structured_output import StructuredOutput

log = logging.getLogger(__name__)

TIME_LIMIT_S = 1.0
"""For one to compile."""
_START_S = 30.0
_MAX_WAIT_S = 5.0
"""For others that are being checked."""
_NUM_KEPT = 1024


class GrammarChecker:
    """Remembers the answers for the last ones. Owns the process, which starts with the first check. Asyncio thread
    only."""

    def __init__(self) -> None:
        self._worker: _Worker | None = None
        self._lock = asyncio.Lock()
        self._known: OrderedDict[StructuredOutput, str | None] = OrderedDict()
        self._thread = ThreadPoolExecutor(1, "grammar-check")

    async def check(self, structured: StructuredOutput) -> None:
        """Raises InvalidRequest unless it compiles in time, or Overloaded."""
        if structured not in self._known:
            try:
                async with asyncio.timeout(_MAX_WAIT_S):
                    await self._lock.acquire()
            except TimeoutError:
                raise Overloaded(f"other structured outputs have been compiled for {_MAX_WAIT_S:g} s") from None
            try:
                if structured not in self._known:
                    self._keep(structured, await self._ask(structured))
            finally:
                self._lock.release()
        self._known.move_to_end(structured)
        if reason := self._known[structured]:
            raise InvalidRequest(f"structured_outputs: {structured.kind.value}: {reason}", "structured_outputs")

    def close(self) -> None:
        """The process ends, at once."""
        if self._worker is not None:
            self._worker.end()
            self._worker = None
        self._thread.shutdown(wait=False)

    def _keep(self, structured: StructuredOutput, reason: str | None) -> None:
        self._known[structured] = reason
        while len(self._known) > _NUM_KEPT:
            self._known.popitem(last=False)

    async def _ask(self, structured: StructuredOutput) -> str | None:
        """Why it does not compile, or None."""
        if self._worker is None or self._worker.ended:
            self._worker = _Worker()
            if not await self._answer(self._worker, "", _START_S):
                raise InternalError("the process that compiles structured outputs does not start")
        question = json.dumps([structured.kind.value, structured.text])
        line = await self._answer(self._worker, question, TIME_LIMIT_S)
        if not line:
            log.info("structured outputs not compiled in time kind=%s chars=%d", structured.kind, len(structured.text))
            return f"it cannot be compiled within {TIME_LIMIT_S:g} s"
        answer: str | None = json.loads(line)
        return answer

    async def _answer(self, worker: _Worker, question: str, timeout_s: float) -> str:
        """Its next line. Empty: none came in time, and it is ended, since its next line would answer this question;
        likewise if this is cancelled."""
        asked = asyncio.get_running_loop().run_in_executor(self._thread, worker.ask, question)
        line = ""
        try:
            async with asyncio.timeout(timeout_s):
                line = await asyncio.shield(asked)
        except TimeoutError:
            pass
        finally:
            if not line:
                worker.end()
        return line


class _Worker:
    """The process. `subprocess` starts it without the fork handlers of gRPC, which uvloop would run in the child."""

    def __init__(self) -> None:
        command = (sys.executable, "-m", "router.grammar_worker")
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    def ask(self, question: str) -> str:
        """Its next line, after the question, if that is not empty; empty if it has ended. Blocks until then."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            if question:
                self._process.stdin.write(question + "\n")
                self._process.stdin.flush()
            return self._process.stdout.readline()
        except (BrokenPipeError, ValueError):  # ValueError: `end` has closed the pipes
            return ""

    def end(self) -> None:
        """Kill it. A call that waits for its answer returns."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):  # what was not written yet
                pipe.close()
