"""Processes in the place of forked ranks, and a link in that of another host: a test says what they report."""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import socket
import subprocess

from node.limits import Limits
from node.peers.links import PeerLink
from node.ranks.forks import BEAT_S, RankFork, RankForks, RankPipe
from node.ranks.hosts import OtherHosts
from node.settings import NodeSettings

LIMITS = Limits(silence=2 * BEAT_S, loading_silence=3 * BEAT_S, report=0.0, close=0.0)
LIVES, ENDS, FAILS = ["sleep", "600"], ["true"], ["false"]


class Forks:
    """Ranks 1, 2, ..., each a process that runs a command in the place of a rank. `pipes`: their ends."""

    def __init__(self, *commands: list[str], limits: Limits = LIMITS) -> None:
        self._open = contextlib.ExitStack()
        heartbeats = mmap.mmap(-1, 8 * len(commands))
        self.counts = memoryview(heartbeats).cast("q")
        self.all: list[RankFork] = []
        self.pipes: list[RankPipe] = []
        for index, command in enumerate(commands):
            process = subprocess.Popen(command)
            self._open.callback(process.wait)
            self._open.callback(process.kill)
            ours, theirs = zip(*(socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in "ab"), strict=True)
            for end in (*ours, *theirs):
                self._open.enter_context(end)
            pidfd = os.pidfd_open(process.pid)
            if command is not LIVES:
                select.select([pidfd], [], [])
            self.all.append(RankFork(index + 1, process.pid, pidfd, *ours))
            self.pipes.append(RankPipe(index, heartbeats, *theirs))
        self.forks = RankForks(self.all, heartbeats, limits)

    def close(self) -> None:
        self.forks.unwatch()
        self._open.close()
        for rank in self.all:
            with contextlib.suppress(OSError):  # `end` has closed it
                os.close(rank.pidfd)


def hosts_of_two(limits: Limits = LIMITS) -> tuple[OtherHosts, PeerLink]:
    """What rank 0 has, and the second host's link, of which nobody is told yet."""
    hosts = OtherHosts(NodeSettings(model="none", tensor_parallel_size=4, nnodes=2), limits)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        host = PeerLink(socket.create_connection(listener.getsockname()))
        hosts._links = {1: PeerLink(listener.accept()[0])}
    return hosts, host
