"""Checks structured outputs before a node sees them: whether they compile, in time, in a process of its own."""

from __future__ import annotations

import asyncio
import json
import logging
from collections import OrderedDict
from dataclasses import dataclass

from baton.errors import InternalError, InvalidRequest, Overloaded
from baton.structured_output import StructuredBackend, StructuredOutput
from router.models import ServedModel
from router.worker_process import WorkerProcess

log = logging.getLogger(__name__)

TIME_LIMIT_S = 1.0
"""For one to compile."""
_MAX_WAIT_S = 5.0
"""For others that are being checked."""
_NUM_KEPT = 1024
_MAX_REASON_CHARS = 2048
"""Of a compiler's words, which may quote the text."""


class GrammarChecker:
    """Remembers the answers for the last ones. Owns the process, which starts with the first check. Asyncio thread
    only."""

    def __init__(self) -> None:
        self._worker: WorkerProcess | None = None
        self._lock = asyncio.Lock()
        self._setup: _Setup | None = None  # of the worker
        self._known: OrderedDict[tuple[_Setup, bytes], str | None] = OrderedDict()

    async def check(self, structured: StructuredOutput, model: ServedModel) -> None:
        """Raises InvalidRequest unless it compiles in time, or Overloaded."""
        setup = _Setup.of(model)
        digest = (setup, structured.digest)
        if digest not in self._known:
            try:
                async with asyncio.timeout(_MAX_WAIT_S):
                    await self._lock.acquire()
            except TimeoutError:
                raise Overloaded(f"other structured outputs have been compiled for {_MAX_WAIT_S:g} s") from None
            try:
                if digest not in self._known:
                    self._keep(digest, await self._ask(structured, setup, model))
            finally:
                self._lock.release()
        self._known.move_to_end(digest)
        if reason := self._known[digest]:
            raise InvalidRequest(f"structured_outputs: {structured.kind.value}: {reason}", "structured_outputs")

    def close(self) -> None:
        """The process ends, at once."""
        if self._worker is not None:
            self._worker.end()
            self._worker = None

    def _keep(self, digest: tuple[_Setup, bytes], reason: str | None) -> None:
        self._known[digest] = reason and reason[:_MAX_REASON_CHARS]
        while len(self._known) > _NUM_KEPT:
            self._known.popitem(last=False)

    async def _ask(self, structured: StructuredOutput, setup: _Setup, model: ServedModel) -> str | None:
        """Why it does not compile, or None."""
        if self._worker is not None and self._setup != setup:
            self._worker.end()
        if self._worker is None or self._worker.ended:
            self._worker, self._setup = WorkerProcess("router.grammar_worker"), setup
            if not await self._worker.started(setup.first_line(model)):
                raise InternalError("the process that compiles structured outputs does not start")
        question = json.dumps([structured.kind.value, structured.text])
        line = await self._worker.answer(question, TIME_LIMIT_S)
        if not line:
            log.info("structured outputs not compiled in time kind=%s chars=%d", structured.kind, len(structured.text))
            return f"it cannot be compiled within {TIME_LIMIT_S:g} s"
        answer: str | None = json.loads(line)
        return answer


@dataclass(frozen=True, slots=True)
class _Setup:
    """What the process compiles with. llguidance needs no vocabulary to tell whether something compiles; what takes
    XGrammar's time is the vocabulary."""

    backend: StructuredBackend
    tokenizer_digest: str = ""

    @classmethod
    def of(cls, model: ServedModel) -> _Setup:
        backend = model.structured_outputs_backend
        return cls(backend, model.tokenizer.digest if backend is StructuredBackend.XGRAMMAR else "")

    def first_line(self, model: ServedModel) -> str:
        """For the process."""
        if not self.tokenizer_digest:
            return json.dumps([self.backend.value])
        eos = list(model.defaults.eos_token_ids)
        return json.dumps([self.backend.value, model.tokenizer.to_json(), model.vocab_size, eos])
