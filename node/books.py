"""Integrity checks and audits of a node's books, on request, at little cost to the engine.

The engine's thread does nothing else while it accounts for every block (0.16 s for 50,000), so a client that asks in a
loop could stall it. Therefore one audit serves all queries that arrived before it began, and the next one waits REST
times as long as it took: however many clients ask, audits use at most 1 / (REST + 1) of the engine's time, and no
answer is older than its query.
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
from baton.streams import STOPPED

R = TypeVar("R")
Show = Callable[[KvAudit], Iterator[R]]
"""Formats an audit in pieces that take about a millisecond each."""

REST = 30
MIN_REST_S = 0.1
_SHOWING_REST = 19
"""Pause after each piece, in multiples of its CPU time: formatting holds the interpreter, which the engine needs."""
_STOP_S = 1.0


@dataclass(frozen=True, slots=True)
class _Asked:
    """A query for the audit as formatted by `show`; None: for the verdict alone."""

    show: Callable[[KvAudit], Iterator[Any]] | None
    answer: Future[Any]


class Books:
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
        self._asked: list[_Asked] = []
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="books", daemon=True)
        self._thread.start()

    def integrity(self) -> Future[str]:
        """The verdict. Fails with DeadlineExceeded if the engine hangs, NodeUnavailable once closed."""
        return self._ask(None)

    def audit(self, show: Show[R]) -> Future[list[R]]:
        """All pieces of the audit. Fails like `integrity`."""
        return self._ask(show)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(_STOP_S)

    def _ask(self, show: Callable[[KvAudit], Iterator[Any]] | None) -> Future[Any]:
        answer: Future[Any] = Future()
        with self._changed:
            if self._closed:
                answer.set_exception(NodeUnavailable(STOPPED))
            else:
                self._asked.append(_Asked(show, answer))
                self._changed.notify()
        return answer

    def _run(self) -> None:
        rest_s = 0.0
        while asked := self._next_round(rest_s):
            rest_s = MIN_REST_S
            try:
                rest_s = max(rest_s, REST * self._serve(asked))
            except Exception as error:  # noqa: BLE001 - passed on through the futures
                for entry in asked:
                    _fail(entry, error)

    def _next_round(self, rest_s: float) -> list[_Asked]:
        """Wait `rest_s`, then for a query; all queries that have arrived by then. Empty: closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed, rest_s)
            self._changed.wait_for(lambda: self._closed or self._asked)
            asked, self._asked = self._asked, []
        if not self._closed:
            return asked
        for entry in asked:
            _fail(entry, NodeUnavailable(STOPPED))
        return []

    def _serve(self, asked: list[_Asked]) -> float:
        """Answer all from one audit; returns the seconds that it cost the engine. Raises DeadlineExceeded."""
        shown: dict[Any, Any] = {}
        ways = {entry.show for entry in asked if entry.show}
        if not ways:
            shown[None], took_s = self._look(self._verdict)
        else:
            audit, took_s = self._look(self._audit)
            shown[None] = audit.integrity
        for show in ways:
            shown[show], showing_s = _show(show(audit))
            took_s += showing_s
        for entry in asked:
            if entry.answer.set_running_or_notify_cancel():  # False: cancelled
                entry.answer.set_result(shown[entry.show])
        return took_s

    def _look(self, look: Callable[[], R]) -> tuple[R, float]:
        def timed() -> tuple[R, float]:
            began = time.perf_counter()
            return look(), time.perf_counter() - began

        call = self._run_engine_call(timed)
        try:
            return call.result(self._limit_s)
        except TimeoutError:
            call.cancel()
            raise DeadlineExceeded(f"no turn of the engine ended within {self._limit_s:g} s") from None


def _show(pieces: Iterator[R]) -> tuple[list[R], float]:
    """All pieces, with pauses between them, and the CPU seconds that they took."""
    shown: list[R] = []
    began = last = time.thread_time()
    for piece in pieces:
        shown.append(piece)
        now = time.thread_time()
        time.sleep(_SHOWING_REST * (now - last))
        last = now
    return shown, last - began


def _fail(entry: _Asked, error: Exception) -> None:
    if entry.answer.set_running_or_notify_cancel():
        entry.answer.set_exception(error)
