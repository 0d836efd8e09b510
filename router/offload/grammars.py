"""Checks structured outputs before a node sees them: whether they compile, in time, in a process of its own."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from baton.errors import InternalError, InvalidRequest
from baton.structured_output.constraint import StructuredBackend, StructuredOutput
from router.offload.worker_process import WorkerProcess
from router.refusals import OnRefused, turn, uncounted
from router.text.models import ServedModel

log = logging.getLogger(__name__)

TIME_LIMIT_S = 1.0
"""For one to compile."""
_MAX_WAIT_S = 5.0
"""For others that are being checked."""
_SLOW_S = 30.0
"""For so long, what took too long is refused at once; then it is tried again, as the process may have been held up."""
_NUM_KEPT = 1024
_MAX_REASON_CHARS = 2048
"""Of a compiler's words, which may quote the text."""


class GrammarChecker:
    """Remembers the answers for the last ones. Owns the process, which starts with the first check. Asyncio thread
    only. clock: in seconds."""

    def __init__(self, on_refused: OnRefused = uncounted, clock: Callable[[], float] = time.monotonic) -> None:
        self._on_refused = on_refused
        self._clock = clock
        self._worker: WorkerProcess | None = None
        self._lock = asyncio.Lock()
        self._setup: _Setup | None = None  # of the worker
        self._known: OrderedDict[tuple[_Setup, bytes], _Verdict] = OrderedDict()

    async def check(self, structured: StructuredOutput, model: ServedModel) -> None:
        """Raises InvalidRequest unless it compiles in time, or Overloaded."""
        setup = _Setup.of(model)
        digest = (setup, structured.digest)
        if self._cached_verdict(digest) is None:
            async with turn(self._lock, _MAX_WAIT_S, "other structured outputs have been compiled", self._on_refused):
                if self._cached_verdict(digest) is None:
                    self._keep(digest, await self._ask(structured, setup, model))
        self._known.move_to_end(digest)
        if reason := self._known[digest].reason:
            raise InvalidRequest(f"structured_outputs: {structured.kind.value}: {reason}", "structured_outputs")

    def close(self) -> None:
        """The process ends, at once."""
        if self._worker is not None:
            self._worker.end()
            self._worker = None

    def _cached_verdict(self, digest: tuple[_Setup, bytes]) -> _Verdict | None:
        """What is known of it, and still holds."""
        verdict = self._known.get(digest)
        return verdict if verdict is not None and self._clock() < verdict.until else None

    def _keep(self, digest: tuple[_Setup, bytes], verdict: _Verdict) -> None:
        self._known[digest] = verdict
        while len(self._known) > _NUM_KEPT:
            self._known.popitem(last=False)

    async def _ask(self, structured: StructuredOutput, setup: _Setup, model: ServedModel) -> _Verdict:
        if self._worker is not None and self._setup != setup:
            self._worker.end()
        if self._worker is None or self._worker.ended:
            self._worker, self._setup = WorkerProcess("router.offload.grammar_worker"), setup
            if not await self._worker.started(setup.first_line(model)):
                raise InternalError("the process that compiles structured outputs does not start")
        question = json.dumps([structured.kind.value, structured.text])
        line = await self._worker.answer(question, TIME_LIMIT_S)
        if not line:
            log.info("structured outputs not compiled in time kind=%s chars=%d", structured.kind, len(structured.text))
            why = f"it cannot be compiled within {TIME_LIMIT_S:g} s, or is nested too deeply"
            return _Verdict(why, self._clock() + _SLOW_S)
        answer: str | None = json.loads(line)
        return _Verdict(answer and answer[:_MAX_REASON_CHARS])


class _Verdict(NamedTuple):
    """Why it does not compile, None: it does; and until when that holds, by the checker's clock."""

    reason: str | None
    until: float = math.inf


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
