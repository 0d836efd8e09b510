"""The other hosts of a node whose ranks are spread over several, as the one with rank 0 sees them.

    each host comes, and each of its ranks -> all are told where ranks meet
    -> over a stream to each rank: steps, and what moves KV; over a link to each host, which watches its ranks: beats

How they join: `node.ranks.joining`; what runs on them: `node.ranks.headless`. A host that dies, hangs or loses a rank
ends the node, which names it; and when the node ends, it ends its hosts.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import select
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from baton.errors import TransferError
from kv_transfer.remote import RemotePool
from kv_transfer.transports.host import address_of
from node.peers.links import PeerLink
from node.ranks.forks import BEAT_S, HAS_ENDED, Limits, Word
from node.ranks.joining import HOST, RANK, JoiningHosts
from node.ranks.stream import RankStream
from node.settings import NodeSettings

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

log = logging.getLogger(__name__)

_LEAVE_S = 2.0
"""For hosts to end in order, beyond the time that their ranks have."""
Lost = Callable[[Word, bool], None]
"""A rank or a host is lost; and whether all ranks of other hosts were ready."""


class _HostRank:
    """A rank on another host. Implements `kv_transfer.remote.Wire`. `heard` is for one thread."""

    def __init__(self, number: int, stream: RankStream) -> None:
        self.number, self.stream = number, stream
        self.pool = RemotePool(self)
        self.ready: Future[None] = Future()
        self._numbers = itertools.count()
        self._asked: dict[int, Future[dict[str, Any]]] = {}
        self._lock = threading.Lock()  # guards the next one, and what was asked
        self._is_lost = False

    def say(self, **said: Any) -> None:
        with contextlib.suppress(OSError):  # the watch knows
            self.stream.say(**said)

    def ask(self, timeout_s: float, **said: Any) -> dict[str, Any]:
        number, answer = next(self._numbers), Future[dict[str, Any]]()
        with self._lock:
            if self._is_lost:
                raise TransferError(f"rank {self.number} is lost")
            self._asked[number] = answer
        self.say(id=number, **said)
        try:
            found = answer.result(timeout_s)
        except TimeoutError:
            raise TransferError(f"rank {self.number} has not answered for {timeout_s:g} s") from None
        finally:
            with self._lock:
                self._asked.pop(number, None)
        if "error" in found:
            raise TransferError(str(found["error"]))
        return found

    def heard(self) -> None:
        """Take in what has come. Raises OSError if the rank has ended, and anything else for nonsense."""
        for frame in self.stream.receive():
            self._heard(frame.said())

    def _heard(self, said: dict[str, Any]) -> None:
        if "answers" in said:
            with self._lock:
                answer = self._asked.get(said["answers"])
            if answer is not None and not answer.done():
                answer.set_result(said)
        elif "ready" in said and not self.ready.done():
            self.ready.set_result(None)
        else:
            self.pool.heard(said)

    def lost(self) -> None:
        """Nothing comes any more."""
        with self._lock:
            self._is_lost = True
            asked = list(self._asked.values())
        for answer in asked:
            if not answer.done():
                answer.set_result({"error": f"rank {self.number} is lost"})
        if not self.ready.done():
            self.ready.set_exception(RuntimeError(f"rank {self.number} {HAS_ENDED}"))


class OtherHosts:
    """Implements `node.ranks.ranks.HostRanks`: the ranks of all other hosts, once they have come (`meet`)."""

    def __init__(self, settings: NodeSettings, limits: Limits) -> None:
        self._settings, self._limits = settings, limits
        self._links: dict[int, PeerLink] = {}
        self._ranks: list[_HostRank] = []
        self._state = threading.Condition()
        self._word: Word | None = None
        self._told_to_stop = False
        self._stop: Callable[[], object] | None = None
        self._over = threading.Event()
        self._in_order = False
        self._ended: set[int] = set()
        """Hosts that have said that they end with the node."""
        self._threads: list[threading.Thread] = []
        self._on_lost: Lost = lambda word, ready: None

    def meet(self, fingerprint: str, lost: Lost) -> str:
        """Wait for all hosts and their ranks. fingerprint: of the weights as they are served. lost: is called, on
        another thread, from then on. Returns this host's address. Raises StartupError."""
        joined = JoiningHosts(self._settings, fingerprint, self._limits).wait()
        self._on_lost = lost
        self._links = {number: link for (kind, number), link in joined.items() if kind == HOST}
        self._joined_ranks = {number: link for (kind, number), link in sorted(joined.items()) if kind == RANK}
        for number, link in self._links.items():
            self._start(f"host-{number}", self._watch, number, link)
        return address_of(self._settings.master_addr) or self._settings.master_addr

    @property
    def ready(self) -> bool:
        return bool(self._ranks) and all(rank.ready.done() and not rank.ready.exception() for rank in self._ranks)

    def begin(self, **said: Any) -> None:
        for number, link in self._joined_ranks.items():
            try:
                link.send(port=said["port"])
                self._ranks.append(_HostRank(number, RankStream(link.release())))
            except OSError as error:
                raise RuntimeError(f"rank {number} {HAS_ENDED}") from error
        self._start("rank-streams", self._read)

    def pools(self) -> Sequence[RemotePool]:
        for rank in self._ranks:
            rank.ready.result()  # the watch bounds this wait
        return [rank.pool for rank in self._ranks]

    def send(self, kind: int, array: NDArray[np.int32]) -> None:
        for rank in self._ranks:
            rank.stream.step(kind, array)

    def word(self, timeout_s: float) -> Word | None:
        with self._state:
            self._state.wait_for(lambda: self._word is not None and not self._word.met, timeout_s)
            return self._word

    def limit_sends(self, timeout_s: float) -> None:
        for rank in self._ranks:
            rank.stream.limit_sends(timeout_s)

    def serves(self, stop: Callable[[], object]) -> None:
        """The node serves from now on, and what may hold Python's lock is over. stop: is called, on another thread,
        when a host is told to stop, until the node ends (`stop`)."""
        for link in self._links.values():
            with contextlib.suppress(OSError):  # the watch knows
                link.send(serves=True)
        with self._state:
            self._stop, told = stop, self._told_to_stop
        if told:
            stop()

    def stop(self, why: str) -> None:
        """Tell all hosts that the node ends. why: the loss that ends it; empty: it ends in order. From now on nobody is
        lost."""
        self._over.set()
        self._in_order = not why
        for link in self._links.values():
            with contextlib.suppress(OSError):  # it has ended already
                link.send(**({"lost": why} if why else {"stop": True}))

    def end(self, timeout_s: float) -> None:
        self._over.set()
        deadline = time.monotonic() + timeout_s + _LEAVE_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        for number, link in self._links.items():
            self._take_leave(number, link, deadline)
        for rank in self._ranks:
            rank.stream.close()

    def _take_leave(self, number: int, link: PeerLink, deadline: float) -> None:
        """Wait until the host has ended. One that does not say so was lost before it heard that the node ends; the node
        has met that otherwise, and ended in order."""
        with contextlib.suppress(OSError):  # it has closed the link
            while (left_s := deadline - time.monotonic()) > 0 and select.select([link], [], [], left_s)[0]:
                for said in link.receive():
                    self._heard(number, said)
        if self._in_order and number not in self._ended:
            word = self._word or Word(f"node rank {number} {HAS_ENDED}")
            log.critical("%s: the node ends", word.text)
        link.close()

    def _start(self, name: str, run: Callable[..., object], *arguments: Any) -> None:
        thread = threading.Thread(target=run, args=arguments, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    # ---- what hosts say ----

    def _watch(self, number: int, link: PeerLink) -> None:
        next_beat = time.monotonic()
        while not self._over.is_set():
            try:
                if select.select([link], [], [], max(0.0, next_beat - time.monotonic()))[0]:
                    for said in link.receive():
                        self._heard(number, said)
                if time.monotonic() >= next_beat:
                    next_beat = time.monotonic() + BEAT_S
                    self._beat(number, link)
            except Exception as error:  # the thread's boundary: the host is lost, whatever came of it
                log.debug("host lost", exc_info=error)
                if not self._over.is_set():
                    self._lost(Word(f"node rank {number} {HAS_ENDED}"))
                return

    def _beat(self, number: int, link: PeerLink) -> None:
        """Silence counts in slices in which this process listened, as in `baton.silence`."""
        link.send(beat=True)
        link.num_silent += 1
        limit_s = self._limits.silence if self.ready else self._limits.loading_silence
        if link.num_silent * BEAT_S > limit_s:
            self._lost(Word(f"node rank {number} has been silent for {limit_s:g} s"))

    def _heard(self, number: int, said: dict[str, Any]) -> None:
        if "lost" in said:
            self._lost(Word(f"node rank {number}: {said['lost']}", bool(said.get("met"))))
        if "ended" in said:
            self._ended.add(number)
        if "stopping" in said and not self._over.is_set():
            with self._state:
                self._told_to_stop, stop = True, self._stop
            if stop is not None:
                stop()

    def _lost(self, word: Word) -> None:
        """The first that has not met the end of another is to blame."""
        with self._state:
            if self._word is None or (self._word.met and not word.met):
                self._word = word
            self._state.notify_all()
        if not self._over.is_set():
            self._on_lost(word, self.ready)

    # ---- what their ranks say ----

    def _read(self) -> None:
        live = {rank.stream.fileno(): rank for rank in self._ranks}
        while live and not self._over.is_set():
            for ready in select.select(list(live), [], [], BEAT_S)[0]:
                rank = live[ready]
                try:
                    rank.heard()
                except Exception as error:  # noqa: BLE001 - the thread's boundary: nonsense is a loss, whatever it does
                    del live[ready]
                    rank.lost()
                    self._rank_lost(rank, error)

    def _rank_lost(self, rank: _HostRank, error: Exception) -> None:
        """Its host says why, if it is not lost itself."""
        log.debug("rank lost", exc_info=error)
        if self.word(self._limits.report / 2) is None and not self._over.is_set():
            self._lost(Word(f"rank {rank.number} {HAS_ENDED}"))
