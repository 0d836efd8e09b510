"""Checks structured outputs before a node sees them: whether they compile, in time, in a process of its own."""

from __future__ import annotations

import asyncio
import json
import logging
from collections import OrderedDict

from baton.errors import InternalError, InvalidRequest, Overloaded
from baton.structured_output import StructuredOutput
from router.worker_process import WorkerProcess

log = logging.getLogger(__name__)

TIME_LIMIT_S = 1.0
"""For one to compile."""
_MAX_WAIT_S = 5.0
"""For others that are being checked."""
_NUM_KEPT = 1024


class GrammarChecker:
    """Remembers the answers for the last ones. Owns the process, which starts with the first check. Asyncio thread
    only."""

    def __init__(self) -> None:
        self._worker: WorkerProcess | None = None
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

    def close(self) -> None:
        """The process ends, at once."""
        if self._worker is not None:
            self._worker.end()
            self._worker = None

    def _keep(self, structured: StructuredOutput, reason: str | None) -> None:
        self._known[structured] = reason
        while len(self._known) > _NUM_KEPT:
            self._known.popitem(last=False)

    async def _ask(self, structured: StructuredOutput) -> str | None:
        """Why it does not compile, or None."""
        if self._worker is None or self._worker.ended:
            self._worker = WorkerProcess("router.grammar_worker")
            if not await self._worker.started():
                raise InternalError("the process that compiles structured outputs does not start")
        question = json.dumps([structured.kind.value, structured.text])
        line = await self._worker.answer(question, TIME_LIMIT_S)
        if not line:
            log.info("structured outputs not compiled in time kind=%s chars=%d", structured.kind, len(structured.text))
            return f"it cannot be compiled within {TIME_LIMIT_S:g} s"
        answer: str | None = json.loads(line)
        return answer
