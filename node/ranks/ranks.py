"""The ranks of a node of several, as the one that decides (rank 0) sees them: those of its own host, and of others.

    fork, before anything has threads or a GPU  ->  join: all meet  ->  each loads its part  ->  pools: all are ready
    ->  steps  ->  close

A rank that dies or hangs ends the node at once, since what it holds is lost: the router goes on elsewhere. While the
ranks load, rank 0 has a moment to say it in the line that ends a failed start. A rank dies with its node.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from baton.address import HostPort
from kv_transfer.remote import RemotePool
from kv_transfer.transports.host import LOOPBACK, listen_on
from node.errors import StartupError
from node.ranks.forks import ENDED_LOADING, HAS_ENDED, Ends, Limits, RankFork, RankForks, Word, fork
from node.ranks.hosts import OtherHosts
from node.ranks.memory import mapped, mapped_from_gpu
from node.ranks.rank_links import ForkedRankLink, RankLink, join_group, store_at
from node.ranks.ring import RingWriter, SharedRing
from node.settings import NodeSettings

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray
    from torch import Tensor

    from engine.model.parallel.group import RankGroup
    from engine.model.parallel.others import RemoteRanks

log = logging.getLogger(__name__)

RunRank = Callable[[RankLink, NodeSettings], None]
"""What the process of a rank does: loads its part, reports, and serves until the node closes it."""


class HostRanks(Protocol):
    """Further ranks of the node on one host, or on all others: how rank 0 reaches them, and hears of their loss. The
    engine's thread sends; the others' methods are for the main thread."""

    @property
    def ready(self) -> bool:
        """Whether all of them are: then steps may be sent."""

    def begin(self, **said: Any) -> None:
        """Let them load. said: where ranks meet. Raises RuntimeError if one has ended."""

    def pools(self) -> Sequence[Tensor | RemotePool]:
        """Wait until all are ready; their KV pools, in rank order. Raises RuntimeError."""

    def send(self, kind: int, array: NDArray[np.int32]) -> None:
        """A message to all of them, in order. array: contiguous. Raises OSError if one is lost, or takes nothing."""

    def word(self, timeout_s: float) -> Word | None:
        """Which of them is lost, and why, if that is heard in that time."""

    def limit_sends(self, timeout_s: float) -> None:
        """How long `send` waits for one that takes nothing."""

    def end(self, timeout_s: float) -> None:
        """Wait until they have ended, and kill those that do not in time. They have been told, if all are ready."""


class ForkedRanks:
    """Implements HostRanks: those of this host."""

    def __init__(self, forks: RankForks, ring: SharedRing) -> None:
        self.forks = forks
        self._writer = RingWriter(ring)

    @property
    def ready(self) -> bool:
        return self.forks.ready

    def begin(self, **said: Any) -> None:
        for rank in self.forks.all:
            try:
                rank.tell(**said)
            except OSError as error:
                raise RuntimeError(f"rank {rank.number} {ENDED_LOADING}") from error

    def pools(self) -> Sequence[Tensor | RemotePool]:
        return [self._pool(rank) for rank in self.forks.all]

    def _pool(self, rank: RankFork) -> Tensor:
        select.select([rank.link], [], [])  # until it says something or ends; `RankForks.watch` bounds this wait
        said = rank.heard()
        if not rank.take_ready(said):
            raise RuntimeError(f"rank {rank.number} {ENDED_LOADING}")
        assert said
        if "region" in said:
            return mapped_from_gpu(rank.number, bytes.fromhex(said["region"]), said["offset"], said["pool_bytes"])
        return mapped(rank.pool, said["pool_bytes"])

    def send(self, kind: int, array: NDArray[np.int32]) -> None:
        if self.forks.all:
            self._writer.send(kind, array)

    def word(self, timeout_s: float) -> Word | None:
        return self.forks.word(timeout_s)

    def limit_sends(self, timeout_s: float) -> None:
        self._writer.timeout_s = timeout_s

    def end(self, timeout_s: float) -> None:
        self.forks.end(timeout_s)


class Ranks:
    """Ranks 1, 2, ... of this node. `close` ends them. others: those of other hosts, if there are any."""

    def __init__(self, size: int, forked: ForkedRanks, others: OtherHosts | None, limits: Limits) -> None:
        self.size = size
        self._forked, self._hosts, self._limits = forked, others, limits
        self._all: list[HostRanks] = [forked] if others is None else [forked, others]
        self._closing = threading.Event()
        self._why = "rank 0 could not start"
        self._others: RemoteRanks | None = None
        self.settle: Callable[[], object] = lambda: None
        """Waits a moment for what ends the process for a reason elsewhere, which a rank may meet first."""
        forked.forks.watch(lambda rank, word: self._lost(word, rank.ready))

    @property
    def others(self) -> RemoteRanks:
        """By which they are sent steps; the engine's thread only."""
        from engine.model.parallel.others import RemoteRanks

        if self._others is None:
            self._others = RemoteRanks(self._send)
        return self._others

    def join(
        self, device: torch.device, peers: HostPort | None = None, fingerprint: Callable[[], str] = lambda: ""
    ) -> RankGroup:
        """Let them begin to load, and meet them. device: of rank 0. peers: where the ranks of all data parallel nodes
        meet. fingerprint: of the weights as they are served. Raises RuntimeError, and StartupError if other hosts do
        not come."""
        host = LOOPBACK
        if self._hosts is not None:
            host = self._hosts.meet(fingerprint(), self._lost)
        listener = listen_on(host)
        at = HostPort(host, listener.getsockname()[1])
        store = store_at(at, is_master=True, master_listen_fd=listener.detach())
        for ranks in self._all:
            ranks.begin(host=at.host, port=at.port, peers=peers and (peers.host, peers.port))
        return join_group(store, 0, self.size, device, host)

    def pools(self, block_bytes: list[int]) -> list[Tensor | RemotePool]:
        """Wait until all are ready; their KV pools, each as [num_blocks, block_bytes], uint8, or on another host.
        Raises RuntimeError."""
        pools = [pool for ranks in self._all for pool in ranks.pools()]
        sized = zip(pools, block_bytes, strict=True)
        return [pool if isinstance(pool, RemotePool) else pool.view(-1, size) for pool, size in sized]

    def why(self, error: RuntimeError) -> StartupError:
        """Which rank has ended while it loaded, and what it said; else the error, which was met here. A rank that
        met the end of another is not to blame."""
        word = self._to_blame()
        self._why = str(error) if word is None else word.text
        return StartupError(self._why)

    def serves(self, stop: Callable[[], object]) -> None:
        """The node serves from now on. stop: is called, on another thread, when another host is told to stop: the node
        should drain."""
        if self._hosts is not None:
            self._hosts.serves(stop)

    def close(self) -> None:
        """End all ranks; those that do not end by themselves are killed. Idempotent."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._forked.forks.unwatch()
        serve = all(ranks.ready for ranks in self._all)
        if self._hosts is not None:
            self._hosts.stop("" if serve else self._why)
        if serve:
            self._report_lost()
            for ranks in self._all:
                ranks.limit_sends(self._limits.close)
            with contextlib.suppress(OSError):  # TimeoutError is one
                self.others.close()
        for ranks in self._all:
            ranks.end(self._limits.close if serve else 0)

    def _send(self, kind: int, array: NDArray[np.int32]) -> None:
        for ranks in self._all:
            ranks.send(kind, array)

    def _lost(self, word: Word, ready: bool) -> None:
        """End this process. What is under way cannot be unwound: it may wait for the rank for ever."""
        if self._closing.is_set() or (not ready and self._closing.wait(self._limits.report)):
            return  # rank 0 has met it, and reported it
        if word.met:
            self.settle()
            word = self._to_blame() or word
        if self._hosts is not None:
            self._hosts.stop(word.text)
        log.critical("%s: the node ends", word.text)
        logging.shutdown()
        os._exit(1)

    def _to_blame(self) -> Word | None:
        """Of what ranks say in a moment, about one that has not met the end of another, if there is one."""
        moment_s = self._limits.report / 2 / len(self._all)
        words = [word for ranks in self._all if (word := ranks.word(moment_s)) is not None]
        return next((word for word in words if not word.met), words[0] if words else None)

    def _report_lost(self) -> None:
        """Of a node that met the loss of a rank before the watch did, and has ended in order."""
        for rank in self._forked.forks.ended():
            log.critical("%s: the node ends", rank.word(HAS_ENDED).text)


def fork_ranks(settings: NodeSettings, run: RunRank, limits: Limits | None = None) -> Ranks | None:
    """Fork ranks 1, 2, ... of this host, which `run`; None if the settings want one rank. Call it on the main thread,
    before this process has others, and before it uses a GPU. The forks never return."""
    size, limits = settings.num_ranks, limits or Limits.of(settings)
    if size == 1:
        return None
    own = settings.host_ranks[1:]
    ring = SharedRing(len(own))

    def run_fork(number: int, ends: Ends) -> None:
        run(ForkedRankLink(number, size, ends, ring, own.index(number)), settings)

    forked = ForkedRanks(fork(own, run_fork, limits), ring)
    return Ranks(size, forked, OtherHosts(settings, limits) if settings.nnodes > 1 else None, limits)
