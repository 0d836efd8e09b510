"""Checks structured outputs before a node sees them: whether they compile, in time, in a process of its own."""

from __future__ import annotations

import json
import logging
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from baton.errors import InternalError, InvalidRequest, Overloaded
from baton.structured_output.constraint import StructuredBackend, StructuredOutput
from router.offload.fair_lock import FairLock
from router.offload.worker_process import WorkerProcess
from router.refusals import OnRefused, counted, turn, uncounted
from router.text.models import ServedModel

log = logging.getLogger(__name__)

_SHORT_S = 0.25
TIME_LIMIT_S = 1.0
"""Of CPU time, for one to compile. Each first gets a short time: nearly all need no more, and do not wait for those
that do."""
_PATIENCE_S = 10.0
"""For the process to use that: other processes may keep the CPUs busy."""
_MAX_WAIT_S = 5.0
"""For others that are being checked."""
_SLOW_S = 30.0
"""For so long, what took too long is refused at once; then it is tried again: CPUs are not always equally fast."""
_NUM_KEPT = 1024
_MAX_REASON_CHARS = 2048
"""Of a compiler's words, which may quote the text."""


class GrammarChecker:
    """Remembers the answers for the last ones. Owns the processes, each of which starts with the first that it is to
    compile. Asyncio thread only. clock: in seconds."""

    def __init__(self, on_refused: OnRefused = uncounted, clock: Callable[[], float] = time.monotonic) -> None:
        self._on_refused = on_refused
        self._clock = clock
        self._compilers = (_Compiler(_SHORT_S), _Compiler(TIME_LIMIT_S))
        self._known: OrderedDict[tuple[_Setup, bytes], _Verdict] = OrderedDict()

    async def check(self, structured: StructuredOutput, model: ServedModel, client: Hashable) -> None:
        """Raises InvalidRequest unless it compiles in time, or Overloaded. client: who takes turns with others."""
        setup = _Setup.of(model)
        verdict = self._cached_verdict((setup, structured.digest))
        if verdict is None:
            verdict = await self._compile(structured, setup, model, client)
        if verdict.reason:
            raise InvalidRequest(f"structured_outputs: {structured.kind.value}: {verdict.reason}", "structured_outputs")

    def close(self) -> None:
        """The processes end, at once."""
        for compiler in self._compilers:
            compiler.close()

    async def _compile(
        self, structured: StructuredOutput, setup: _Setup, model: ServedModel, client: Hashable
    ) -> _Verdict:
        digest = (setup, structured.digest)
        why = "other structured outputs have been compiled"
        for compiler in self._compilers:
            async with turn(compiler.lock.of(client), _MAX_WAIT_S, why, self._on_refused):
                verdict = self._cached_verdict(digest) or await self._ask(compiler, structured, setup, model)
            if verdict is not None:
                return self._keep(digest, verdict)
        log.info("structured outputs not compiled in time kind=%s chars=%d", structured.kind, len(structured.text))
        why = f"it cannot be compiled within {TIME_LIMIT_S:g} s of CPU time, or is nested too deeply"
        return self._keep(digest, _Verdict(why, self._clock() + _SLOW_S))

    async def _ask(
        self, compiler: _Compiler, structured: StructuredOutput, setup: _Setup, model: ServedModel
    ) -> _Verdict | None:
        try:
            return await compiler.verdict(structured, setup, model)
        except TimeoutError:
            busy = Overloaded("the router's machine is too busy to compile structured outputs")
            raise counted(busy, self._on_refused) from None

    def _cached_verdict(self, digest: tuple[_Setup, bytes]) -> _Verdict | None:
        """What is known of it, and still holds."""
        verdict = self._known.get(digest)
        if verdict is None or self._clock() >= verdict.until:
            return None
        self._known.move_to_end(digest)
        return verdict

    def _keep(self, digest: tuple[_Setup, bytes], verdict: _Verdict) -> _Verdict:
        self._known[digest] = verdict
        while len(self._known) > _NUM_KEPT:
            self._known.popitem(last=False)
        return verdict


class _Compiler:
    """A process that compiles one at a time, each in `limit_s` of CPU time at most. Who has a turn of `lock` asks."""

    def __init__(self, limit_s: float) -> None:
        self.lock = FairLock()
        self._limit_s = limit_s
        self._worker: WorkerProcess | None = None
        self._setup: _Setup | None = None  # of the worker

    async def verdict(self, structured: StructuredOutput, setup: _Setup, model: ServedModel) -> _Verdict | None:
        """None: it did not compile in time. Raises InternalError, and TimeoutError if the process had no CPU for so
        long."""
        if self._worker is not None and self._setup != setup:
            self._worker.end()
        if self._worker is None or self._worker.ended:
            self._worker, self._setup = WorkerProcess("router.offload.grammar_worker"), setup
            if not await self._worker.started(setup.first_line(model)):
                raise InternalError("the process that compiles structured outputs does not start")
        question = json.dumps([structured.kind.value, structured.text, self._limit_s])
        line = await self._worker.answer(question, _PATIENCE_S)
        answer: str | Literal[False] | None = json.loads(line) if line else False
        return None if answer is False else _Verdict(answer and answer[:_MAX_REASON_CHARS])

    def close(self) -> None:
        if self._worker is not None:
            self._worker.end()
            self._worker = None


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
