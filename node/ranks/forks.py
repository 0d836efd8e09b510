"""The processes of ranks on this host, as the one that forked them sees them: they beat, say why they fail, and end.

A rank dies with the process that forked it, which ends when one of them dies or hangs: `RankForks.watch`.
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
from typing import TYPE_CHECKING, Any, NamedTuple

from baton.parent import die_with
from baton.signals import stop_signals

if TYPE_CHECKING:
    from node.settings import NodeSettings

log = logging.getLogger(__name__)

BEAT_S = 0.2
MAX_MESSAGE = 64 * 1024
HAS_ENDED = "has ended"
ENDED_LOADING = "has ended while it loaded its part"


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds. silence: a rank whose heart has not beaten for so long hangs, and so does a host that has said nothing;
    loading_silence: while it imports and loads, which may hold Python's lock. report: what rank 0 has to say why a
    start failed, before the node just ends. close: what ranks have to end by themselves. join: until all hosts have
    come."""

    silence: float = 5.0
    loading_silence: float = 60.0
    report: float = 5.0
    close: float = 5.0
    join: float = 300.0

    @classmethod
    def of(cls, settings: NodeSettings) -> Limits:
        return cls(silence=settings.silence_timeout, join=settings.distributed_timeout_seconds)


class Word(NamedTuple):
    """Why a rank is lost. met: it may only have met the end of another."""

    text: str
    met: bool = False


class Ends(NamedTuple):
    """What a forked rank has of the process that forked it. hearts: of all these ranks, of which its own is number
    `place`. pool: a memfd for its part of the KV pool."""

    place: int
    hearts: mmap.mmap
    link: socket.socket
    pool: int

    def beat(self) -> None:
        """From now on, on a thread of its own."""

        def beat() -> None:
            counts = memoryview(self.hearts).cast("q")
            while True:
                counts[self.place] += 1
                time.sleep(BEAT_S)

        threading.Thread(target=beat, name="heart", daemon=True).start()

    def say(self, **said: Any) -> None:
        """Raises OSError if the other process has ended."""
        self.link.send(json.dumps(said).encode())

    def hear(self) -> dict[str, Any]:
        """Wait for it. Raises OSError if the other process has ended."""
        data = self.link.recv(MAX_MESSAGE)
        if not data:
            raise OSError("the other process has ended")
        said: dict[str, Any] = json.loads(data)
        return said

    def failed(self, error: Exception) -> None:
        """Say why. A RuntimeError may be what another rank's end looks like from here."""
        with contextlib.suppress(OSError):
            self.say(error=str(error) or repr(error), met=isinstance(error, RuntimeError))


@dataclass(slots=True)
class RankFork:
    """A rank's process. pool: its memfd. num_silent: slices of BEAT_S in which this process listened and the heart did
    not beat (see `baton.silence`)."""

    number: int
    pid: int
    pidfd: int
    link: socket.socket
    pool: int
    ready: bool = False
    beats: int = 0
    num_silent: int = 0

    def tell(self, **said: Any) -> None:
        """Raises OSError if it has ended."""
        self.link.send(json.dumps(said).encode())

    def heard(self) -> dict[str, Any] | None:
        """What it has said that nobody has taken in; nothing so far; or None, if it has ended without a word."""
        if not select.select([self.link], [], [], 0)[0]:
            return {}
        try:
            data = self.link.recv(MAX_MESSAGE, socket.MSG_PEEK)
        except ConnectionResetError:  # told once of one that has ended without reading; what it said comes after that
            data = self.link.recv(MAX_MESSAGE, socket.MSG_PEEK)
        said: dict[str, Any] | None = json.loads(data) if data else None
        return said

    def take_ready(self, said: dict[str, Any] | None) -> bool:
        """Take in what `heard` returned, if it says that the rank is ready."""
        if not said or "error" in said:
            return False
        self.link.recv(MAX_MESSAGE)
        self.num_silent, self.ready = 0, True
        return True

    def word(self, why: str) -> Word:
        """Of a rank that is lost, with what it said itself."""
        said = self.heard() or {}
        met = bool(said.get("met"))
        if not self.ready and why == HAS_ENDED:
            text = f"rank {self.number}: {said['error']}" if "error" in said else f"rank {self.number} {ENDED_LOADING}"
            return Word(text, met)
        because = f" ({said['error']})" if "error" in said else ""
        return Word(f"rank {self.number} (process {self.pid}) {why}{because}", met)


Lost = Callable[[RankFork, Word], None]


class RankForks:
    """Some of a node's ranks, forked by `fork`. `end` ends them."""

    def __init__(self, forks: list[RankFork], hearts: mmap.mmap, limits: Limits) -> None:
        self.all, self.limits = forks, limits
        self._hearts = hearts
        self._over = threading.Event()
        self._watcher: threading.Thread | None = None

    @property
    def ready(self) -> bool:
        return all(fork.ready for fork in self.all)

    def watch(self, lost: Lost) -> None:
        """From now on, on a thread of its own, until one is lost: it has died, or hangs."""
        if self.all:
            self._watcher = threading.Thread(target=self._watch, args=(lost,), name="ranks", daemon=True)
            self._watcher.start()

    def unwatch(self) -> None:
        self._over.set()
        if self._watcher is not None:
            self._watcher.join()

    def word(self, timeout_s: float) -> Word | None:
        """Why a rank has failed or ended, of those that a failure here has to do with: one that has met the end of
        another only if nobody else is to blame. None: nothing is known in that time."""
        silent, deadline = {fork.link for fork in self.all}, time.monotonic() + timeout_s
        while silent and (left_s := deadline - time.monotonic()) > 0:
            silent -= set(select.select(silent, [], [], left_s)[0])
        met = None
        for fork in self.all:
            said = fork.heard()
            if said is None or "error" in said:
                word = fork.word(HAS_ENDED)
                if not word.met:
                    return word
                met = met or word
        return met

    def ended(self) -> list[RankFork]:
        """Those that have ended."""
        return [fork for fork in self.all if select.select([fork.pidfd], [], [], 0)[0]]

    def end(self, timeout_s: float) -> None:
        """Wait for them, and kill those that have not ended by themselves in that time."""
        self.unwatch()
        deadline = time.monotonic() + timeout_s
        for fork in self.all:
            if not select.select([fork.pidfd], [], [], max(0.0, deadline - time.monotonic()))[0]:
                signal.pidfd_send_signal(fork.pidfd, signal.SIGKILL)
            os.waitpid(fork.pid, 0)
            os.close(fork.pidfd)
            os.close(fork.pool)
            fork.link.close()

    def _watch(self, lost: Lost) -> None:
        counts = memoryview(self._hearts).cast("q")
        while not self._over.is_set():
            died, _, _ = select.select([fork.pidfd for fork in self.all], [], [], BEAT_S)
            for index, fork in enumerate(self.all):
                beats = counts[index]
                fork.num_silent = 0 if beats != fork.beats else fork.num_silent + 1
                fork.beats = beats
                why = HAS_ENDED if fork.pidfd in died else self._silence(fork)
                if why and not self._over.is_set():
                    lost(fork, fork.word(why))
                    return

    def _silence(self, fork: RankFork) -> str:
        limit_s = self.limits.silence if fork.ready else self.limits.loading_silence
        return f"has been silent for {limit_s:g} s" if fork.num_silent * BEAT_S >= limit_s else ""


def fork(numbers: Iterable[int], run: Callable[[int, Ends], None], limits: Limits) -> RankForks:
    """Fork the ranks of these numbers, which `run`. Call it on the main thread, before this process has others, and
    before it uses a GPU. The forks never return."""
    ranks = list(numbers)
    hearts = mmap.mmap(-1, 8 * max(1, len(ranks)))
    return RankForks([_fork(index, number, hearts, run) for index, number in enumerate(ranks)], hearts, limits)


def _fork(index: int, number: int, hearts: mmap.mmap, run: Callable[[int, Ends], None]) -> RankFork:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pool = os.memfd_create(f"kv-pool-{number}")
    parent = os.getpid()
    pid = os.fork()
    if pid:
        theirs.close()
        return RankFork(number, pid, os.pidfd_open(pid), ours, pool)
    ours.close()
    ends = Ends(index, hearts, theirs, pool)
    try:
        for stop in stop_signals():
            signal.signal(stop, signal.SIG_IGN)  # who has forked it ends it
        if die_with(parent):
            ends.beat()
            run(number, ends)
    except Exception as error:  # the process's boundary
        log.debug("rank failed", exc_info=error)
        ends.failed(error)
        os._exit(1)
    os._exit(0)
