"""Addresses to listen on: names, IPv6, and those of all interfaces."""

from __future__ import annotations

import socket
from collections.abc import Sequence

import pytest

from baton.address import HostPort
from baton.process.listening import bind_socket, listen_socket

LOCAL = {socket.AF_INET: ("127.0.0.1", 0), socket.AF_INET6: ("::1", 0, 0, 0)}


def reaches(host: str, listener: socket.socket) -> bool:
    try:
        socket.create_connection((host, listener.getsockname()[1]), timeout=5).close()
    except ConnectionRefusedError:
        return False
    return True


@pytest.mark.parametrize(
    ("host", "clients"),
    [
        ("127.0.0.1", {"127.0.0.1"}),
        ("::1", {"::1"}),
        ("0.0.0.0", {"127.0.0.1"}),
        ("::", {"127.0.0.1", "::1"}),
        ("0::0", {"127.0.0.1", "::1"}),
    ],
)
def test_each_address_is_for_its_clients(host: str, clients: set[str]) -> None:
    with listen_socket(HostPort(host, 0)) as listener:
        assert {client for client in ("127.0.0.1", "::1") if reaches(client, listener)} == clients


@pytest.mark.parametrize(
    ("families", "chosen"),
    [
        ([socket.AF_INET6], socket.AF_INET6),
        ([socket.AF_INET], socket.AF_INET),
        ([socket.AF_INET6, socket.AF_INET], socket.AF_INET),
    ],
)
def test_a_name_stands_for_an_address_that_it_has(
    families: Sequence[int], chosen: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of both kinds for that of IPv4, as most clients of `localhost` expect."""
    found = [(family, socket.SOCK_STREAM, 6, "", LOCAL[family]) for family in families]  # type: ignore[index]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    with bind_socket(HostPort("node-7.example", 0)) as bound:
        assert bound.family == chosen


def test_a_taken_port_is_an_error() -> None:
    with listen_socket(HostPort("127.0.0.1", 0)) as first, pytest.raises(OSError, match="in use"):
        listen_socket(HostPort(*first.getsockname()))
