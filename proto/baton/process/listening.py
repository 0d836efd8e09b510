"""Sockets that listen for clients, by the same rules in all processes: those of gRPC, which opens its own."""

from __future__ import annotations

import socket
from typing import Any

from baton.address import HostPort


def bind_socket(address: HostPort, reuse_port: bool = False) -> socket.socket:
    """A TCP socket that has `address`, with a free port for port 0, and does not listen yet.

    A name stands for its first IPv4 address or, if it has none, for its first IPv6 address. `[::]` is for clients of
    IPv4 too. Raises OSError.
    """
    family, sockaddr = _resolve(address)
    opened = socket.socket(family, socket.SOCK_STREAM)
    try:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if reuse_port:
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if family == socket.AF_INET6:
            opened.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(not address.is_wildcard))
        opened.bind(sockaddr)
    except OSError:
        opened.close()
        raise
    return opened


def listen_socket(address: HostPort, backlog: int = 128, reuse_port: bool = False) -> socket.socket:
    """A `bind_socket` that listens. Raises OSError."""
    opened = bind_socket(address, reuse_port)
    try:
        opened.listen(backlog)
    except OSError:
        opened.close()
        raise
    return opened


def _resolve(address: HostPort) -> tuple[int, Any]:
    """Family and address, as `socket` takes them."""
    found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, _, _, _, sockaddr = min(found, key=lambda entry: entry[0] != socket.AF_INET)
    return family, sockaddr
