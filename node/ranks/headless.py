"""A host of a node with `--node-rank` above 0: it has ranks, but neither an address nor a scheduler.

    fork its ranks -> connect to rank 0's host -> watch its ranks, and send heartbeats -> end when the node ends

exit code 0    the node has ended in order
          1    it was refused, a rank of it is lost, the host with rank 0 is, or the node exits with 1
128 + signal   a signal before the node serves, or a second one, at once

A first signal, when the node serves, is passed on: the node drains, and ends with all its hosts.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from baton.process.signals import stop_signals
from node import preflight
from node.limits import Limits
from node.peers.links import PeerLink
from node.peers.rendezvous import HELLO_TIMEOUT_S, join_rendezvous
from node.ranks.forks import BEAT_S, LossReason, RankFork, RankForks, RankPipe, fork, to_blame
from node.ranks.joining import rendezvous_of, shared_flags
from node.ranks.rank_links import RemoteRankLink
from node.ranks.ranks import RunRank
from node.settings import NodeSettings

log = logging.getLogger(__name__)

_RANK_0 = "node rank 0"


def run_headless(settings: NodeSettings, run: RunRank, limits: Limits | None = None) -> int:
    """Run until the node ends, and return the exit code. Call it on the main thread, before this process starts others.
    Raises StartupError."""
    limits, endpoint = limits or Limits.of(settings), rendezvous_of(settings)

    def run_fork(number: int, pipe: RankPipe) -> None:
        run(RemoteRankLink(number, settings.num_ranks, pipe, endpoint, limits.join), settings)

    host, code = _Host(settings, fork(settings.host_ranks, run_fork, limits), limits), 1
    try:
        code = host.run()
    finally:
        code = host.end(code)
    log.info("stopped exit_code=%d", code)
    return code


class _Host:
    """This host and its ranks, as a part of the node."""

    def __init__(self, settings: NodeSettings, forks: RankForks, limits: Limits) -> None:
        self._settings, self._forks, self._limits = settings, forks, limits
        self._link: PeerLink | None = None
        self._began = self._serves = self._signalled = self._node_failed = False
        self._signals = contextlib.ExitStack()
        self._over = threading.Event()

    def run(self) -> int:
        """Run until the node ends, and return the exit code. Raises StartupError."""
        self._forks.watch(self._rank_lost)
        preflight.check(self._settings)  # after the forks: it asks for GPUs
        settings = self._settings
        hello = {"node_rank": settings.node_rank, "serves": shared_flags(settings)}
        log.info("coming to rank 0 address=%s node_rank=%d", rendezvous_of(settings).address, settings.node_rank)
        self._link, _ = join_rendezvous(rendezvous_of(settings), hello, self._limits.join, answer_s=HELLO_TIMEOUT_S)
        signals = self._signals.enter_context(_signals(self._heed))
        try:
            return self._follow(self._link, signals)
        except OSError:
            return self._ends(f"{_RANK_0} has ended")

    def end(self, code: int) -> int:
        """End its ranks, and kill those that have not ended in time. Rank 0 waits until the link is closed. Returns the
        exit code: `code`, or 1 if a rank was lost before the node ended in order. Rank 0 may have met that loss by
        itself, and this host has not noticed it until now."""
        self._over.set()
        reason = to_blame(self._forks.end(self._limits.close if code == 0 else 0))
        if code == 0 and reason is not None:
            self._report(reason)
            code = self._ends(reason.text)
        if code == 0:
            self._send(ended=True)
            code = self._ends(f"{_RANK_0} has ended with exit code 1") if self._node_failed else 0
        if self._link is not None:
            self._link.close()
        self._signals.close()
        return code

    def _follow(self, link: PeerLink, signals: socket.socket) -> int:
        """Follow rank 0 until the node ends, and return the exit code. Raises OSError if the link is broken."""
        next_beat = time.monotonic()
        while True:
            waited: list[PeerLink | socket.socket] = [link, signals]
            ready, _, _ = select.select(waited, [], [], max(0.0, next_beat - time.monotonic()))
            if signals in ready:
                signals.recv(1)
                log.info("draining")
                self._send(stopping=True)
            for message in link.receive() if link in ready else ():
                if (code := self._handle(message)) is not None:
                    return code
            if time.monotonic() >= next_beat:
                next_beat = time.monotonic() + BEAT_S
                self._send(beat=True)
                link.num_silent += 1
            if link.num_silent * BEAT_S > self._silence_s:
                return self._ends(f"{_RANK_0} has been silent for {self._silence_s:g} s")
            self._take_ready()

    @property
    def _silence_s(self) -> float:
        """Rank 0 sends nothing before all hosts have joined."""
        if not self._began:
            return self._limits.join
        return self._limits.silence if self._serves else self._limits.loading_silence

    def _handle(self, message: dict[str, Any]) -> int | None:
        self._began |= "beat" in message
        if "stop" in message:
            self._node_failed = bool(message.get("failed"))
            return 0
        if "lost" in message:
            return self._ends(f"{_RANK_0}: {message['lost']}")
        self._serves |= "serves" in message
        return None

    def _heed(self, number: int, frame: object) -> None:
        """Handle a signal, also while this host ends: all hosts may be told to stop, one a moment after another."""
        if self._signalled or not self._serves:
            os._exit(128 + number)
        self._signalled = True

    def _take_ready(self) -> None:
        """From now on, ranks that have loaded may be silent for a shorter time only."""
        for rank in self._forks.all:
            if not rank.ready:
                rank.take_ready(rank.peek())

    def _ends(self, why: str) -> int:
        log.critical("%s: this part of the node ends", why)
        return 1

    def _rank_lost(self, rank: RankFork, reason: LossReason) -> None:
        """Called on the watcher's thread. The ranks of all hosts wait for this one forever, so the node ends."""
        if rank.has_ended_in_order and self._over.wait(self._limits.report):
            return  # the node has closed it, and tells this host too
        if reason.is_secondary:
            if self._over.wait(self._limits.report / 2):
                return  # rank 0 knows which rank was lost first
            reason = self._forks.loss_reason(0) or reason
        self._report(reason)
        self._ends(reason.text)
        logging.shutdown()
        os._exit(1)

    def _report(self, reason: LossReason) -> None:
        self._send(lost=reason.text, met=reason.is_secondary)

    def _send(self, **message: Any) -> None:
        """Does nothing if rank 0 has ended, which `_follow` notices once it has read what rank 0 said last."""
        if self._link is not None:
            with contextlib.suppress(OSError):
                self._link.send(**message)


@contextlib.contextmanager
def _signals(handle: Callable[[int, object], None]) -> Iterator[socket.socket]:
    """Handle the signals that ask this process to end. The socket yields a byte for each."""
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    before = {number: signal.signal(number, handle) for number in stop_signals()}
    signal.set_wakeup_fd(theirs.fileno())
    try:
        yield ours
    finally:
        signal.set_wakeup_fd(-1)
        for number, handler in before.items():
            signal.signal(number, handler)
        ours.close()
        theirs.close()
