"""The rendezvous of data parallel nodes.

the others connect to rank 0 and say what they serve -> rank 0 sends all of them the address of a TCPStore
-> `join_ranks`, on every rank of every node
"""

from __future__ import annotations

import contextlib
import logging
import socket
import time
from collections.abc import Callable, Container, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from baton.address import HostPort
from baton.incarnation import new_incarnation
from node.errors import StartupError
from node.limits import Limits
from node.peers.links import PeerLink
from node.peers.nodes import PeerNodes, RendezvousInfo
from node.peers.rendezvous import (
    RendezvousEndpoint,
    RendezvousServer,
    address_family,
    closed_on_error,
    int_field,
    join_rendezvous,
    mismatch,
    own_host,
)
from node.settings import NodeSettings

if TYPE_CHECKING:
    import torch

    from engine.model.parallel.data_parallel import DataParallel

log = logging.getLogger(__name__)


def join_nodes(
    settings: NodeSettings, serves: Mapping[str, str], wake: Callable[[], None], limits: Limits | None = None
) -> PeerNodes:
    """Wait for all data parallel nodes. serves: by flag, what must be the same on all of them. wake: see PeerNodes.
    Raises StartupError."""
    rank, size = settings.data_parallel_rank or 0, settings.data_parallel_size
    limits = limits or Limits.of(settings)
    address = HostPort(settings.data_parallel_address, settings.data_parallel_rpc_port)
    endpoint = RendezvousEndpoint(address, "--data-parallel-address", "--data-parallel-rpc-port", "data parallel node")
    if rank:
        link, rendezvous = _join_rank_0(endpoint, rank, size, serves, limits.join)
        return PeerNodes(rank, size, {0: link}, rendezvous, wake, limits)
    links = _await_all(endpoint, size, serves, limits.join)
    rendezvous = _start_store(address.host)
    for link in links.values():
        with contextlib.suppress(OSError):  # the watch knows
            link.send(port=rendezvous.store.port, group=rendezvous.group)
    return PeerNodes(rank, size, links, rendezvous, wake, limits)


def join_ranks(settings: NodeSettings, rank: int, store: HostPort, device: torch.device) -> DataParallel:
    """Connect to the ranks of all nodes. rank: of this process in its node. store: the address of the TCPStore at which
    they find each other. device: the rank's. Raises RuntimeError when a rank is lost."""
    from torch._C._distributed_c10d import TCPStore

    from engine.model.parallel.data_parallel import DataParallel
    from engine.model.parallel.group import GlooRanks

    size, node = settings.data_parallel_size, settings.data_parallel_rank or 0
    timeout = timedelta(seconds=settings.distributed_timeout_seconds)
    client = TCPStore(store.host, store.port, is_master=False, wait_for_workers=False, timeout=timeout)
    everyone = GlooRanks(client, rank * size + node, settings.num_ranks * size, host=own_host(store))
    if device.type == "cpu":
        return DataParallel(everyone, size)

    from engine.model.parallel.nccl_ranks import NcclRanks

    return DataParallel(NcclRanks(everyone, device), size)


# ---- rank 0 ----


def _await_all(
    endpoint: RendezvousEndpoint, size: int, serves: Mapping[str, str], timeout_s: float
) -> dict[int, PeerLink]:
    """Links to the other nodes, once each has connected and serves the same."""

    def check_hello(hello: dict[str, Any]) -> str | None:
        return _refusal(int_field(hello, "rank"), int_field(hello, "size"), hello["serves"], size, serves, links)

    deadline = time.monotonic() + timeout_s
    links: dict[int, PeerLink] = {}
    with RendezvousServer(endpoint, check_hello) as server:
        log.info("waiting for data parallel nodes address=%s number=%d", endpoint.address, size - 1)
        while len(links) < size - 1:
            ready = server.wait(links.values(), deadline - time.monotonic())
            if time.monotonic() > deadline:
                missing = ", ".join(str(rank) for rank in range(1, size) if rank not in links)
                for link in links.values():
                    link.close()
                raise StartupError(
                    f"--data-parallel-size: rank {missing} of {size} did not connect within {timeout_s:g} s"
                )
            for rank in [rank for rank, link in links.items() if link in ready]:
                links.pop(rank).close()  # it has ended, and may be started anew
            for hello, link in server.admit(ready):
                links[hello["rank"]] = link
    return links


def _refusal(
    rank: int, size: int, serves: Mapping[str, str], own_size: int, own: Mapping[str, str], taken: Container[int]
) -> str | None:
    """Why the node with this hello cannot be one of ours; None: it can."""
    if size != own_size:
        return f"--data-parallel-size: {size}, and rank 0 has {own_size}"
    if rank in taken or not 0 < rank < size:
        return f"--data-parallel-rank: {rank} is taken"
    return mismatch(serves, own, "data parallel rank 0")


def _start_store(host: str) -> RendezvousInfo:
    from torch._C._distributed_c10d import TCPStore

    listener = socket.create_server((host, 0), family=address_family(host))
    port = listener.getsockname()[1]
    server = TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    return RendezvousInfo(HostPort(host, port), new_incarnation(), server)


# ---- the others ----


def _join_rank_0(
    endpoint: RendezvousEndpoint, rank: int, size: int, serves: Mapping[str, str], timeout_s: float
) -> tuple[PeerLink, RendezvousInfo]:
    """Connect to rank 0, which may start later."""
    link, answer = join_rendezvous(endpoint, {"rank": rank, "size": size, "serves": dict(serves)}, timeout_s)
    with closed_on_error(link):
        return link, RendezvousInfo(HostPort(endpoint.address.host, int(answer["port"])), str(answer["group"]))
