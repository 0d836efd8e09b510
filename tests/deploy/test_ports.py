"""Ports that are held for children."""

from __future__ import annotations

import socket

import pytest

from baton.address import HostPort
from deploy.ports import HeldPort, PortTaken

ANY = HostPort("127.0.0.1", 0)


def test_held_port_can_be_listened_on_again_and_again() -> None:
    held = HeldPort(ANY)
    for _ in range(2):
        with socket.create_server((held.address.host, held.address.port)) as server:
            client = socket.create_connection(server.getsockname(), timeout=5)
            accepted, _ = server.accept()
            accepted.close()
            assert client.recv(1) == b""
            client.close()
    held.close()


def test_held_port_is_given_to_nobody_else() -> None:
    held = [HeldPort(ANY) for _ in range(50)]
    assert len({port.address for port in held}) == len(held)
    for port in held:
        port.close()


def test_taken_port_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = HostPort(*server.getsockname())
        with pytest.raises(PortTaken, match=f"^{address} cannot be had: Address already in use$"):
            HeldPort(address)


def test_address_of_another_machine_is_named() -> None:
    with pytest.raises(PortTaken, match=r"^192\.0\.2\.1:8000 cannot be had: "):
        HeldPort(HostPort("192.0.2.1", 8000))
