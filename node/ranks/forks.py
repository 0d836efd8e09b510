"""The forked processes of ranks on this host: their heartbeats, their messages, why they were lost, and how they end.

A rank dies with the process that forked it, and that process ends when a rank dies or hangs: `RankForks.watch`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import mmap
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from baton.process.parent import die_with
from baton.process.signals import stop_signals
from node.limits import Limits

log = logging.getLogger(__name__)

BEAT_S = 0.2
MAX_MESSAGE = 64 * 1024
MAX_ERROR_CHARS = 4096
"""The most characters of an error that a rank reports. As JSON it has up to twelve times as many bytes, and a longer
message would be cut off."""
HAS_ENDED = "has ended"
ENDED_LOADING = "has ended while it loaded its part"


class LossReason(NamedTuple):
    """Why a rank was lost. is_secondary: it may have been lost only because another rank ended before."""

    text: str
    is_secondary: bool = False


def to_blame(reasons: Iterable[LossReason]) -> LossReason | None:
    """The first of these losses that is not secondary; else the first."""
    return min(reasons, key=lambda reason: reason.is_secondary, default=None)


class RankPipe(NamedTuple):
    """A forked rank's end of the pipe to the process that forked it. heartbeats: the counters of all these ranks; this
    rank increments number `heartbeat_index`. of_pool: for what it reports of its KV pool, see `send_of_pool`."""

    heartbeat_index: int
    heartbeats: mmap.mmap
    link: socket.socket
    of_pool: socket.socket

    def start_heartbeat(self) -> None:
        """Start to increment this rank's counter, on a thread of its own."""

        def beat() -> None:
            counts = memoryview(self.heartbeats).cast("q")
            while True:
                counts[self.heartbeat_index] += 1
                time.sleep(BEAT_S)

        threading.Thread(target=beat, name="heartbeat", daemon=True).start()

    def send(self, **message: Any) -> None:
        """Raises OSError if the other process has ended."""
        self.link.send(json.dumps(message).encode())

    def send_of_pool(self, **message: Any) -> None:
        """Send an answer or an event of its pool. On any thread. Does nothing if the other process has ended, which
        ends this one as well."""
        with contextlib.suppress(OSError):
            self.of_pool.send(json.dumps(message).encode())

    def receive(self) -> dict[str, Any]:
        """Wait for a message. Raises OSError if the other process has ended."""
        data = self.link.recv(MAX_MESSAGE)
        if not data:
            raise OSError("the other process has ended")
        message: dict[str, Any] = json.loads(data)
        return message

    def failed(self, error: Exception) -> None:
        """Report why this rank fails. A RuntimeError may be just the consequence of another rank's end."""
        with contextlib.suppress(OSError):
            text = (str(error) or repr(error))[:MAX_ERROR_CHARS]
            self.send(error=text, met=isinstance(error, RuntimeError))


@dataclass(slots=True)
class RankFork:
    """A forked rank, as seen by the process that forked it. of_pool: see RankPipe. num_silent: slices of BEAT_S in
    which this process listened and the rank's counter did not change (see `baton.rpc.silence`)."""

    number: int
    pid: int
    pidfd: int
    link: socket.socket
    of_pool: socket.socket
    ready: bool = False
    beats: int = 0
    num_silent: int = 0

    def send(self, **message: Any) -> None:
        """Raises OSError if it has ended."""
        self.link.send(json.dumps(message).encode())

    def peek(self) -> dict[str, Any] | None:
        """The next message, left in the socket; empty: there is none yet; None: the rank has ended without a
        message."""
        if not select.select([self.link], [], [], 0)[0]:
            return {}
        try:
            data = self.link.recv(MAX_MESSAGE, socket.MSG_PEEK)
        except ConnectionResetError:  # reported once if the rank ended without reading; its messages follow
            data = self.link.recv(MAX_MESSAGE, socket.MSG_PEEK)
        message: dict[str, Any] | None = json.loads(data) if data else None
        return message

    def take_ready(self, message: dict[str, Any] | None) -> bool:
        """Consume the message that `peek` returned, if it reports that the rank is ready."""
        if not message or "error" in message:
            return False
        self.link.recv(MAX_MESSAGE)
        self.num_silent, self.ready = 0, True
        return True

    @property
    def has_ended_in_order(self) -> bool:
        ended = os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        return ended is not None and ended.si_code == os.CLD_EXITED and ended.si_status == 0

    def loss_reason(self, why: str) -> LossReason:
        """Why the rank is lost, with the error that it reported itself."""
        message = self.peek() or {}
        is_secondary = bool(message.get("met"))
        if not self.ready and why == HAS_ENDED:
            detail = f": {message['error']}" if "error" in message else f" {ENDED_LOADING}"
            return LossReason(f"rank {self.number}{detail}", is_secondary)
        because = f" ({message['error']})" if "error" in message else ""
        return LossReason(f"rank {self.number} (process {self.pid}) {why}{because}", is_secondary)


OnLost = Callable[[RankFork, LossReason], None]


class RankForks:
    """Some of a node's ranks, as `fork` has forked them. `end` ends them."""

    def __init__(self, forks: list[RankFork], heartbeats: mmap.mmap, limits: Limits) -> None:
        self.all, self.limits = forks, limits
        self._heartbeats = heartbeats
        self._over = threading.Event()
        self._watcher: threading.Thread | None = None

    @property
    def ready(self) -> bool:
        return all(fork.ready for fork in self.all)

    def watch(self, on_lost: OnLost) -> None:
        """Start to watch the ranks, on a thread of its own, until one is lost because it has died or hangs."""
        if self.all:
            self._watcher = threading.Thread(target=self._watch, args=(on_lost,), name="ranks", daemon=True)
            self._watcher.start()

    def unwatch(self) -> None:
        self._over.set()
        if self._watcher is not None:
            self._watcher.join()

    def loss_reason(self, timeout_s: float) -> LossReason | None:
        """Why a rank has failed or ended, if that is known in time. A secondary loss is returned only if there is no
        other, so that the rank that failed first is blamed."""
        silent, deadline = {fork.link for fork in self.all}, time.monotonic() + timeout_s
        while silent and (left_s := deadline - time.monotonic()) > 0:
            silent -= set(select.select(silent, [], [], left_s)[0])
        failed = [fork for fork in self.all if (message := fork.peek()) is None or "error" in message]
        return to_blame(fork.loss_reason(HAS_ENDED) for fork in failed)

    def end(self, timeout_s: float) -> list[LossReason]:
        """Wait for the ranks to end, and kill those that have not ended in time. Returns why ranks were lost: those
        that ended before that, but not in order."""
        self.unwatch()
        deadline, lost = time.monotonic() + timeout_s, []
        for fork in self.all:
            if not select.select([fork.pidfd], [], [], max(0.0, deadline - time.monotonic()))[0]:
                signal.pidfd_send_signal(fork.pidfd, signal.SIGKILL)
            elif not fork.has_ended_in_order:
                lost.append(fork.loss_reason(HAS_ENDED))
            os.waitpid(fork.pid, 0)
            os.close(fork.pidfd)
            fork.link.close()
        return lost

    def _watch(self, on_lost: OnLost) -> None:
        counts = memoryview(self._heartbeats).cast("q")
        while not self._over.is_set():
            died, _, _ = select.select([fork.pidfd for fork in self.all], [], [], BEAT_S)
            for index, fork in enumerate(self.all):
                beats = counts[index]
                fork.num_silent = 0 if beats != fork.beats else fork.num_silent + 1
                fork.beats = beats
                why = HAS_ENDED if fork.pidfd in died else self._silence(fork)
                if why and not self._over.is_set():
                    on_lost(fork, fork.loss_reason(why))
                    return

    def _silence(self, fork: RankFork) -> str:
        limit_s = self.limits.silence if fork.ready else self.limits.loading_silence
        return f"has been silent for {limit_s:g} s" if fork.num_silent * BEAT_S >= limit_s else ""


def fork(numbers: Iterable[int], run: Callable[[int, RankPipe], None], limits: Limits) -> RankForks:
    """Fork a process for each of these ranks, which calls `run` and never returns. Call it on the main thread, before
    this process starts others or uses a GPU."""
    ranks = list(numbers)
    heartbeats = mmap.mmap(-1, 8 * max(1, len(ranks)))
    return RankForks([_fork(index, number, heartbeats, run) for index, number in enumerate(ranks)], heartbeats, limits)


def _fork(index: int, number: int, heartbeats: mmap.mmap, run: Callable[[int, RankPipe], None]) -> RankFork:
    pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(2)]
    ours, theirs = zip(*pairs, strict=True)
    parent = os.getpid()
    pid = os.fork()
    for end in theirs if pid else ours:
        end.close()
    if pid:
        return RankFork(number, pid, os.pidfd_open(pid), *ours)
    pipe = RankPipe(index, heartbeats, *theirs)
    try:
        for stop in stop_signals():
            signal.signal(stop, signal.SIG_IGN)  # the process that forked it ends it
        if die_with(parent):
            pipe.start_heartbeat()
            run(number, pipe)
    except Exception as error:  # the process's boundary
        log.debug("rank failed", exc_info=error)
        pipe.failed(error)
        os._exit(1)
    os._exit(0)
