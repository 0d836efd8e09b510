"""How hosts and their ranks join a node that is spread over several hosts, from the view of rank 0.

    each host says its number and its flags, each of its ranks its number and its weights
    -> rank 0 admits it, or refuses it and names the flag

A host or a rank that ends before all have joined may join again; so may the ranks of a host that ends or falls silent.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import time
from collections.abc import Iterator
from typing import Any

import baton
from baton.address import HostPort
from baton.settings import flag_name
from node.errors import StartupError
from node.limits import Limits
from node.peers.links import PeerLink
from node.peers.rendezvous import RendezvousEndpoint, RendezvousServer, int_field, mismatch
from node.ranks.forks import BEAT_S, HAS_ENDED
from node.settings import NodeSettings

log = logging.getLogger(__name__)

HOST, RANK = "host", "rank"
_RANK_0 = "--node-rank 0"
_HOST_SETTINGS = frozenset(
    {
        *("node_rank", "master_addr", "listen", "advertise", "metrics_port", "node_id", "transfer_interface"),
        *("model", "revision", "served_model_name", "config", "log_level", "log_format", "cpu_threads"),
        *("admin_key_file", "profile_dir", "cluster_secret_file", "kv_events_config", "drain_timeout"),
        *("cluster_ssl_keyfile", "cluster_ssl_certfile", "cluster_ssl_ca_certs", "silence_timeout"),
        "distributed_timeout_seconds",
    }
)
"""Settings that may differ between the hosts of a node: addresses, files, and what only rank 0 does. Weights are
compared by fingerprint; of a secret, only whether there is one."""


def rendezvous_of(settings: NodeSettings) -> RendezvousEndpoint:
    """The address at which rank 0 waits for the other hosts of the node."""
    address = HostPort(settings.master_addr, settings.master_port)
    return RendezvousEndpoint(address, "--master-addr", "--master-port", "host of this node")


def shared_flags(settings: NodeSettings) -> dict[str, str]:
    """The values that must be the same on all hosts of a node, by flag."""
    names = sorted(set(type(settings).model_fields) - _HOST_SETTINGS)
    flags = {flag_name(name): str(getattr(settings, name)) for name in names}
    flags |= {flag_name("cluster_secret_file"): "none" if settings.cluster_secret_file is None else "one"}
    return {"the command": settings.prog, "the version": baton.__version__} | flags


Joined = dict[tuple[str, int], PeerLink]
"""Links to the hosts and ranks that have joined, by (HOST, node rank) or (RANK, rank)."""


class JoiningHosts:
    """The hosts and ranks that rank 0 waits for. `wait` returns once all have joined."""

    def __init__(self, settings: NodeSettings, fingerprint: str, limits: Limits) -> None:
        self._settings, self._endpoint, self._limits = settings, rendezvous_of(settings), limits
        self._flags, self._weights = shared_flags(settings), {"--model": fingerprint}
        num_own = len(settings.host_ranks)
        self._expected = {(HOST, number) for number in range(1, settings.nnodes)}
        self._expected |= {(RANK, number) for number in range(num_own, settings.num_ranks)}
        self._joined: Joined = {}

    def wait(self) -> Joined:
        """Wait until all have joined. Raises StartupError."""
        next_beat = time.monotonic()
        deadline = next_beat + self._limits.join
        with RendezvousServer(self._endpoint, self._check_hello) as server, self._closed_on_error():
            log.info("waiting for other hosts address=%s number=%d", self._endpoint.address, self._settings.nnodes - 1)
            self._warn_of_loopback(server.host)
            while missing := self._expected - self._joined.keys():
                ready = server.wait(self._joined.values(), min(deadline, next_beat) - time.monotonic())
                if time.monotonic() > deadline:
                    who, limit_s = self._name(*min(missing)), self._limits.join
                    raise StartupError(
                        f"--nnodes: {who} did not connect to {self._endpoint.address} within {limit_s:g} s"
                    )
                for member in [member for member, link in self._joined.items() if link in ready]:
                    if member in self._joined:  # its host may just have ended
                        self._receive(member)
                for hello, link in server.admit(ready):
                    self._admit(hello, link)
                if time.monotonic() >= next_beat:
                    next_beat = time.monotonic() + BEAT_S
                    self._count_silence()
        return self._joined

    def _warn_of_loopback(self, host: str) -> None:
        """A host's /etc/hosts may map its own name to 127.0.1.1, while other hosts map it to its address."""
        name = self._settings.master_addr
        with contextlib.suppress(ValueError):
            ipaddress.ip_address(name)
            return
        if ipaddress.ip_address(host).is_loopback:
            log.warning("--master-addr: on this host %s is %s, to which no other host can connect", name, host)

    def _admit(self, hello: dict[str, Any], link: PeerLink) -> None:
        if "node_rank" not in hello:
            self._joined[RANK, hello["rank"]] = link
            return
        self._joined[HOST, hello["node_rank"]] = link
        with contextlib.suppress(OSError):  # then it is found to have ended
            link.send(welcome=True)

    def _check_hello(self, hello: dict[str, Any]) -> str | None:
        if "node_rank" not in hello:
            member = RANK, int_field(hello, "rank")
            if member not in self._expected or member in self._joined:
                return f"--node-rank: rank {member[1]} is there, or belongs to no other host"
            return mismatch(hello["serves"], self._weights, _RANK_0)
        member = HOST, int_field(hello, "node_rank")
        is_taken = member not in self._expected or member in self._joined
        taken = f"--node-rank: {member[1]} is taken" if is_taken else None
        return mismatch(hello["serves"], self._flags, _RANK_0) or taken

    def _receive(self, member: tuple[str, int]) -> None:
        """Hosts send heartbeats, and why they end. A rank sends nothing before it is told where ranks meet."""
        try:
            for message in self._joined[member].receive():
                if "lost" in message:
                    log.warning("%s: %s", self._name(*member), message["lost"])
        except OSError:
            self._lost(member, HAS_ENDED)
        else:
            if member[0] == RANK:
                self._lost(member, "says what no rank says")

    def _count_silence(self) -> None:
        """Counts slices of BEAT_S during which this process listened, as `baton.rpc.silence` does."""
        limit_s = self._limits.loading_silence
        for member, link in list(self._joined.items()):
            if member[0] != HOST:
                continue
            link.num_silent += 1
            if link.num_silent * BEAT_S > limit_s:
                self._lost(member, f"has been silent for {limit_s:g} s")

    def _lost(self, member: tuple[str, int], why: str) -> None:
        """Drop a host or a rank, which may be started again and join anew. A host is dropped with its ranks: if its
        machine has vanished, nothing closes their links."""
        log.warning("%s %s, and is waited for", self._name(*member), why)
        self._joined.pop(member).close()
        if member[0] == HOST:
            num_ranks = len(self._settings.host_ranks)
            for number in range(member[1] * num_ranks, (member[1] + 1) * num_ranks):
                if (link := self._joined.pop((RANK, number), None)) is not None:
                    link.close()

    def _name(self, kind: str, number: int) -> str:
        return f"node rank {number} of {self._settings.nnodes}" if kind == HOST else f"rank {number}"

    @contextlib.contextmanager
    def _closed_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            for link in self._joined.values():
                link.close()
            raise
