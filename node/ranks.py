"""The processes of a node of several ranks, as the one that decides (rank 0) sees them.

    fork, before anything has threads or a GPU  ->  join: all meet  ->  each loads its part  ->  pools: all are ready
    ->  steps over a SharedRing  ->  close

A rank that dies or hangs ends the node at once, since what it holds is lost: the router goes on elsewhere. A rank whose
node died ends by itself.
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
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from baton.signals import stop_signals
from kv_transfer.transports.host import LOOPBACK, listen_on
from node.errors import StartupError
from node.ring import RingReader, RingWriter, SharedRing
from node.settings import NodeSettings

if TYPE_CHECKING:
    from torch import Tensor

    from engine.model.parallel.group import RankGroup
    from engine.model.parallel.others import RemoteRanks

log = logging.getLogger(__name__)

BEAT_S = 0.2
SILENCE_S = 5.0
"""A rank whose heart has not beaten for so long hangs."""
JOIN_S = 120.0
"""For the imports of all ranks, which take as long as the machine needs."""
CLOSE_S = 5.0
EXPLAIN_S = 1.0
_MAX_MESSAGE = 64 * 1024

RunRank = Callable[["RankSeat", NodeSettings], None]
"""What a forked process does: loads its part, reports, and serves until the node closes it."""


@dataclass(slots=True)
class _Rank:
    """A rank's process. pool: a memfd for its part of the KV pool."""

    number: int
    pid: int
    pidfd: int
    link: socket.socket
    pool: int
    ready: bool = False
    beats: int = 0
    beat_at: float = field(default_factory=time.monotonic)


class RankSeat:
    """What a forked rank has of its node: its number, the ring, and a link."""

    def __init__(self, number: int, size: int, ring: SharedRing, hearts: mmap.mmap, link: socket.socket, pool: int):
        self.number, self.size = number, size
        self.receive = RingReader(ring, number - 1).receive
        self._hearts, self._link, self._pool = hearts, link, pool

    def join(self) -> RankGroup:
        """Wait for the node, and meet all ranks. Raises OSError or RuntimeError if the node has ended."""
        port: int = _receive(self._link)["port"]
        return _join(_store(port), self.number, self.size)

    def memory(self, num_bytes: int) -> Tensor:
        """Zeros, uint8, that the node sees as well."""
        os.ftruncate(self._pool, num_bytes)
        return _mapped(self._pool, num_bytes)

    def ready(self, num_bytes: int) -> None:
        """Report that steps may come. num_bytes: of the pool."""
        self._link.send(json.dumps({"pool_bytes": num_bytes}).encode())

    def failed(self, why: str) -> None:
        with contextlib.suppress(OSError):
            self._link.send(json.dumps({"error": why}).encode())

    def live_with(self, parent: int) -> None:
        """Beat, on a thread of its own, and end this process when the node's has."""

        def beat() -> None:
            counts = memoryview(self._hearts).cast("q")
            while os.getppid() == parent:
                counts[self.number] += 1
                time.sleep(BEAT_S)
            os._exit(1)

        threading.Thread(target=beat, name="heart", daemon=True).start()


class Ranks:
    """Ranks 1, 2, ... of this node, forked by `fork_ranks`. `close` ends them."""

    def __init__(self, ranks: list[_Rank], ring: SharedRing, hearts: mmap.mmap) -> None:
        self.size = 1 + len(ranks)
        self._ranks, self._ring, self._hearts = ranks, ring, hearts
        self._closing = threading.Event()
        self._others: RemoteRanks | None = None
        threading.Thread(target=self._watch, name="ranks", daemon=True).start()

    @property
    def others(self) -> RemoteRanks:
        """By which they are sent steps; the engine's thread only."""
        from engine.model.parallel.others import RemoteRanks

        if self._others is None:
            self._others = RemoteRanks(RingWriter(self._ring).send)
        return self._others

    def join(self) -> RankGroup:
        """Let them begin to load, and meet them. Raises RuntimeError."""
        listener = listen_on(LOOPBACK)
        port = listener.getsockname()[1]
        store = _store(port, is_master=True, master_listen_fd=listener.detach())
        for rank in self._ranks:
            rank.link.send(json.dumps({"port": port}).encode())
        return _join(store, 0, self.size)

    def pools(self, block_bytes: list[int]) -> list[Tensor]:
        """Wait until all are ready; their KV pools, each as [num_blocks, block_bytes], uint8. Raises StartupError."""
        return [self._pool(rank).view(-1, size) for rank, size in zip(self._ranks, block_bytes, strict=True)]

    def _pool(self, rank: _Rank) -> Tensor:
        try:
            said = _receive(rank.link)
        except OSError:
            raise StartupError(f"rank {rank.number} has ended while it loaded its part") from None
        if "error" in said:
            raise StartupError(f"rank {rank.number}: {said['error']}")
        rank.ready = True
        return _mapped(rank.pool, said["pool_bytes"])

    def why(self, error: RuntimeError) -> StartupError:
        """What has ended a rank while it loaded, as it said itself; else the error that another met."""
        for rank in self._ranks:
            if select.select([rank.link], [], [], EXPLAIN_S)[0]:
                try:
                    said = _receive(rank.link)
                except OSError:
                    return StartupError(f"rank {rank.number} has ended while it loaded its part")
                if "error" in said:
                    return StartupError(f"rank {rank.number}: {said['error']}")
        return StartupError(str(error))

    def close(self) -> None:
        """End all ranks; those that do not end by themselves are killed. Idempotent."""
        if self._closing.is_set():
            return
        self._closing.set()
        if all(rank.ready for rank in self._ranks):
            with contextlib.suppress(TimeoutError):
                self.others.close()
        deadline = time.monotonic() + (CLOSE_S if all(rank.ready for rank in self._ranks) else 0)
        for rank in self._ranks:
            if not select.select([rank.pidfd], [], [], max(0.0, deadline - time.monotonic()))[0]:
                signal.pidfd_send_signal(rank.pidfd, signal.SIGKILL)
            os.waitpid(rank.pid, 0)

    def _watch(self) -> None:
        """End this process when a rank that serves is lost."""
        counts = memoryview(self._hearts).cast("q")
        while not self._closing.is_set():
            died, _, _ = select.select([rank.pidfd for rank in self._ranks], [], [], BEAT_S)
            now = time.monotonic()
            for rank in self._ranks:
                if counts[rank.number] != rank.beats:
                    rank.beats, rank.beat_at = counts[rank.number], now
                why = "has ended" if rank.pidfd in died else ""
                if now - rank.beat_at > SILENCE_S and rank.ready:
                    why = why or f"has been silent for {SILENCE_S:g} s"
                if why and not self._closing.is_set() and (rank.ready or not why.startswith("has ended")):
                    self._lost(rank, why)
            if died and not all(rank.ready for rank in self._ranks):
                return  # `pools` reports it

    def _lost(self, rank: _Rank, why: str) -> None:
        """What is under way cannot be unwound: it may wait for the rank for ever."""
        log.critical("rank %d (process %d) %s: the node ends", rank.number, rank.pid, why)
        logging.shutdown()
        os._exit(1)


def fork_ranks(settings: NodeSettings, run: RunRank) -> Ranks | None:
    """Fork ranks 1, 2, ..., which `run`; None if the settings want one rank. Call it before this process has threads,
    and before it uses a GPU. The forks never return."""
    size = settings.tensor_parallel_size
    if size == 1:
        return None
    ring, hearts = SharedRing(size - 1), mmap.mmap(-1, 8 * size)
    ranks = [_fork(number, size, ring, hearts, settings, run) for number in range(1, size)]
    return Ranks(ranks, ring, hearts)


def _fork(number: int, size: int, ring: SharedRing, hearts: mmap.mmap, settings: NodeSettings, run: RunRank) -> _Rank:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pool = os.memfd_create(f"kv-pool-{number}")
    parent = os.getpid()
    pid = os.fork()
    if pid:
        theirs.close()
        return _Rank(number, pid, os.pidfd_open(pid), ours, pool)
    ours.close()
    seat = RankSeat(number, size, ring, hearts, theirs, pool)
    try:
        for stop in stop_signals():
            signal.signal(stop, signal.SIG_IGN)  # the node ends its ranks
        seat.live_with(parent)
        run(seat, settings)
    except Exception as error:  # the process's boundary
        log.debug("rank failed", exc_info=error)
        seat.failed(str(error) or repr(error))
        os._exit(1)
    os._exit(0)


def _store(port: int, **more: Any) -> Any:
    from torch._C._distributed_c10d import TCPStore

    return TCPStore(LOOPBACK, port, wait_for_workers=False, timeout=timedelta(seconds=JOIN_S), **more)


def _join(store: Any, rank: int, size: int) -> RankGroup:
    from engine.model.parallel.group import GlooRanks

    return GlooRanks(store, rank, size)


def _mapped(descriptor: int, num_bytes: int) -> Tensor:
    import torch

    return torch.frombuffer(mmap.mmap(descriptor, num_bytes), dtype=torch.uint8)


def _receive(link: socket.socket) -> dict[str, Any]:
    """Raises OSError if the other end has ended."""
    data = link.recv(_MAX_MESSAGE)
    if not data:
        raise OSError("the other process has ended")
    said: dict[str, Any] = json.loads(data)
    return said
