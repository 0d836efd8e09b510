"""Connections between rank 0 and each other rank on a CPU, for small tensors.

gloo would do, but the thread behind its connections spins while the one that holds its lock waits for a core: where
several ranks share the cores, that takes more CPU time than what they compute, and time that the others wait.
"""

from __future__ import annotations

import hmac
import secrets
import select
import socket
import struct
import time
from datetime import timedelta

import torch
from torch import Tensor
from torch._C._distributed_c10d import Store

_KEY = "the star of rank 0"
_NUM_TOKEN_BYTES, _NUM_RANK_BYTES = 16, 4
_LOST = "another rank is lost"
"""Without its number, which in a part of a node's ranks, or among several nodes, is not its number in its node."""


class Star:
    """`send` and `receive` take contiguous tensors, of which they move the bytes, and raise RuntimeError if the other
    rank is lost or lets them wait for `timeout_s`. A tensor that was sent may change at once."""

    def __init__(
        self, store: Store, rank: int, size: int, host: str, timeout_s: float, connect_timeout_s: float
    ) -> None:
        """Connect: all ranks at the same time. store: where they meet. host: the address at which the others reach
        rank 0, if it is this one. Raises RuntimeError."""
        self._links: dict[int, socket.socket] = {}
        deadline = time.monotonic() + connect_timeout_s
        try:
            if rank:
                self._links[0] = _connect(store, rank, deadline)
            else:
                self._accept_all(store, size, host, deadline)
        except OSError as error:
            whom = "rank 0" if rank else "the others"
            raise RuntimeError(f"rank {rank} cannot connect to {whom}: {error}") from error
        for link in self._links.values():
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            _set_timeout(link, timeout_s)

    def __del__(self) -> None:
        for link in self._links.values():
            link.close()

    def send(self, x: Tensor, to: int) -> None:
        try:
            self._links[to].sendall(_bytes_of(x))
        except OSError as error:
            raise RuntimeError(f"{_LOST}: {error}") from error

    def receive(self, x: Tensor, of: int) -> None:
        """Overwrite x with the next tensor that rank `of` sends to this one."""
        try:
            _receive(self._links[of], _bytes_of(x))
        except OSError as error:
            raise RuntimeError(f"{_LOST}: {error}") from error

    def _accept_all(self, store: Store, size: int, host: str, deadline: float) -> None:
        """Whoever connects says a token from the store first: another process may try the port, and say nothing."""
        token = secrets.token_bytes(_NUM_TOKEN_BYTES)
        family, *_, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        silent = set[socket.socket]()
        with socket.create_server(address[:2], family=family, backlog=size) as listener:
            store.set(_KEY, f"{listener.getsockname()[1]} {token.hex()} {host}")
            while len(self._links) < size - 1:
                ready, _, _ = select.select([listener, *silent], [], [], _left_s(deadline))
                if not ready:
                    raise TimeoutError("timed out")
                for link in silent.intersection(ready):
                    silent.remove(link)
                    if (rank := _rank_behind(link, token)) is None:
                        link.close()
                    else:
                        self._links[rank] = link
                if listener in ready:
                    silent.add(listener.accept()[0])
        for link in silent:
            link.close()


def _connect(store: Store, rank: int, deadline: float) -> socket.socket:
    store.wait([_KEY], timedelta(seconds=_left_s(deadline)))
    port, token, host = store.get(_KEY).decode().split(" ")
    link = socket.create_connection((host, int(port)), _left_s(deadline))
    link.sendall(bytes.fromhex(token) + rank.to_bytes(_NUM_RANK_BYTES))
    return link


def _rank_behind(link: socket.socket, token: bytes) -> int | None:
    """link: on which something has arrived: all that a rank says, since it is short and the first."""
    try:
        hello = link.recv(_NUM_TOKEN_BYTES + _NUM_RANK_BYTES, socket.MSG_DONTWAIT)
    except OSError:
        return None
    said, rank = hello[:_NUM_TOKEN_BYTES], int.from_bytes(hello[_NUM_TOKEN_BYTES:])
    return rank if hmac.compare_digest(said, token) else None


def _receive(link: socket.socket, into: memoryview) -> None:
    while into:
        count = link.recv_into(into, 0, socket.MSG_WAITALL)
        if not count:
            raise ConnectionResetError("it has closed its connection")
        into = into[count:]


def _left_s(deadline: float) -> float:
    return max(deadline - time.monotonic(), 1e-3)


def _set_timeout(link: socket.socket, timeout_s: float) -> None:
    """For each call, by the kernel: with a timeout of Python's, each would take two system calls."""
    link.settimeout(None)
    seconds, microseconds = divmod(round(timeout_s * 1e6), 10**6)
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        link.setsockopt(socket.SOL_SOCKET, option, struct.pack("@ll", seconds, microseconds))


def _bytes_of(x: Tensor) -> memoryview:
    """The memory of a contiguous tensor."""
    return x.detach().view(-1).view(torch.uint8).numpy().data
