"""The other data parallel nodes, as seen by this one. All nodes step in waves (a step that all take together), and end
together.

    all have loaded -> waves of steps -> one is told to stop, so all drain -> all have drained -> all leave

Rank 0 forwards the messages of each node to the others. Each node has experts that the others need, so if a node dies
or hangs, all of them end and name it in their logs; routers go on elsewhere. `node.peers.data_parallel` has how they
find each other.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from baton.address import HostPort
from baton.incarnation import in_group
from node.limits import Limits
from node.peers.links import PeerLink

log = logging.getLogger(__name__)

BEAT_S = 0.2
_LEFT_S = 5.0
_HAS_ENDED = "has ended"


@dataclass(frozen=True, slots=True)
class RendezvousInfo:
    """What all nodes have in common: the TCPStore at which their ranks find each other, and what their incarnations
    begin with. server: the store itself, on rank 0, which serves it as long as this object lives."""

    store: HostPort
    group: str
    server: object = None


class PeerNodes:
    """Implements `engine.model.parallel.data_parallel.Waves`. links: on rank 0 to all other nodes, else only to rank 0.
    wake: called on another thread when the engine should take part in a step of the others.

    Watches the others from the beginning, and ends this process if one is lost before `leave`.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        links: Mapping[int, PeerLink],
        rendezvous: RendezvousInfo,
        wake: Callable[[], None],
        limits: Limits,
    ) -> None:
        self.rendezvous = rendezvous
        self._rank, self._size, self._links = rank, size, links
        self._wake, self._limits = wake, limits
        self._wave, self._last_started = 0, -1
        self._state = threading.Condition()
        self._ready: set[int] = set()
        self._drained: set[int] = set()
        self._stop_requested = False
        self._why_lost: str | None = None
        self._stop: Callable[[], object] | None = None
        self._left = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="peer nodes", daemon=True)
        self._watcher.start()

    @property
    def incarnation(self) -> str:
        """The incarnation of this node."""
        return in_group(self.rendezvous.group, self._rank)

    # ---- waves, on the engine's thread ----

    @property
    def running(self) -> bool:
        return self._last_started >= self._wave

    def start(self) -> None:
        with self._state:
            if self.running:
                return
            self._last_started = self._wave
        self._broadcast(wave=self._wave)

    def end(self) -> None:
        with self._state:
            self._wave += 1
            self._state.notify_all()

    # ---- lifecycle of the node ----

    def ready(self, stop: Callable[[], object]) -> None:
        """This node has loaded and serves. stop: called on another thread when another one is told to stop: this one
        should drain, too."""
        with self._state:
            self._stop = stop
            self._ready.add(self._rank)
            stop_requested = self._stop_requested
        self._broadcast(ready=True)
        if stop_requested:
            stop()

    def stop_others(self) -> None:
        """This node has been told to stop, and all others should stop with it."""
        self._broadcast(stopping=True)

    def leave(self, timeout_s: float, drained: bool = True) -> bool:
        """Wait until all nodes have drained. This one, which has drained, takes part in their steps meanwhile. After
        that, the loss of a node no longer matters. drained: False if this node gives up before it has drained. Returns
        False if some nodes have not drained in time."""
        deadline = time.monotonic() + timeout_s
        with self._state:
            if drained:
                self._state.wait_for(lambda: not self.running or self._left.is_set(), timeout_s)
            self._has_drained(self._rank)
        self._broadcast(drained=True)
        with self._state:
            self._state.wait_for(self._left.is_set, deadline - time.monotonic())
            self._left.set()
            return len(self._drained) == self._size

    def give_up(self) -> None:
        """Make `leave` return: this node ends, and so do the others."""
        with self._state:
            self._left.set()
            self._state.notify_all()

    def why_lost(self, timeout_s: float) -> str | None:
        """Which node is lost, as a line for people, if this is noticed in time."""
        with self._state:
            self._state.wait_for(lambda: self._why_lost is not None, timeout_s)
            return self._why_lost

    def close(self) -> None:
        """Close the links. Rank 0 waits for the others to close theirs, if all have drained: their ranks are connected
        to its store. Idempotent."""
        self._left.set()
        self._watcher.join()
        links, self._links = self._links, {}
        waits = self._rank == 0 and len(self._drained) == self._size
        deadline = time.monotonic() + (_LEFT_S if waits else 0)
        for link in links.values():
            with contextlib.suppress(OSError):  # it is closed
                while (left_s := deadline - time.monotonic()) > 0 and select.select([link], [], [], left_s)[0]:
                    link.receive()
            link.close()

    # ---- the others ----

    def _broadcast(self, **message: Any) -> None:
        self._forward({"rank": self._rank, **message}, of=self._rank)

    def _forward(self, message: dict[str, Any], of: int) -> None:
        for rank, link in self._links.items():
            if rank != of:
                with contextlib.suppress(OSError):  # the watcher notices it
                    link.send(**message)

    def _watch(self) -> None:
        next_beat = time.monotonic()
        while not self._left.is_set():
            ready, _, _ = select.select(list(self._links.values()), [], [], max(0.0, next_beat - time.monotonic()))
            for rank in [rank for rank, link in self._links.items() if link in ready]:
                self._receive(rank)
            if time.monotonic() >= next_beat:
                next_beat = time.monotonic() + BEAT_S
                self._beat()

    def _receive(self, rank: int) -> None:
        try:
            for message in self._links[rank].receive():
                self._handle(rank, message)
        except Exception as error:  # the thread's boundary: the node is lost, whatever the error is
            log.debug("peer lost", exc_info=error)
            self._lost(f"data parallel rank {rank} {_HAS_ENDED}")

    def _beat(self) -> None:
        """Silence is counted in time slices in which this node listened, as in `baton.rpc.silence`."""
        self._broadcast(beat=True)
        limit_s = self._limits.silence if len(self._ready) == self._size else self._limits.loading_silence
        for rank, link in self._links.items():
            link.num_silent += 1
            if link.num_silent * BEAT_S > limit_s:
                self._lost(f"data parallel rank {rank} has been silent for {limit_s:g} s")

    def _handle(self, of: int, message: dict[str, Any]) -> None:
        if "beat" in message:
            return
        if self._rank == 0:
            self._forward(message, of)
        if "lost" in message:
            self._lost(str(message["lost"]))
        rank = int(message["rank"])
        with self._state:
            if "wave" in message:
                self._last_started = max(self._last_started, int(message["wave"]))
            if "ready" in message:
                self._ready.add(rank)
            if "drained" in message:
                self._has_drained(rank)
            self._stop_requested |= "stopping" in message
            stop = self._stop if "stopping" in message else None
            self._state.notify_all()
        if "wave" in message:
            self._wake()
        if stop is not None:
            stop()

    def _has_drained(self, rank: int) -> None:
        """Once all have drained, nodes end, and the last one to learn of it must not take that for a loss."""
        self._drained.add(rank)
        if len(self._drained) == self._size:
            self._left.set()
            self._state.notify_all()

    def _lost(self, why: str) -> None:
        """End this process: running steps cannot be unwound, since they wait for the lost node forever."""
        if self._left.is_set():
            return
        self._broadcast(lost=why)
        with self._state:
            self._why_lost = self._why_lost or why
            self._state.notify_all()
        if self._rank not in self._ready and self._left.wait(self._limits.report):
            return  # this node's start has failed, and it has said why
        log.critical("%s: the node ends", why)
        logging.shutdown()
        os._exit(1)
