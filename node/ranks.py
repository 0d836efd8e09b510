"""The processes of a node of several ranks, as the one that decides (rank 0) sees them.

    fork, before anything has threads or a GPU  ->  join: all meet  ->  each loads its part  ->  pools: all are ready
    ->  steps over a SharedRing  ->  close

A rank that dies or hangs ends the node at once, since what it holds is lost: the router goes on elsewhere. While the
ranks load, rank 0 has a moment to say it in the line that ends a failed start. A rank dies with its node.
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
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from baton.address import HostPort
from baton.parent import die_with
from baton.signals import stop_signals
from kv_transfer.transports.host import LOOPBACK, listen_on
from node.errors import StartupError
from node.ring import RingReader, RingWriter, SharedRing
from node.settings import NodeSettings

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from engine.model.parallel.group import RankGroup
    from engine.model.parallel.others import RemoteRanks

log = logging.getLogger(__name__)

BEAT_S = 0.2
JOIN_S = 120.0
"""For the imports of all ranks, which take as long as the machine needs."""
_MAX_MESSAGE = 64 * 1024
_HAS_ENDED = "has ended"
_ENDED_LOADING = "has ended while it loaded its part"


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds. silence: a rank whose heart has not beaten for so long hangs; loading_silence: while it imports and
    loads, which may hold Python's lock. report: what rank 0 has to say why a start failed, before the node just ends.
    close: what ranks have to end by themselves."""

    silence: float = 5.0
    loading_silence: float = 60.0
    report: float = 5.0
    close: float = 5.0


RunRank = Callable[["RankSeat", NodeSettings], None]
"""What a forked process does: loads its part, reports, and serves until the node closes it."""


@dataclass(slots=True)
class _Rank:
    """A rank's process. pool: a memfd for its part of the KV pool. num_silent: slices of BEAT_S in which the node
    listened and the heart did not beat (see `baton.silence`)."""

    number: int
    pid: int
    pidfd: int
    link: socket.socket
    pool: int
    ready: bool = False
    beats: int = 0
    num_silent: int = 0


class RankSeat:
    """What a forked rank has of its node: its number, the ring, and a link."""

    def __init__(self, number: int, size: int, ring: SharedRing, hearts: mmap.mmap, link: socket.socket, pool: int):
        self.number, self.size = number, size
        self.receive = RingReader(ring, number - 1).receive
        self._hearts, self._link, self._pool = hearts, link, pool

    def join(self, device: torch.device) -> tuple[RankGroup, HostPort | None]:
        """Wait for the node, and meet all its ranks; and where those of all data parallel nodes meet. device: the
        rank's. Raises OSError or RuntimeError if the node has ended."""
        said = _receive(self._link)
        peers = HostPort(*said["peers"]) if said["peers"] else None
        return _join(_store(said["port"]), self.number, self.size, device), peers

    def memory(self, device: torch.device) -> Callable[[int], Tensor] | None:
        """Gives zeros, uint8, that the node sees as well; None: the node can map what the device has."""
        return self._shared_zeros if device.type == "cpu" else None

    def _shared_zeros(self, num_bytes: int) -> Tensor:
        os.ftruncate(self._pool, num_bytes)
        return _mapped(self._pool, num_bytes)

    def ready(self, pool: Tensor) -> None:
        """Report that steps may come. pool: in the rank's memory, contiguous, for as long as this process lives."""
        said: dict[str, Any] = {"pool_bytes": pool.nbytes}
        if pool.is_cuda:
            from kv_transfer.transports.carriers.cuda_memory import CudaMemory

            region, offset = CudaMemory(pool.device).export(pool)
            said |= {"region": region.hex(), "offset": offset}
        self._link.send(json.dumps(said).encode())

    def failed(self, error: Exception) -> None:
        """Say why. A RuntimeError may be what another rank's end looks like from here."""
        said = {"error": str(error) or repr(error), "met": isinstance(error, RuntimeError)}
        with contextlib.suppress(OSError):
            self._link.send(json.dumps(said).encode())

    def beat(self) -> None:
        """From now on, on a thread of its own."""

        def beat() -> None:
            counts = memoryview(self._hearts).cast("q")
            while True:
                counts[self.number] += 1
                time.sleep(BEAT_S)

        threading.Thread(target=beat, name="heart", daemon=True).start()


class Ranks:
    """Ranks 1, 2, ... of this node, forked by `fork_ranks`. `close` ends them."""

    def __init__(self, ranks: list[_Rank], ring: SharedRing, hearts: mmap.mmap, limits: Limits) -> None:
        self.size = 1 + len(ranks)
        self._ranks, self._hearts, self._limits = ranks, hearts, limits
        self._writer = RingWriter(ring)
        self._closing = threading.Event()
        self._others: RemoteRanks | None = None
        self.settle: Callable[[], object] = lambda: None
        """Waits a moment for what ends the process for a reason elsewhere, which a rank may meet first."""
        self._watcher = threading.Thread(target=self._watch, name="ranks", daemon=True)
        self._watcher.start()

    @property
    def others(self) -> RemoteRanks:
        """By which they are sent steps; the engine's thread only."""
        from engine.model.parallel.others import RemoteRanks

        if self._others is None:
            self._others = RemoteRanks(self._writer.send)
        return self._others

    def join(self, device: torch.device, peers: HostPort | None = None) -> RankGroup:
        """Let them begin to load, and meet them. device: of rank 0. peers: where the ranks of all data parallel nodes
        meet. Raises RuntimeError."""
        listener = listen_on(LOOPBACK)
        port = listener.getsockname()[1]
        store = _store(port, is_master=True, master_listen_fd=listener.detach())
        for rank in self._ranks:
            try:
                rank.link.send(json.dumps({"port": port, "peers": peers and (peers.host, peers.port)}).encode())
            except OSError as error:
                raise RuntimeError(f"rank {rank.number} {_ENDED_LOADING}") from error
        return _join(store, 0, self.size, device)

    def pools(self, block_bytes: list[int]) -> list[Tensor]:
        """Wait until all are ready; their KV pools, each as [num_blocks, block_bytes], uint8. Raises RuntimeError."""
        return [self._pool(rank).view(-1, size) for rank, size in zip(self._ranks, block_bytes, strict=True)]

    def _pool(self, rank: _Rank) -> Tensor:
        select.select([rank.link], [], [])  # until it says something or ends; `_watch` bounds this wait
        said = _heard(rank)
        if said is None or "error" in said:
            raise RuntimeError(f"rank {rank.number} {_ENDED_LOADING}")
        rank.link.recv(_MAX_MESSAGE)
        rank.num_silent, rank.ready = 0, True
        if "region" in said:
            return _mapped_from_gpu(rank.number, bytes.fromhex(said["region"]), said["offset"], said["pool_bytes"])
        return _mapped(rank.pool, said["pool_bytes"])

    def why(self, error: RuntimeError) -> StartupError:
        """Which rank has ended while it loaded, and what it said; else the error, which was met here. A rank that
        met the end of another is not to blame."""
        silent, deadline = {rank.link for rank in self._ranks}, time.monotonic() + self._limits.report / 2
        while silent and (left_s := deadline - time.monotonic()) > 0:
            silent -= set(select.select(silent, [], [], left_s)[0])
        met = None
        for rank in self._ranks:
            said = _heard(rank)
            if said is None:
                return StartupError(f"rank {rank.number} {_ENDED_LOADING}")
            if "error" in said:
                found = StartupError(f"rank {rank.number}: {said['error']}")
                if not said["met"]:
                    return found
                met = met or found
        return met or StartupError(str(error))

    def close(self) -> None:
        """End all ranks; those that do not end by themselves are killed. Idempotent."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._watcher.join()
        serve = all(rank.ready for rank in self._ranks)
        if serve:
            self._report_lost()
            self._writer.timeout_s = self._limits.close
            with contextlib.suppress(TimeoutError):
                self.others.close()
        deadline = time.monotonic() + (self._limits.close if serve else 0)
        for rank in self._ranks:
            if not select.select([rank.pidfd], [], [], max(0.0, deadline - time.monotonic()))[0]:
                signal.pidfd_send_signal(rank.pidfd, signal.SIGKILL)
            os.waitpid(rank.pid, 0)
            os.close(rank.pidfd)
            os.close(rank.pool)
            rank.link.close()

    def _watch(self) -> None:
        """End this process when a rank is lost."""
        counts = memoryview(self._hearts).cast("q")
        while not self._closing.is_set():
            died, _, _ = select.select([rank.pidfd for rank in self._ranks], [], [], BEAT_S)
            for rank in self._ranks:
                beats = counts[rank.number]
                rank.num_silent = 0 if beats != rank.beats else rank.num_silent + 1
                rank.beats = beats
                why = _HAS_ENDED if rank.pidfd in died else self._silence(rank)
                if why and not self._closing.is_set():
                    self._lost(rank, why)
                    return

    def _silence(self, rank: _Rank) -> str:
        limit_s = self._limits.silence if rank.ready else self._limits.loading_silence
        return f"has been silent for {limit_s:g} s" if rank.num_silent * BEAT_S >= limit_s else ""

    def _lost(self, rank: _Rank, why: str) -> None:
        """What is under way cannot be unwound: it may wait for the rank for ever."""
        if not rank.ready and self._closing.wait(self._limits.report):
            return  # rank 0 has met it, and reported it
        if (_heard(rank) or {}).get("met"):
            self.settle()
        log.critical("%s: the node ends", _story(rank, why))
        logging.shutdown()
        os._exit(1)

    def _report_lost(self) -> None:
        """Of a node that met the loss of a rank before the watch did, and has ended in order."""
        for rank in self._ranks:
            if select.select([rank.pidfd], [], [], 0)[0]:
                log.critical("%s: the node ends", _story(rank, _HAS_ENDED))


def _story(rank: _Rank, why: str) -> str:
    """Of a rank that was lost; with what it said itself."""
    said = _heard(rank) or {}
    if not rank.ready and why == _HAS_ENDED:
        return f"rank {rank.number}: {said['error']}" if "error" in said else f"rank {rank.number} {_ENDED_LOADING}"
    because = f" ({said['error']})" if "error" in said else ""
    return f"rank {rank.number} (process {rank.pid}) {why}{because}"


def fork_ranks(settings: NodeSettings, run: RunRank, limits: Limits | None = None) -> Ranks | None:
    """Fork ranks 1, 2, ..., which `run`; None if the settings want one rank. Call it on the main thread, before this
    process has others, and before it uses a GPU. The forks never return."""
    size = settings.num_ranks
    if size == 1:
        return None
    ring, hearts = SharedRing(size - 1), mmap.mmap(-1, 8 * size)
    ranks = [_fork(number, size, ring, hearts, settings, run) for number in range(1, size)]
    return Ranks(ranks, ring, hearts, limits or Limits())


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
        if die_with(parent):
            seat.beat()
            run(seat, settings)
    except Exception as error:  # the process's boundary
        log.debug("rank failed", exc_info=error)
        seat.failed(error)
        os._exit(1)
    os._exit(0)


def _store(port: int, **more: Any) -> Any:
    from torch._C._distributed_c10d import TCPStore

    return TCPStore(LOOPBACK, port, wait_for_workers=False, timeout=timedelta(seconds=JOIN_S), **more)


def _join(store: Any, rank: int, size: int, device: torch.device) -> RankGroup:
    from engine.model.parallel.group import GlooRanks

    host = GlooRanks(store, rank, size)
    if device.type == "cpu":
        return host

    from engine.model.parallel.gpus import GpuRanks

    return GpuRanks(host, device)


def _mapped(descriptor: int, num_bytes: int) -> Tensor:
    import torch

    return torch.frombuffer(mmap.mmap(descriptor, num_bytes), dtype=torch.uint8)


def _mapped_from_gpu(rank: int, region: bytes, offset: int, num_bytes: int) -> Tensor:
    """A rank's memory, for this process on the rank's GPU as well; mapped until the process ends."""
    import torch

    from kv_transfer.transports.carriers.cuda_memory import CudaMemory

    memory = CudaMemory(torch.device("cuda", rank))
    with torch.cuda.device(rank):
        torch.cuda.synchronize()  # makes the device's context current
        return memory.open(region)[offset : offset + num_bytes]


def _heard(rank: _Rank) -> dict[str, Any] | None:
    """What it has said that nobody has taken in; nothing so far; or None, if it has ended without a word."""
    if not select.select([rank.link], [], [], 0)[0]:
        return {}
    try:
        data = rank.link.recv(_MAX_MESSAGE, socket.MSG_PEEK)
    except ConnectionResetError:  # told once of one that has ended without reading; what it said comes after that
        data = rank.link.recv(_MAX_MESSAGE, socket.MSG_PEEK)
    said: dict[str, Any] | None = json.loads(data) if data else None
    return said


def _receive(link: socket.socket) -> dict[str, Any]:
    """Raises OSError if the other end has ended."""
    data = link.recv(_MAX_MESSAGE)
    if not data:
        raise OSError("the other process has ended")
    said: dict[str, Any] = json.loads(data)
    return said
