"""The other data parallel nodes, as this one sees them: how they meet, step in waves, and end together.

    rank 0 listens, the others connect and say what they serve -> all know where their ranks meet -> each loads its part
    -> waves of steps -> one is told to stop, so all drain -> all have drained -> all leave

Rank 0 passes on what one node says to the others. Each node has experts that the others need, so one that dies or hangs
ends them all, by name, and routers go on elsewhere. As between torch's processes, nothing is authenticated: the network
among these nodes must be their own.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from baton.address import HostPort
from node.errors import StartupError
from node.peer_links import PeerLink
from node.settings import NodeSettings

if TYPE_CHECKING:
    from engine.model.parallel.data_parallel import DataParallel

log = logging.getLogger(__name__)

BEAT_S = 0.2
_RETRY_S = 0.1
_GREETING_S = 5.0
_LEFT_S = 5.0
_HAS_ENDED = "has ended"


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds. join: until all nodes have come. silence: a node that says nothing for so long hangs; loading_silence:
    while some load, which may hold Python's lock. report: what a node has to say why its own start failed, before the
    end of another ends it."""

    join: float = 300.0
    silence: float = 5.0
    loading_silence: float = 60.0
    report: float = 5.0


LIMITS = Limits()


class PeerNodes:
    """Implements `engine.model.parallel.data_parallel.Waves`. links: to all others on rank 0, else to rank 0. store:
    where the ranks of all nodes meet. wake: is called, on another thread, when the engine should step for others.

    Watches the others from the beginning; ends this process when one is lost, until `leave`.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        links: Mapping[int, PeerLink],
        store: HostPort,
        wake: Callable[[], None],
        limits: Limits,
    ) -> None:
        self.store = store
        self._rank, self._size, self._links = rank, size, links
        self._wake, self._limits = wake, limits
        self._wave, self._last_started = 0, -1
        self._state = threading.Condition()
        self._ready: set[int] = set()
        self._drained: set[int] = set()
        self._told_to_stop = False
        self._stop: Callable[[], None] | None = None
        self._left = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="peer nodes", daemon=True)
        self._watcher.start()

    # ---- waves, on the engine's thread ----

    @property
    def running(self) -> bool:
        return self._last_started >= self._wave

    def start(self) -> None:
        with self._state:
            if self.running:
                return
            self._last_started = self._wave
        self._say(wave=self._wave)

    def end(self) -> None:
        with self._state:
            self._wave += 1
            self._state.notify_all()

    # ---- the node's life ----

    def ready(self, stop: Callable[[], None]) -> None:
        """This node has loaded, and serves. stop: is called, on another thread, when another one is told to stop: this
        one should drain, too."""
        with self._state:
            self._stop = stop
            self._ready.add(self._rank)
            told = self._told_to_stop
        self._say(ready=True)
        if told:
            stop()

    def stop_others(self) -> None:
        """This node is told to stop, and all others with it."""
        self._say(stopping=True)

    def leave(self, timeout_s: float) -> bool:
        """This node has drained. Wait until all have, taking part in their steps; then the loss of one means nothing
        any more. False: some have not in time."""
        deadline = time.monotonic() + timeout_s
        with self._state:
            self._state.wait_for(lambda: not self.running, timeout_s)
        self._say(drained=True)
        with self._state:
            self._drained.add(self._rank)
            self._state.notify_all()
            all_have = self._state.wait_for(lambda: len(self._drained) == self._size, deadline - time.monotonic())
        self._left.set()
        return all_have

    def close(self) -> None:
        """Rank 0 has what the others' ranks need to end in order, so it waits for them. Idempotent."""
        self._left.set()
        self._watcher.join()
        for link in self._links.values():
            if self._rank == 0:
                with contextlib.suppress(OSError):
                    while select.select([link], [], [], _LEFT_S)[0]:
                        link.receive()
            link.close()

    # ---- the others ----

    def _say(self, **said: Any) -> None:
        for link in self._links.values():
            with contextlib.suppress(OSError):  # the watch knows
                link.send(rank=self._rank, **said)

    def _watch(self) -> None:
        """Hear what others say, and end this process when one is lost."""
        next_beat = time.monotonic()
        while not self._left.is_set():
            ready, _, _ = select.select(list(self._links.values()), [], [], max(0.0, next_beat - time.monotonic()))
            for rank, link in self._links.items():
                if link in ready and not self._left.is_set():
                    try:
                        for said in link.receive():
                            self._heard(rank, said)
                    except (OSError, KeyError, TypeError) as error:
                        log.debug("peer lost", exc_info=error)
                        self._lost(rank, _HAS_ENDED)
            if time.monotonic() >= next_beat:
                next_beat = time.monotonic() + BEAT_S
                self._beat()

    def _beat(self) -> None:
        self._say(beat=True)
        limit_s = self._limits.silence if len(self._ready) == self._size else self._limits.loading_silence
        for rank, link in self._links.items():
            link.num_silent += 1
            if link.num_silent * BEAT_S > limit_s and not self._left.is_set():
                self._lost(rank, f"has been silent for {limit_s:g} s")

    def _heard(self, of: int, said: dict[str, Any]) -> None:
        if "beat" in said:
            return
        if self._rank == 0:
            for rank, link in self._links.items():
                if rank != of:
                    with contextlib.suppress(OSError):
                        link.send(**said)
        rank = int(said["rank"])
        if "lost" in said:
            self._end(str(said["lost"]))
        with self._state:
            if "wave" in said:
                self._last_started = max(self._last_started, int(said["wave"]))
            if "ready" in said:
                self._ready.add(rank)
            if "drained" in said:
                self._drained.add(rank)
            stop = self._stop if "stopping" in said else None
            self._told_to_stop |= "stopping" in said
            self._state.notify_all()
        if "wave" in said:
            self._wake()
        if stop is not None:
            stop()

    def _lost(self, rank: int, why: str) -> None:
        self._end(f"data parallel rank {rank} {why}")

    def _end(self, why: str) -> None:
        """What is under way cannot be unwound: steps wait for the lost node for ever."""
        if self._rank == 0:
            self._say(lost=why)
        if self._rank not in self._ready and self._left.wait(self._limits.report):
            return  # the start of this node has failed, and said why
        log.critical("%s: the node ends", why)
        logging.shutdown()
        os._exit(1)


# ---- to meet ----


def meet(
    settings: NodeSettings, serves: Mapping[str, str], wake: Callable[[], None], limits: Limits = LIMITS
) -> PeerNodes:
    """Wait for all data parallel nodes. serves: by flag, what must be the same on all of them. Raises StartupError."""
    rank, size = settings.data_parallel_rank or 0, settings.data_parallel_size
    at = HostPort(settings.data_parallel_address, settings.data_parallel_rpc_port)
    if rank:
        link, port = _come(at, rank, size, serves, limits.join)
        return PeerNodes(rank, size, {0: link}, HostPort(at.host, port), wake, limits)
    links = _await_all(at, size, serves, limits.join)
    listener = socket.create_server((at.host, 0), family=_family(at.host))
    port = listener.getsockname()[1]
    serve_store(HostPort(at.host, port), listener)
    for link in links.values():
        with contextlib.suppress(OSError):  # the watch knows
            link.send(store=port)
    return PeerNodes(rank, size, links, HostPort(at.host, port), wake, limits)


def _await_all(at: HostPort, size: int, serves: Mapping[str, str], timeout_s: float) -> dict[int, PeerLink]:
    """On rank 0: the others, once each is there and serves the same."""
    deadline = time.monotonic() + timeout_s
    links: dict[int, PeerLink] = {}
    try:
        listener = socket.create_server((at.host, at.port), family=_family(at.host))
    except OSError as error:
        raise StartupError(f"--data-parallel-rpc-port: cannot listen on {at}: {error.strerror}") from error
    log.info("waiting for data parallel nodes address=%s number=%d", at, size - 1)
    with listener:
        while len(links) < size - 1:
            ready, _, _ = select.select([listener, *links.values()], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                missing = ", ".join(str(rank) for rank in range(1, size) if rank not in links)
                raise StartupError(f"--data-parallel-size: rank {missing} of {size} has not come for {timeout_s:g} s")
            for rank in [rank for rank, link in links.items() if link in ready]:
                links.pop(rank).close()  # it has ended, and may be started anew
            if listener in ready:
                link = PeerLink(listener.accept()[0])
                try:
                    rank = _greeted(link, size, serves, links.keys())
                except (OSError, KeyError, TypeError, ValueError) as error:
                    log.warning("a connection to --data-parallel-rpc-port was no data parallel node: %s", error)
                    rank = None
                if rank is None:
                    link.close()
                else:
                    links[rank] = link
    return links


def _greeted(link: PeerLink, size: int, serves: Mapping[str, str], taken: Any) -> int | None:
    """The rank of the node that has come; None: it is refused."""
    said = link.receive_one(_GREETING_S)
    rank, theirs = int(said["rank"]), {"--data-parallel-size": str(size), **said["serves"]}
    ours = {"--data-parallel-size": str(said["size"]), **serves}
    different = next((flag for flag in ours if ours[flag] != theirs.get(flag)), None)
    why = None
    if different == "--data-parallel-size":
        why = f"--data-parallel-size: {said['size']}, and rank 0 has {size}"
    elif different is not None:
        why = f"{different}: {theirs.get(different)}, and data parallel rank 0 has {ours[different]}"
    elif rank in taken or not 0 < rank < size:
        why = f"--data-parallel-rank: {rank} is taken"
    if why is not None:
        log.warning("a data parallel node was refused: %s", why)
        link.send(refused=why)
        return None
    return rank


def _come(at: HostPort, rank: int, size: int, serves: Mapping[str, str], timeout_s: float) -> tuple[PeerLink, int]:
    """To rank 0, which may come later. The link to it, and the port of the store."""
    deadline = time.monotonic() + timeout_s
    while True:
        link = None
        try:
            link = PeerLink(socket.create_connection((at.host, at.port), timeout=_GREETING_S))
            link.send(rank=rank, size=size, serves=dict(serves))
            said = link.receive_one(max(0.0, deadline - time.monotonic()))
        except TimeoutError as error:
            raise StartupError(
                f"--data-parallel-address: not all nodes have come to {at} for {timeout_s:g} s"
            ) from error
        except OSError as error:
            if link is not None:
                link.close()
            if time.monotonic() > deadline:
                raise StartupError(f"--data-parallel-address: rank 0 is not at {at}: {error}") from error
            time.sleep(_RETRY_S)
            continue
        if "refused" in said:
            raise StartupError(str(said["refused"]))
        return link, int(said["store"])


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def serve_store(at: HostPort, listener: socket.socket) -> None:
    """Have this process be where the ranks of all nodes meet, as long as it lives."""
    global _store  # noqa: PLW0603 - torch's server ends with the object
    from torch._C._distributed_c10d import TCPStore

    _store = TCPStore(at.host, at.port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


_store: Any = None


def join_ranks(settings: NodeSettings, rank: int, store: HostPort) -> DataParallel:
    """The ranks of all nodes. rank: of this process in its node. Raises RuntimeError when a rank is lost."""
    from torch._C._distributed_c10d import TCPStore

    from engine.model.parallel.data_parallel import DataParallel
    from engine.model.parallel.group import GlooRanks

    size, node = settings.data_parallel_size, settings.data_parallel_rank or 0
    met = TCPStore(
        store.host, store.port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=LIMITS.join)
    )
    everyone = GlooRanks(met, rank * size + node, settings.num_ranks * size, host=own_host(store))
    return DataParallel(everyone, size)


def own_host(to: HostPort) -> str:
    """This machine's address on the way to that one, which is this machine's own if it is there."""
    with socket.socket(_family(to.host), socket.SOCK_DGRAM) as probe:
        probe.connect((to.host, to.port))
        return str(probe.getsockname()[0])
