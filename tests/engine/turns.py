"""Ranks that are threads, of which one runs at a time, and their copy engines, in an order that a seed decides."""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from collections.abc import Callable, Iterable
from random import Random

from engine.model.parallel.sequence_parallel import Copy

MOST_TURNS = 100_000


class Turns:
    """The order in which ranks and copy engines do what they do next. A rank's turn ends at `pause`, before it queues
    copies and while it waits; a copy engine's with half of a copy."""

    def __init__(self, size: int, seed: int) -> None:
        self._random = Random(seed)
        self._go = [threading.Semaphore(0) for _ in range(size)]
        self._back = threading.Semaphore(0)
        self._ready: list[Callable[[], bool] | None] = [lambda: True] * size  # None: the rank has ended
        self.queues: list[deque[Copy]] = [deque() for _ in range(size)]
        self._rank = threading.local()
        self.errors: list[BaseException] = []

    def run(self, program: Callable[[int], None]) -> None:
        """Run the program on all ranks. Raises what one of them raised; AssertionError if all wait for ever."""
        threads = [
            threading.Thread(target=self._run, args=(program, rank), daemon=True) for rank in range(len(self._go))
        ]
        for thread in threads:
            thread.start()
        for _ in range(MOST_TURNS):
            engines = [rank for rank, queue in enumerate(self.queues) if queue]
            ranks = [rank for rank, ready in enumerate(self._ready) if ready is not None and ready()]
            if not engines and not ranks:
                break
            turn = self._random.randrange(len(engines) + len(ranks))
            if turn < len(engines):
                self._copy_half(engines[turn])
            else:
                self._go[ranks[turn - len(engines)]].release()
                self._back.acquire()
            if self.errors:
                raise self.errors[0]
        assert not any(self._ready), "ranks wait for ever"
        for thread in threads:
            thread.join()

    def pause(self, ready: Callable[[], bool] = lambda: True) -> None:
        """End this rank's turn. The next one begins when `ready`."""
        rank = self._rank.number
        self._ready[rank] = ready
        self._back.release()
        self._go[rank].acquire()

    def _run(self, program: Callable[[int], None], rank: int) -> None:
        self._rank.number = rank
        self._go[rank].acquire()
        try:
            program(rank)
        except BaseException as error:  # noqa: BLE001 - raised by `run`
            self.errors.append(error)
        self._ready[rank] = None
        self._back.release()

    def _copy_half(self, rank: int) -> None:
        """A flag is copied at once; of rows, the second half may come much later."""
        to, source, num_bytes = self.queues[rank].popleft()
        half = num_bytes if num_bytes <= 4 else num_bytes // 2
        ctypes.memmove(to, source, half)
        if half < num_bytes:
            self.queues[rank].appendleft(Copy(to + half, source + half, num_bytes - half))


class CopiesInTurn:
    """Implements CopyQueue."""

    is_captured = False

    def __init__(self, turns: Turns, rank: int) -> None:
        self._turns, self._queue = turns, turns.queues[rank]

    def start(self, copies: Iterable[Copy]) -> None:
        self._turns.pause()
        self._queue.extend(copies)

    def join(self) -> None:
        self._turns.pause(lambda: not self._queue)
