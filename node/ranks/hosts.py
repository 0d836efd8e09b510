"""The other hosts of a node with ranks on several hosts, as seen by the host with rank 0.

    each host joins, and each of its ranks -> all are sent the address of the TCPStore
    -> a stream to each rank carries steps and moves of KV; a link to each host, which watches its ranks, heartbeats

How they join: `node.ranks.joining`; what runs on them: `node.ranks.headless`. If a host dies, hangs or loses a rank,
the node ends and names that host in its log. When the node ends, it ends its hosts.
"""

from __future__ import annotations

import contextlib
import logging
import select
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from kv_transfer.remote import RemotePool
from kv_transfer.transports.host import address_of
from node.limits import Limits
from node.peers.links import PeerLink
from node.ranks.forks import BEAT_S, HAS_ENDED, LossReason
from node.ranks.joining import HOST, RANK, JoiningHosts
from node.ranks.pool_wire import PoolWire
from node.ranks.stream import RankStream
from node.settings import NodeSettings

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

log = logging.getLogger(__name__)

_LEAVE_S = 2.0
"""Time for hosts to end in order, beyond the time that their ranks have."""
OnLost = Callable[[LossReason, bool], None]
"""Called with why a rank or a host was lost, and whether all ranks of other hosts were ready."""


class _HostRank:
    """A rank on another host. `receive` is for one thread."""

    def __init__(self, number: int, stream: RankStream) -> None:
        self.number, self.stream = number, stream
        self.wire = PoolWire(number, lambda message: stream.send_message(**message))
        self.ready: Future[None] = Future()

    @property
    def pool(self) -> RemotePool:
        return self.wire.pool

    def receive(self) -> None:
        """Handle the messages that have arrived. Raises OSError if the rank has ended, anything else for malformed
        ones."""
        for frame in self.stream.receive():
            self._handle(frame.message())

    def _handle(self, message: dict[str, Any]) -> None:
        if "ready" in message and not self.ready.done():
            self.ready.set_result(None)
        else:
            self.wire.handle(message)

    def lost(self) -> None:
        """Fail everything that waits for the rank."""
        self.wire.lost()
        if not self.ready.done():
            self.ready.set_exception(RuntimeError(f"rank {self.number} {HAS_ENDED}"))


class OtherHosts:
    """Implements `node.ranks.ranks.HostRanks`: the ranks of all other hosts, once they have joined
    (`wait_for_hosts`)."""

    def __init__(self, settings: NodeSettings, limits: Limits) -> None:
        self._settings, self._limits = settings, limits
        self._links: dict[int, PeerLink] = {}
        self._ranks: list[_HostRank] = []
        self._state = threading.Condition()
        self._loss_reason: LossReason | None = None
        self._stop_requested = False
        self._stop: Callable[[], object] | None = None
        self._over = threading.Event()
        self._in_order = False
        self._ended: set[int] = set()
        """The hosts that have reported that they end with the node."""
        self._threads: list[threading.Thread] = []
        self._on_lost: OnLost = lambda reason, ready: None

    def wait_for_hosts(self, fingerprint: str, on_lost: OnLost) -> str:
        """Wait for all hosts and their ranks. fingerprint: of the weights as they are served. on_lost: called on
        another thread, from then on. Returns this host's address. Raises StartupError."""
        joined = JoiningHosts(self._settings, fingerprint, self._limits).wait()
        self._on_lost = on_lost
        self._links = {number: link for (kind, number), link in joined.items() if kind == HOST}
        self._joined_ranks = {number: link for (kind, number), link in sorted(joined.items()) if kind == RANK}
        for number, link in self._links.items():
            self._start(f"host-{number}", self._watch, number, link)
        return address_of(self._settings.master_addr) or self._settings.master_addr

    @property
    def ready(self) -> bool:
        return bool(self._ranks) and all(rank.ready.done() and not rank.ready.exception() for rank in self._ranks)

    def start_loading(self, **rendezvous: Any) -> None:
        for number, link in self._joined_ranks.items():
            try:
                link.send(port=rendezvous["port"])
                self._ranks.append(_HostRank(number, RankStream(link.release())))
            except OSError as error:
                raise RuntimeError(f"rank {number} {HAS_ENDED}") from error
        self._start("rank-streams", self._read)

    def pools(self) -> Sequence[RemotePool]:
        for rank in self._ranks:
            rank.ready.result()  # the watcher bounds this wait
        return [rank.pool for rank in self._ranks]

    def send(self, kind: int, array: NDArray[np.int32]) -> None:
        for rank in self._ranks:
            rank.stream.send_step(kind, array)

    def loss_reason(self, timeout_s: float) -> LossReason | None:
        with self._state:
            self._state.wait_for(self._is_primary_known, timeout_s)
            return self._loss_reason

    def _is_primary_known(self) -> bool:
        return self._loss_reason is not None and not self._loss_reason.is_secondary

    def limit_sends(self, timeout_s: float) -> None:
        for rank in self._ranks:
            rank.stream.limit_sends(timeout_s)

    def serves(self, stop: Callable[[], object]) -> None:
        """The node serves from now on, so nothing holds the GIL for long any more. stop: called on another thread when
        a host is told to stop, until the node ends (`stop`)."""
        for link in self._links.values():
            with contextlib.suppress(OSError):  # the watcher notices
                link.send(serves=True)
        with self._state:
            self._stop, stop_requested = stop, self._stop_requested
        if stop_requested:
            stop()

    def stop(self, why: str, failed: bool = False) -> None:
        """Tell all hosts that the node ends. why: the loss that ends it; empty: all ranks end in order. failed: the
        node has failed nevertheless, so hosts exit as it does. From now on no loss is reported."""
        self._over.set()
        self._in_order = not why
        for link in self._links.values():
            with contextlib.suppress(OSError):  # it has ended already
                link.send(**({"lost": why} if why else {"stop": True, "failed": failed}))

    def end(self, timeout_s: float) -> list[LossReason]:
        self._over.set()
        deadline = time.monotonic() + timeout_s + _LEAVE_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        for number, link in self._links.items():
            self._wait_for_end(number, link, deadline)
        for rank in self._ranks:
            rank.stream.close()
        lost = [number for number in self._links if number not in self._ended] if self._in_order else []
        return [self._loss_reason or LossReason(f"node rank {number} {HAS_ENDED}") for number in lost]

    def _wait_for_end(self, number: int, link: PeerLink, deadline: float) -> None:
        """Wait until the host has ended. One that does not report its end was lost, or has lost a rank, before it
        learned that the node ends; the node has noticed that in another way, and has ended in order."""
        with contextlib.suppress(OSError):  # it has closed the link
            while (left_s := deadline - time.monotonic()) > 0 and select.select([link], [], [], left_s)[0]:
                for message in link.receive():
                    self._handle(number, message)
        link.close()

    def _start(self, name: str, run: Callable[..., object], *arguments: Any) -> None:
        thread = threading.Thread(target=run, args=arguments, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    # ---- messages of hosts ----

    def _watch(self, number: int, link: PeerLink) -> None:
        next_beat = time.monotonic()
        while not self._over.is_set():
            try:
                if select.select([link], [], [], max(0.0, next_beat - time.monotonic()))[0]:
                    for message in link.receive():
                        self._handle(number, message)
                if time.monotonic() >= next_beat:
                    next_beat = time.monotonic() + BEAT_S
                    self._beat(number, link)
            except Exception as error:  # the thread's boundary: the host is lost, whatever the error is
                log.debug("host lost", exc_info=error)
                if not self._over.is_set():
                    self._lost(LossReason(f"node rank {number} {HAS_ENDED}"))
                return

    def _beat(self, number: int, link: PeerLink) -> None:
        """Silence is counted in time slices in which this process listened, as in `baton.rpc.silence`."""
        with contextlib.suppress(OSError):  # `receive` notices, after it has returned why the host ends
            link.send(beat=True)
        link.num_silent += 1
        limit_s = self._limits.silence if self.ready else self._limits.loading_silence
        if link.num_silent * BEAT_S > limit_s:
            self._lost(LossReason(f"node rank {number} has been silent for {limit_s:g} s"))

    def _handle(self, number: int, message: dict[str, Any]) -> None:
        if "lost" in message:
            self._lost(LossReason(f"node rank {number}: {message['lost']}", bool(message.get("met"))))
        if "ended" in message:
            self._ended.add(number)
        if "stopping" in message and not self._over.is_set():
            with self._state:
                self._stop_requested, stop = True, self._stop
            if stop is not None:
                stop()

    def _lost(self, reason: LossReason) -> None:
        """Blame the first loss that is not secondary."""
        with self._state:
            if self._loss_reason is None or (self._loss_reason.is_secondary and not reason.is_secondary):
                self._loss_reason = reason
            self._state.notify_all()
        if not self._over.is_set():
            self._on_lost(reason, self.ready)

    # ---- messages of their ranks ----

    def _read(self) -> None:
        live = {rank.stream.fileno(): rank for rank in self._ranks}
        while live and not self._over.is_set():
            for ready in select.select(list(live), [], [], BEAT_S)[0]:
                rank = live[ready]
                try:
                    rank.receive()
                except Exception as error:  # noqa: BLE001 - the thread's boundary: a malformed message is a loss, too
                    del live[ready]
                    rank.lost()
                    self._rank_lost(rank, error)

    def _rank_lost(self, rank: _HostRank, error: Exception) -> None:
        """The rank's host reports why, unless it is lost itself."""
        log.debug("rank lost", exc_info=error)
        if self.loss_reason(self._limits.report / 2) is None and not self._over.is_set():
            self._lost(LossReason(f"rank {rank.number} {HAS_ENDED}"))
