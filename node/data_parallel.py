"""How data parallel nodes meet.

    rank 0 listens, the others come and say what they serve -> rank 0 tells all where their ranks meet
    -> `join_ranks`, on every rank of every node

As between torch's processes, nothing is authenticated here: the network among these nodes must be their own.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import select
import socket
import time
from collections.abc import Callable, Container, Iterator, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING

from baton.address import HostPort
from baton.incarnation import new_incarnation
from node.errors import StartupError
from node.peer_links import PeerLink
from node.peer_nodes import Limits, Meeting, PeerNodes
from node.settings import NodeSettings

if TYPE_CHECKING:
    import torch

    from engine.model.parallel.data_parallel import DataParallel

log = logging.getLogger(__name__)

LIMITS = Limits()
_RETRY_S = 0.1
_GREETING_S = 5.0


def meet(
    settings: NodeSettings, serves: Mapping[str, str], wake: Callable[[], None], limits: Limits = LIMITS
) -> PeerNodes:
    """Wait for all data parallel nodes. serves: by flag, what must be the same on all of them. wake: see PeerNodes.
    Raises StartupError."""
    rank, size = settings.data_parallel_rank or 0, settings.data_parallel_size
    at = HostPort(settings.data_parallel_address, settings.data_parallel_rpc_port)
    if rank:
        link, meeting = _come(at, rank, size, serves, limits.join)
        return PeerNodes(rank, size, {0: link}, meeting, wake, limits)
    links = _await_all(at, size, serves, limits.join)
    meeting = _meeting(at.host)
    for link in links.values():
        with contextlib.suppress(OSError):  # the watch knows
            link.send(port=meeting.at.port, group=meeting.group)
    return PeerNodes(rank, size, links, meeting, wake, limits)


def join_ranks(settings: NodeSettings, rank: int, store: HostPort, device: torch.device) -> DataParallel:
    """Meet the ranks of all nodes. rank: of this process in its node. store: where they do. device: the rank's. Raises
    RuntimeError when a rank is lost."""
    from torch._C._distributed_c10d import TCPStore

    from engine.model.parallel.data_parallel import DataParallel
    from engine.model.parallel.group import GlooRanks

    size, node = settings.data_parallel_size, settings.data_parallel_rank or 0
    timeout = timedelta(seconds=LIMITS.join)
    met = TCPStore(store.host, store.port, is_master=False, wait_for_workers=False, timeout=timeout)
    everyone = GlooRanks(met, rank * size + node, settings.num_ranks * size, host=_own_host(store))
    if device.type == "cpu":
        return DataParallel(everyone, size)

    from engine.model.parallel.nccl_ranks import NcclRanks

    return DataParallel(NcclRanks(everyone, device), size)


# ---- rank 0 ----


def _await_all(at: HostPort, size: int, serves: Mapping[str, str], timeout_s: float) -> dict[int, PeerLink]:
    """The others, once each is there and serves the same."""
    deadline = time.monotonic() + timeout_s
    links: dict[int, PeerLink] = {}
    with _listening(at) as listener:
        log.info("waiting for data parallel nodes address=%s number=%d", at, size - 1)
        while len(links) < size - 1:
            waited: list[PeerLink | socket.socket] = [listener, *links.values()]
            ready, _, _ = select.select(waited, [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                missing = ", ".join(str(rank) for rank in range(1, size) if rank not in links)
                for link in links.values():
                    link.close()
                raise StartupError(f"--data-parallel-size: rank {missing} of {size} has not come for {timeout_s:g} s")
            for rank in [rank for rank, link in links.items() if link in ready]:
                links.pop(rank).close()  # it has ended, and may be started anew
            if listener in ready and (came := _greet(listener, size, serves, links)) is not None:
                links[came[0]] = came[1]
    return links


def _listening(at: HostPort) -> socket.socket:
    try:
        return socket.create_server((at.host, at.port), family=_family(at.host))
    except OSError as error:
        is_taken = error.errno in (errno.EADDRINUSE, errno.EACCES)
        flag = "--data-parallel-rpc-port" if is_taken else "--data-parallel-address"
        raise StartupError(f"{flag}: cannot listen on {at}: {error.strerror}") from error


def _greet(
    listener: socket.socket, size: int, serves: Mapping[str, str], taken: Container[int]
) -> tuple[int, PeerLink] | None:
    """The rank of a node that has come, and the link to it; None: it is refused, or no such node."""
    try:
        link = PeerLink(listener.accept()[0])
        with _closed_on_error(link):
            said = link.receive_one(_GREETING_S)
            why = _why_not(said["rank"], said["size"], said["serves"], size, serves, taken)
            if why is None:
                return int(said["rank"]), link
            log.warning("a data parallel node was refused: %s", why)
            link.send(refused=why)
            link.close()
    except (OSError, KeyError, TypeError, ValueError, AttributeError) as error:
        log.warning("what came to --data-parallel-rpc-port was no data parallel node: %r", error)
    return None


def _why_not(
    rank: int, size: int, serves: Mapping[str, str], own_size: int, own: Mapping[str, str], taken: Container[int]
) -> str | None:
    """Why the node that says this cannot be one of ours."""
    if size != own_size:
        return f"--data-parallel-size: {size}, and rank 0 has {own_size}"
    if rank in taken or not 0 < rank < size:
        return f"--data-parallel-rank: {rank} is taken"
    flag = next((flag for flag in own if own[flag] != serves.get(flag)), None)
    return flag and f"{flag}: {serves.get(flag)}, and data parallel rank 0 has {own[flag]}"


def _meeting(host: str) -> Meeting:
    from torch._C._distributed_c10d import TCPStore

    listener = socket.create_server((host, 0), family=_family(host))
    port = listener.getsockname()[1]
    server = TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    return Meeting(HostPort(host, port), new_incarnation(), server)


# ---- the others ----


def _come(at: HostPort, rank: int, size: int, serves: Mapping[str, str], timeout_s: float) -> tuple[PeerLink, Meeting]:
    """To rank 0, which may come later."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            link = PeerLink(socket.create_connection((at.host, at.port), timeout=_GREETING_S))
            with _closed_on_error(link):
                link.send(rank=rank, size=size, serves=dict(serves))
                said = link.receive_one(max(0.0, deadline - time.monotonic()))
                if "refused" in said:
                    raise StartupError(str(said["refused"]))
                return link, Meeting(HostPort(at.host, int(said["port"])), str(said["group"]))
        except (OSError, KeyError, ValueError) as error:
            if time.monotonic() > deadline:
                why = f"--data-parallel-address: not all nodes have come to {at} for {timeout_s:g} s: {error}"
                raise StartupError(why) from error
            time.sleep(_RETRY_S)


@contextlib.contextmanager
def _closed_on_error(link: PeerLink) -> Iterator[None]:
    try:
        yield
    except BaseException:
        link.close()
        raise


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _own_host(to: HostPort) -> str:
    """This machine's address on the way to that one."""
    with socket.socket(_family(to.host), socket.SOCK_DGRAM) as probe:
        probe.connect((to.host, to.port))
        return str(probe.getsockname()[0])
