"""Which hosts and ranks rank 0 lets into a node that is spread over several hosts.

    each host: its number and its flags; each of its ranks: its number and its weights -> welcome, or refused by flag

One that ends before all have come may come again.
"""

from __future__ import annotations

import contextlib
import logging
import select
import socket
import time
from collections.abc import Iterator
from typing import Any

import baton
from baton.address import HostPort
from baton.settings import flag_name
from node.errors import StartupError
from node.greetings import Place, greet, why_not_alike
from node.peer_links import PeerLink
from node.rank_forks import HAS_ENDED
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
    }
)
"""Settings that may differ between hosts of a node: of addresses and files, and of what rank 0 alone does. Weights are
compared by themselves."""


def place_of(settings: NodeSettings) -> Place:
    """Where the hosts of the node meet."""
    at = HostPort(settings.master_addr, settings.master_port)
    return Place(at, "--master-addr", "--master-port", "host of this node")


def shared_flags(settings: NodeSettings) -> dict[str, str]:
    """By flag, what must be the same on all hosts of a node."""
    names = sorted(set(type(settings).model_fields) - _OWN_TO_A_HOST)
    flags = {flag_name(name): str(getattr(settings, name)) for name in names}
    return {"the command": settings.prog, "the version": baton.__version__} | flags


Came = dict[tuple[str, int], PeerLink]


class Guests:
    """Those that rank 0 waits for: hosts, by their --node-rank, and ranks."""

    def __init__(self, settings: NodeSettings, fingerprint: str) -> None:
        self._settings, self._place = settings, place_of(settings)
        self._flags, self._weights = shared_flags(settings), {"--model": fingerprint}
        own = len(settings.host_ranks)
        self._wanted = {(HOST, number) for number in range(1, settings.nnodes)}
        self._wanted |= {(RANK, number) for number in range(own, settings.num_ranks)}
        self._came: Came = {}

    def wait(self, timeout_s: float) -> Came:
        """Until all are there. Raises StartupError."""
        deadline = time.monotonic() + timeout_s
        with self._place.listen() as listener, self._closed_on_error():
            log.info("waiting for other hosts address=%s number=%d", self._place.at, self._settings.nnodes - 1)
            while missing := self._wanted - self._came.keys():
                waited: list[PeerLink | socket.socket] = [listener, *self._came.values()]
                ready, _, _ = select.select(waited, [], [], max(0.0, deadline - time.monotonic()))
                if time.monotonic() > deadline:
                    who = self._named(*min(missing))
                    raise StartupError(f"--nnodes: {who} has not come to {self._place.at} for {timeout_s:g} s")
                for guest in [guest for guest, link in self._came.items() if link in ready]:
                    self._hear(guest)
                if listener in ready:
                    self._greet(listener)
        return self._came

    def _greet(self, listener: socket.socket) -> None:
        if (greeted := greet(listener, self._place, self._why_not)) is None:
            return
        said, link = greeted
        guest = (HOST, int(said["node_rank"])) if "node_rank" in said else (RANK, int(said["rank"]))
        self._came[guest] = link
        if guest[0] == HOST:
            with contextlib.suppress(OSError):  # then it is found to have ended
                link.send(welcome=True)

    def _why_not(self, said: dict[str, Any]) -> str | None:
        if "node_rank" not in said:
            guest = RANK, int(said["rank"])
            if guest not in self._wanted or guest in self._came:
                return f"--node-rank: rank {guest[1]} is there, or belongs to no other host"
            return why_not_alike(said["serves"], self._weights, _RANK_0)
        guest = HOST, int(said["node_rank"])
        is_taken = guest not in self._wanted or guest in self._came
        taken = f"--node-rank: {guest[1]} is taken" if is_taken else None
        return why_not_alike(said["serves"], self._flags, _RANK_0) or taken

    def _hear(self, guest: tuple[str, int]) -> None:
        """Beats; or it has ended, and may be started anew: a host with its ranks, which say so themselves."""
        try:
            for said in self._came[guest].receive():
                if "lost" in said:
                    log.warning("%s: %s", self._named(*guest), said["lost"])
        except OSError:
            log.warning("%s %s, and is waited for", self._named(*guest), HAS_ENDED)
            self._came.pop(guest).close()

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
