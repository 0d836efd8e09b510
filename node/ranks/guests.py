"""Which hosts and ranks rank 0 lets into a node that is spread over several hosts.

    each host: its number and its flags; each of its ranks: its number and its weights -> welcome, or refused by flag

One that ends before all have come may come again; so may the ranks of a host that ends, or is silent.
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
from node.peers.links import PeerLink
from node.peers.rendezvous import RendezvousEndpoint, RendezvousServer, int_field, mismatch
from node.ranks.forks import BEAT_S, HAS_ENDED, Limits
from node.settings import NodeSettings

log = logging.getLogger(__name__)

HOST, RANK = "host", "rank"
_RANK_0 = "--node-rank 0"
_OWN_TO_A_HOST = frozenset(
    {
        *("node_rank", "master_addr", "listen", "advertise", "metrics_port", "node_id", "transfer_interface"),
        *("model", "revision", "served_model_name", "config", "log_level", "log_format", "cpu_threads"),
        *("admin_key_file", "profile_dir", "cluster_secret_file", "kv_events_config", "drain_timeout"),
        *("cluster_ssl_keyfile", "cluster_ssl_certfile", "cluster_ssl_ca_certs", "silence_timeout"),
        "distributed_timeout_seconds",
    }
)
"""Settings that may differ between hosts of a node: of addresses and files, and of what rank 0 alone does. Weights are
compared by themselves, and of a secret whether there is one."""


def rendezvous_of(settings: NodeSettings) -> RendezvousEndpoint:
    """At which rank 0 waits for the other hosts of the node."""
    address = HostPort(settings.master_addr, settings.master_port)
    return RendezvousEndpoint(address, "--master-addr", "--master-port", "host of this node")


def shared_flags(settings: NodeSettings) -> dict[str, str]:
    """By flag, what must be the same on all hosts of a node."""
    names = sorted(set(type(settings).model_fields) - _OWN_TO_A_HOST)
    flags = {flag_name(name): str(getattr(settings, name)) for name in names}
    flags |= {flag_name("cluster_secret_file"): "none" if settings.cluster_secret_file is None else "one"}
    return {"the command": settings.prog, "the version": baton.__version__} | flags


Came = dict[tuple[str, int], PeerLink]


class Guests:
    """Those that rank 0 waits for: hosts, by their --node-rank, and ranks."""

    def __init__(self, settings: NodeSettings, fingerprint: str, limits: Limits) -> None:
        self._settings, self._endpoint, self._limits = settings, rendezvous_of(settings), limits
        self._flags, self._weights = shared_flags(settings), {"--model": fingerprint}
        own = len(settings.host_ranks)
        self._wanted = {(HOST, number) for number in range(1, settings.nnodes)}
        self._wanted |= {(RANK, number) for number in range(own, settings.num_ranks)}
        self._came: Came = {}

    def wait(self) -> Came:
        """Until all are there. Raises StartupError."""
        next_beat = time.monotonic()
        deadline = next_beat + self._limits.join
        with RendezvousServer(self._endpoint, self._why_not) as server, self._closed_on_error():
            log.info("waiting for other hosts address=%s number=%d", self._endpoint.address, self._settings.nnodes - 1)
            self._warn_of_loopback(server.host)
            while missing := self._wanted - self._came.keys():
                ready = server.wait(self._came.values(), min(deadline, next_beat) - time.monotonic())
                if time.monotonic() > deadline:
                    who, limit_s = self._named(*min(missing)), self._limits.join
                    raise StartupError(
                        f"--nnodes: {who} did not connect to {self._endpoint.address} within {limit_s:g} s"
                    )
                for guest in [guest for guest, link in self._came.items() if link in ready]:
                    if guest in self._came:  # its host may just have ended
                        self._hear(guest)
                for said, link in server.admit(ready):
                    self._let_in(said, link)
                if time.monotonic() >= next_beat:
                    next_beat = time.monotonic() + BEAT_S
                    self._count_silence()
        return self._came

    def _warn_of_loopback(self, host: str) -> None:
        """A host's own name may be 127.0.1.1 in its /etc/hosts, and something else on the others."""
        name = self._settings.master_addr
        with contextlib.suppress(ValueError):
            ipaddress.ip_address(name)
            return
        if ipaddress.ip_address(host).is_loopback:
            log.warning("--master-addr: on this host %s is %s, to which no other host can connect", name, host)

    def _let_in(self, said: dict[str, Any], link: PeerLink) -> None:
        if "node_rank" not in said:
            self._came[RANK, said["rank"]] = link
            return
        self._came[HOST, said["node_rank"]] = link
        with contextlib.suppress(OSError):  # then it is found to have ended
            link.send(welcome=True)

    def _why_not(self, said: dict[str, Any]) -> str | None:
        if "node_rank" not in said:
            guest = RANK, int_field(said, "rank")
            if guest not in self._wanted or guest in self._came:
                return f"--node-rank: rank {guest[1]} is there, or belongs to no other host"
            return mismatch(said["serves"], self._weights, _RANK_0)
        guest = HOST, int_field(said, "node_rank")
        is_taken = guest not in self._wanted or guest in self._came
        taken = f"--node-rank: {guest[1]} is taken" if is_taken else None
        return mismatch(said["serves"], self._flags, _RANK_0) or taken

    def _hear(self, guest: tuple[str, int]) -> None:
        """Beats of hosts, and why they end; ranks have nothing to say before they are told where to meet."""
        try:
            for said in self._came[guest].receive():
                if "lost" in said:
                    log.warning("%s: %s", self._named(*guest), said["lost"])
        except OSError:
            self._lost(guest, HAS_ENDED)
        else:
            if guest[0] == RANK:
                self._lost(guest, "says what no rank says")

    def _count_silence(self) -> None:
        """In slices in which this process listened, as in `baton.silence`."""
        limit_s = self._limits.loading_silence
        for guest, link in list(self._came.items()):
            if guest[0] != HOST:
                continue
            link.num_silent += 1
            if link.num_silent * BEAT_S > limit_s:
                self._lost(guest, f"has been silent for {limit_s:g} s")

    def _lost(self, guest: tuple[str, int], why: str) -> None:
        """It may be started anew: a host with its ranks, which would not be missed if it vanished with its machine."""
        log.warning("%s %s, and is waited for", self._named(*guest), why)
        self._came.pop(guest).close()
        if guest[0] == HOST:
            each = len(self._settings.host_ranks)
            for number in range(guest[1] * each, (guest[1] + 1) * each):
                if (link := self._came.pop((RANK, number), None)) is not None:
                    link.close()

    def _named(self, kind: str, number: int) -> str:
        return f"node rank {number} of {self._settings.nnodes}" if kind == HOST else f"rank {number}"

    @contextlib.contextmanager
    def _closed_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            for link in self._came.values():
                link.close()
            raise
