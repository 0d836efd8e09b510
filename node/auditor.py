"""The thread that runs a node's audits and integrity checks on request, at little cost to the engine.

What an audit contains is `node.audit`'s; this module decides when one runs. The engine's thread does nothing else while
it accounts for every block (0.16 s for 50,000), so a client that asks in a loop could stall it. Therefore one audit
serves all queries that arrived before it began, and the next one waits PAUSE_FACTOR times as long as it took: however
many clients ask, audits use at most 1 / (PAUSE_FACTOR + 1) of the engine's time, and no answer is older than its query.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from baton.audit import KvAudit
from baton.errors import DeadlineExceeded, NodeUnavailable
from baton.rpc.streams import STOPPED

R = TypeVar("R")
Formatter = Callable[[KvAudit], Iterator[R]]
"""Formats an audit in pieces that take about a millisecond each."""

PAUSE_FACTOR = 30
MIN_PAUSE_S = 0.1
_FORMAT_PAUSE_FACTOR = 19
"""Pause after each piece, in multiples of its CPU time: formatting holds the interpreter, which the engine needs."""
_STOP_S = 1.0


@dataclass(frozen=True, slots=True)
class _Query:
    """A query for the audit, formatted by `formatter`; None: for the verdict alone."""

    formatter: Callable[[KvAudit], Iterator[Any]] | None
    answer: Future[Any]


class Auditor:
    """Answers queries on a thread of its own, from construction to `close`. Callable from any thread.

    `verdict` and `audit` run on the engine's thread through `run_engine_call`, with a timeout of `limit_s` each.
    """

    def __init__(
        self,
        run_engine_call: Callable[[Callable[[], tuple[Any, float]]], Future[tuple[Any, float]]],
        verdict: Callable[[], str],
        audit: Callable[[], KvAudit],
        limit_s: float,
    ) -> None:
        self._run_engine_call = run_engine_call
        self._verdict = verdict
        self._audit = audit
        self._limit_s = limit_s
        self._queries: list[_Query] = []
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="auditor", daemon=True)
        self._thread.start()

    def integrity(self) -> Future[str]:
        """The verdict. Fails with DeadlineExceeded if the engine hangs, NodeUnavailable once closed."""
        return self._submit(None)

    def audit(self, formatter: Formatter[R]) -> Future[list[R]]:
        """All pieces of the audit. Fails like `integrity`."""
        return self._submit(formatter)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(_STOP_S)

    def _submit(self, formatter: Callable[[KvAudit], Iterator[Any]] | None) -> Future[Any]:
        answer: Future[Any] = Future()
        with self._changed:
            if self._closed:
                answer.set_exception(NodeUnavailable(STOPPED))
            else:
                self._queries.append(_Query(formatter, answer))
                self._changed.notify()
        return answer

    def _run(self) -> None:
        pause_s = 0.0
        while queries := self._next_round(pause_s):
            pause_s = MIN_PAUSE_S
            try:
                pause_s = max(pause_s, PAUSE_FACTOR * self._serve(queries))
            except Exception as error:  # noqa: BLE001 - passed on through the futures
                for query in queries:
                    _fail(query, error)

    def _next_round(self, pause_s: float) -> list[_Query]:
        """Wait `pause_s`, then for a query; all queries that have arrived by then. Empty: closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed, pause_s)
            self._changed.wait_for(lambda: self._closed or self._queries)
            queries, self._queries = self._queries, []
        if not self._closed:
            return queries
        for query in queries:
            _fail(query, NodeUnavailable(STOPPED))
        return []

    def _serve(self, queries: list[_Query]) -> float:
        """Answer all from one audit; returns the seconds that it cost the engine. Raises DeadlineExceeded."""
        answers: dict[Any, Any] = {}
        formatters = {query.formatter for query in queries if query.formatter}
        if not formatters:
            answers[None], took_s = self._run_timed(self._verdict)
        else:
            audit, took_s = self._run_timed(self._audit)
            answers[None] = audit.integrity
        for formatter in formatters:
            answers[formatter], formatting_s = _format(formatter(audit))
            took_s += formatting_s
        for query in queries:
            if query.answer.set_running_or_notify_cancel():  # False: cancelled
                query.answer.set_result(answers[query.formatter])
        return took_s

    def _run_timed(self, function: Callable[[], R]) -> tuple[R, float]:
        def timed() -> tuple[R, float]:
            began = time.perf_counter()
            return function(), time.perf_counter() - began

        call = self._run_engine_call(timed)
        try:
            return call.result(self._limit_s)
        except TimeoutError:
            call.cancel()
            raise DeadlineExceeded(f"no turn of the engine ended within {self._limit_s:g} s") from None


def _format(pieces: Iterator[R]) -> tuple[list[R], float]:
    """All pieces, with pauses between them, and the CPU seconds that they took."""
    formatted: list[R] = []
    began = last = time.thread_time()
    for piece in pieces:
        formatted.append(piece)
        now = time.thread_time()
        time.sleep(_FORMAT_PAUSE_FACTOR * (now - last))
        last = now
    return formatted, last - began


def _fail(query: _Query, error: Exception) -> None:
    if query.answer.set_running_or_notify_cancel():
        query.answer.set_exception(error)
