"""The engine's thread: events in, turns of the role, outputs out."""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from baton.messages import Load
from engine.step_counters import StepTotals
from node.events import Event, Output, Role
from node.wakeup import Wakeup

log = logging.getLogger(__name__)

GAUGE_PERIOD_S = 0.5

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Counts:
    """The engine's counters, for metrics. blocks: KV blocks by state. num_damaged_pieces: pieces of KV blocks with
    wrong checksums. steps: None without an engine."""

    blocks: Mapping[str, int]
    num_preemptions: int = 0
    num_damaged_pieces: int = 0
    steps: StepTotals | None = None


@dataclass(frozen=True, slots=True)
class Turn:
    """What one turn, or its first half, has produced.

    `num_handled`: how many events the role had handled by then. With it, the consumer drops outputs that the role made
    before it knew that their stream had ended (see `NodeLoop.post`). `counts` is None between two measurements.
    """

    outputs: list[Output]
    num_handled: int
    load: Load
    idle: bool
    counts: Counts | None


@dataclass(frozen=True, slots=True)
class EngineCall(Generic[T]):
    do: Callable[[], T]
    future: Future[T]

    def run(self) -> None:
        if not self.future.set_running_or_notify_cancel():
            return  # cancelled
        try:
            result = self.do()
        except Exception as error:  # noqa: BLE001 - passed on through the future
            self.future.set_exception(error)
        else:
            self.future.set_result(result)


class NodeLoop:
    """Runs a role on a thread of its own, which sleeps until an event, a wake-up or the role's next deadline.

    The thread sleeps while the device computes a step; the end of the step wakes it, as progress of a transfer does.

    `post`, `wake` and `run_engine_call` may be called from any thread, also before `start`. `listeners` are called in
    order on the asyncio loop on which `start` was called, for each half of a turn that has something to report. An
    exception on the thread ends it: `failed` is called with it on the asyncio loop, and the process is expected to
    exit. So it is with that of a listener, since outputs that were not sent are lost. `failed` is also called, with a
    TimeoutError, if a turn or a step takes longer than `turn_timeout_s`: a GPU may hang.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, turn_timeout_s: float = 300.0) -> None:
        self.clock = clock
        self._turn_timeout_s = turn_timeout_s
        self._turn_began: float | None = None  # None: asleep
        self._step_began: float | None = None  # None: the device is idle
        self._lock = threading.Lock()
        self._inbox: deque[Event | EngineCall[Any]] = deque()
        self._posted = itertools.count(1)
        self._num_handled = 0
        self._awake = Wakeup()
        self._stopping = False
        self._thread: threading.Thread | None = None
        self._reported: tuple[Load, bool] | None = None
        self._next_gauge = 0.0

    def post(self, event: Event | EngineCall[Any]) -> int:
        """Queue an event and return its number: once a `Turn` has a `num_handled` of at least that, the role has
        handled the event."""
        with self._lock:
            self._inbox.append(event)
            number = next(self._posted)
        self._awake.set()
        return number

    def wake(self) -> None:
        """Have a turn run soon: a transfer or the device made progress."""
        self._awake.set()

    def run_engine_call(self, call: Callable[[], T]) -> Future[T]:
        """Run `call` on the role's thread between two turns, after the events posted earlier; a future of its result,
        which never completes once the loop has stopped. A call that is cancelled before it begins is not run."""
        future: Future[T] = Future()
        self.post(EngineCall(call, future))
        return future

    def start(
        self,
        role: Role,
        listeners: Sequence[Callable[[Turn], None]],
        failed: Callable[[BaseException], None],
        count: Callable[[], Counts] = lambda: Counts({}),
    ) -> None:
        """Start the thread, from the asyncio loop of the listeners. `count` runs on the role's thread."""
        aio = asyncio.get_running_loop()

        def deliver(turn: Turn) -> None:
            try:
                for listener in listeners:
                    listener(turn)
            except Exception as error:  # the process's boundary: `failed` ends it
                log.critical("network side failed", exc_info=error)
                failed(error)

        def run() -> None:
            try:
                while not self._stopping:
                    self._turn(role, lambda turn: aio.call_soon_threadsafe(deliver, turn), count)
            except Exception as error:  # the process's boundary: `failed` ends it
                log.critical("engine thread failed", exc_info=error)
                aio.call_soon_threadsafe(failed, error)

        self._thread = threading.Thread(target=run, name="engine", daemon=True)
        self._thread.start()
        self._watch(aio, failed)

    def stop(self, timeout_s: float) -> bool:
        """End the thread after its current turn. False: it did not end in time."""
        self._stopping = True
        self._awake.set()
        if self._thread is not None:
            self._thread.join(timeout_s)
            return not self._thread.is_alive()
        return True

    def _watch(self, aio: asyncio.AbstractEventLoop, failed: Callable[[BaseException], None]) -> None:
        """Check again when the current turn or step would be late. Lateness is thus noticed within twice the limit."""
        if self._stopping:
            return
        limit = self._turn_timeout_s
        began = min((t for t in (self._turn_began, self._step_began) if t is not None), default=None)
        left = limit if began is None else began + limit - self.clock()
        if left > 0:
            aio.call_later(left, self._watch, aio, failed)
        else:
            failed(TimeoutError(f"a turn of the engine has not ended within {limit:g} s"))

    def _turn(self, role: Role, deliver: Callable[[Turn], object], count: Callable[[], Counts]) -> None:
        self._turn_began = self.clock()
        self._awake.clear()  # before the inbox is read, so that what comes later ends the wait below
        while self._inbox:
            taken = self._inbox.popleft()
            self._num_handled += 1
            if isinstance(taken, EngineCall):
                taken.run()
            else:
                role.handle(taken, self.clock())
        role.prepare(self.clock())
        self._tell(role, deliver, count, only_outputs=True)
        busy = role.compute(self.clock())
        self._step_began = role.device_busy_since
        self._tell(role, deliver, count)
        role.end_turn()
        self._turn_began = None
        if not busy:
            deadline = role.next_deadline()
            self._awake.wait(None if deadline is None else max(0.0, deadline - self.clock()))

    def _tell(
        self,
        role: Role,
        deliver: Callable[[Turn], object],
        count: Callable[[], Counts],
        only_outputs: bool = False,
    ) -> None:
        outputs = role.take_outputs()
        if only_outputs and not outputs:
            return
        state = role.load(), role.idle
        if not outputs and state == self._reported:
            return
        self._reported = state
        counts = None
        if state[1] or self.clock() >= self._next_gauge:
            counts, self._next_gauge = count(), self.clock() + GAUGE_PERIOD_S
        deliver(Turn(outputs, self._num_handled, *state, counts))
