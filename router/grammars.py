"""Checks structured outputs before a node sees them: whether they compile, in time, in a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import sys
from asyncio.subprocess import PIPE, Process
from collections import OrderedDict

from baton.errors import InternalError, InvalidRequest, Overloaded
from baton.structured_output import StructuredOutput

log = logging.getLogger(__name__)

TIME_LIMIT_S = 1.0
"""For one to compile. Of 2,000 real JSON schemas the slowest takes a tenth of that."""
_START_S = 30.0
_MAX_WAIT_S = 5.0
"""For others that are being checked."""
_NUM_KEPT = 1024
_MAX_LINE_BYTES = 1 << 20


class GrammarChecker:
    """Remembers the answers for the last ones. Owns the process, which starts with the first check. Asyncio thread
    only."""

    def __init__(self) -> None:
        self._process: Process | None = None
        self._lock = asyncio.Lock()
        self._known: OrderedDict[StructuredOutput, str | None] = OrderedDict()

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

    async def close(self) -> None:
        """The process ends, at once."""
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    def _keep(self, structured: StructuredOutput, reason: str | None) -> None:
        self._known[structured] = reason
        while len(self._known) > _NUM_KEPT:
            self._known.popitem(last=False)

    async def _ask(self, structured: StructuredOutput) -> str | None:
        """Why it does not compile, or None."""
        process = await self._start()
        assert process.stdin is not None
        process.stdin.write(json.dumps([structured.kind.value, structured.text]).encode() + b"\n")
        line = await self._read(process, TIME_LIMIT_S)
        if not line:
            log.info("structured outputs not compiled in time kind=%s chars=%d", structured.kind, len(structured.text))
            return f"it cannot be compiled within {TIME_LIMIT_S:g} s"
        answer: str | None = json.loads(line)
        return answer

    async def _start(self) -> Process:
        """The process, started if none runs and ready to compile."""
        if self._process is None or self._process.returncode is not None:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "router.grammar_worker"), stdin=PIPE, stdout=PIPE, limit=_MAX_LINE_BYTES
            )
            if not await self._read(self._process, _START_S):
                raise InternalError("the process that compiles structured outputs does not start")
        return self._process

    async def _read(self, process: Process, timeout_s: float) -> bytes:
        """Its next line. Empty: none came in time, and the process is ended, since it would answer the next question
        with it; likewise if this is cancelled."""
        assert process.stdout is not None
        line = b""
        try:
            async with asyncio.timeout(timeout_s):
                line = await process.stdout.readline()
        except TimeoutError:
            pass
        finally:
            if not line:
                await asyncio.shield(self.close())
        return line
