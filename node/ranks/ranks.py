"""The other ranks of a node, as seen by rank 0, which decides: those of its own host and of other hosts.

    fork, before there are threads or a GPU context  ->  join the group  ->  each loads its part
    ->  pools: all are ready  ->  steps  ->  close

If a rank dies or hangs, the node ends at once, since that rank's KV is lost; the router goes on elsewhere. While the
ranks load, rank 0 first gets a moment to report the loss in the line that ends a failed start. A rank dies with its
node.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import signal
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from baton.address import HostPort
from kv_transfer.remote import RemotePool
from kv_transfer.transports.host import LOOPBACK, listen_on
from node.errors import StartupError
from node.limits import Limits
from node.ranks.forks import (
    ENDED_LOADING,
    MAX_MESSAGE,
    LossReason,
    RankForks,
    RankPipe,
    fork,
    to_blame,
)
from node.ranks.hosts import OtherHosts
from node.ranks.pool_wire import PoolWire
from node.ranks.rank_links import POOL_REQUEST, ForkedRankLink, RankLink, join_group, pack_request, store_at
from node.ranks.ring import RingWriter, SharedRing
from node.settings import NodeSettings

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

    from engine.model.other_ranks import RemoteRanks
    from engine.model.parallel.group import RankGroup

log = logging.getLogger(__name__)

_READER_S = 5.0
"""How long to wait for the thread that handles the ranks' reports: a copy that it requests may have to wait while the
ring is full."""
RunRank = Callable[[RankLink, NodeSettings], None]
"""The body of a rank's process: it loads its part of the model, reports, and serves until the node closes it."""


class HostRanks(Protocol):
    """The other ranks of the node on this host, or all ranks on other hosts: how rank 0 reaches them and learns of
    their loss. `send` is for the engine's thread, the other methods are for the main thread."""

    @property
    def ready(self) -> bool:
        """Whether all of them have loaded, so that steps may be sent."""

    def start_loading(self, **rendezvous: Any) -> None:
        """Tell them to load. rendezvous: the addresses of TCPStores. Raises RuntimeError if one has ended."""

    def pools(self) -> Sequence[RemotePool]:
        """Wait until all are ready. Returns their KV pools, in rank order. Raises RuntimeError."""

    def send(self, kind: int, array: NDArray[np.int32]) -> None:
        """Send a message to all of them, in order. array: contiguous. Raises OSError if one is lost, or reads
        nothing."""

    def loss_reason(self, timeout_s: float) -> LossReason | None:
        """Which of them was lost, and why, if that becomes known in time."""

    def limit_sends(self, timeout_s: float) -> None:
        """Set how long `send` waits for a rank that reads nothing."""

    def end(self, timeout_s: float) -> list[LossReason]:
        """Wait until they have ended, and kill those that have not in time. If all are ready, they have been told to
        end. Returns why some were lost before that."""


class ForkedRanks:
    """Implements HostRanks: the ranks of this host."""

    def __init__(self, forks: RankForks, ring: SharedRing) -> None:
        self.forks = forks
        self._writer = RingWriter(ring)
        self._writing = threading.Lock()  # steps come from the engine's thread, requests from any
        self._wires = [PoolWire(rank.number, partial(self._request, rank.number)) for rank in forks.all]
        self._reader = threading.Thread(target=self._read, name="rank-pools", daemon=True)

    @property
    def ready(self) -> bool:
        return self.forks.ready

    def start_loading(self, **rendezvous: Any) -> None:
        for rank in self.forks.all:
            try:
                rank.send(**rendezvous)
            except OSError as error:
                raise RuntimeError(f"rank {rank.number} {ENDED_LOADING}") from error

    def pools(self) -> Sequence[RemotePool]:
        for rank in self.forks.all:
            select.select([rank.link], [], [])  # until it sends something or ends; `RankForks.watch` bounds this wait
            if not rank.take_ready(rank.peek()):
                raise RuntimeError(f"rank {rank.number} {ENDED_LOADING}")
        self._reader.start()
        return [wire.pool for wire in self._wires]

    def send(self, kind: int, array: NDArray[np.int32]) -> None:
        if self.forks.all:
            with self._writing:
                self._writer.send(kind, array)

    def _request(self, number: int, request: dict[str, Any]) -> None:
        self.send(POOL_REQUEST, pack_request(number, request))

    def _read(self) -> None:
        """Handle what the ranks report of their pools, until all have ended."""
        live = {rank.of_pool: (rank, wire) for rank, wire in zip(self.forks.all, self._wires, strict=True)}
        while live:
            for ready in select.select(list(live), [], [])[0]:
                rank, wire = live[ready]
                try:
                    if data := ready.recv(MAX_MESSAGE):
                        wire.handle(json.loads(data))
                        continue
                except Exception as error:  # the thread's boundary: the rank is of no use, and its end that of the node
                    log.critical("rank %d: what it reports of its pool fails", rank.number, exc_info=error)
                    signal.pidfd_send_signal(rank.pidfd, signal.SIGKILL)
                wire.lost()
                del live[ready]

    def loss_reason(self, timeout_s: float) -> LossReason | None:
        return self.forks.loss_reason(timeout_s)

    def limit_sends(self, timeout_s: float) -> None:
        self._writer.timeout_s = timeout_s

    def end(self, timeout_s: float) -> list[LossReason]:
        lost = self.forks.end(timeout_s)
        if self._reader.is_alive():
            self._reader.join(_READER_S)  # all ranks have ended, which it sees
        if not self._reader.is_alive():  # else it would use sockets that are closed
            for rank in self.forks.all:
                rank.of_pool.close()
        return lost


class Ranks:
    """Ranks 1, 2, ... of this node. `close` ends them. others: the ranks of other hosts, if there are any."""

    def __init__(self, size: int, forked: ForkedRanks, others: OtherHosts | None, limits: Limits) -> None:
        self.size = size
        self._forked, self._hosts, self._limits = forked, others, limits
        self._all: list[HostRanks] = [forked] if others is None else [forked, others]
        self._closing = threading.Event()
        self._why = "rank 0 could not start"
        self._others: RemoteRanks | None = None
        self.settle: Callable[[], object] = lambda: None
        """Waits a moment for the loss of another node to end this process: a rank may notice that loss first."""
        forked.forks.watch(lambda rank, reason: self._lost(reason, rank.ready))

    @property
    def others(self) -> RemoteRanks:
        """Sends them steps; for the engine's thread only."""
        from engine.model.other_ranks import RemoteRanks

        if self._others is None:
            self._others = RemoteRanks(self._send)
        return self._others

    def join(
        self, device: torch.device, peers: HostPort | None = None, fingerprint: Callable[[], str] = lambda: ""
    ) -> RankGroup:
        """Tell the ranks to load, and join their group. device: of rank 0. peers: the address of the TCPStore of all
        data parallel nodes. fingerprint: of the weights as they are served. Raises RuntimeError, and StartupError if
        other hosts do not join."""
        host = LOOPBACK
        if self._hosts is not None:
            host = self._hosts.wait_for_hosts(fingerprint(), self._lost)
        listener = listen_on(host)
        at = HostPort(host, listener.getsockname()[1])
        store = store_at(at, is_master=True, master_listen_fd=listener.detach())
        for ranks in self._all:
            ranks.start_loading(host=at.host, port=at.port, peers=peers and (peers.host, peers.port))
        return join_group(store, 0, self.size, device, host)

    def pools(self) -> list[RemotePool]:
        """Wait until all are ready. Returns their KV pools, in rank order. Raises RuntimeError."""
        return [pool for ranks in self._all for pool in ranks.pools()]

    def why(self, error: RuntimeError) -> StartupError:
        """The error of a failed start: which rank has ended while it loaded, and the error that it reported; else
        `error`, which was raised here. A secondary loss is not blamed if there is another."""
        reason = self._to_blame()
        self._why = str(error) if reason is None else reason.text
        return StartupError(self._why)

    def serves(self, stop: Callable[[], object]) -> None:
        """The node serves from now on. stop: called on another thread when another host is told to stop, so that the
        node drains."""
        if self._hosts is not None:
            self._hosts.serves(stop)

    def close(self, failed: bool = False) -> None:
        """End all ranks, and kill those that do not end by themselves. failed: the node exits with 1, so other hosts do
        that, too, and are started again with it. Idempotent."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._forked.forks.unwatch()
        serve = all(ranks.ready for ranks in self._all)
        if self._hosts is not None:
            self._hosts.stop("" if serve else self._why, failed)
        if serve:
            for ranks in self._all:
                ranks.limit_sends(self._limits.close)
            with contextlib.suppress(OSError):  # TimeoutError is one
                self.others.close()
        lost = [reason for ranks in self._all for reason in ranks.end(self._limits.close if serve else 0)]
        reason = to_blame(lost)
        if serve and reason is not None:  # rank 0 has met that loss by itself, before anybody noticed it
            log.critical("%s: the node ends", reason.text)

    def _send(self, kind: int, array: NDArray[np.int32]) -> None:
        for ranks in self._all:
            ranks.send(kind, array)

    def _lost(self, reason: LossReason, ready: bool) -> None:
        """End this process. A running step cannot be unwound: it may wait for the rank forever."""
        if self._closing.is_set() or (not ready and self._closing.wait(self._limits.report)):
            return  # rank 0 has noticed it and reported it
        if reason.is_secondary:
            self.settle()
            reason = self._to_blame() or reason
        if self._hosts is not None:
            self._hosts.stop(reason.text)
        log.critical("%s: the node ends", reason.text)
        logging.shutdown()
        os._exit(1)

    def _to_blame(self) -> LossReason | None:
        """The loss to report, of those that become known within a moment: preferably one that is not secondary."""
        moment_s = self._limits.report / 2 / len(self._all)
        reasons = (ranks.loss_reason(moment_s) for ranks in self._all)
        return to_blame(reason for reason in reasons if reason is not None)


def fork_ranks(settings: NodeSettings, run: RunRank, limits: Limits | None = None) -> Ranks | None:
    """Fork ranks 1, 2, ... of this host, which call `run` and never return. None: the node has one rank. Call it on the
    main thread, before this process starts others or uses a GPU."""
    size, limits = settings.num_ranks, limits or Limits.of(settings)
    if size == 1:
        return None
    own = settings.host_ranks[1:]
    ring = SharedRing(len(own))

    def run_fork(number: int, pipe: RankPipe) -> None:
        run(ForkedRankLink(number, size, pipe, ring, own.index(number)), settings)

    forked = ForkedRanks(fork(own, run_fork, limits), ring)
    return Ranks(size, forked, OtherHosts(settings, limits) if settings.nnodes > 1 else None, limits)
