"""A node takes the hellos of its peers side by side: a silent connection holds up no other."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest

from baton.address import HostPort
from deploy.ports import HeldPort
from node.peers.links import PeerLink
from node.peers.rendezvous import RendezvousEndpoint, RendezvousServer

PATIENCE_S = 20.0
TIMEOUT_S = 0.3
MAX_PENDING = 4


class Scene:
    def __init__(self, port: HeldPort, timeout_s: float) -> None:
        self.endpoint = RendezvousEndpoint(port.address, "--address", "--port", "node")
        self.server = RendezvousServer(self.endpoint, self._check_hello, timeout_s=timeout_s, max_pending=MAX_PENDING)
        self.joined: dict[Any, PeerLink] = {}
        self.sockets: list[socket.socket] = []

    def _check_hello(self, hello: dict[str, Any]) -> str | None:
        return "taken" if hello["number"] in self.joined else None

    def connect(self, data: bytes = b"") -> socket.socket:
        """A peer that sends this, once the server has taken its connection."""
        self.sockets.append(
            socket.create_connection((self.endpoint.address.host, self.endpoint.address.port), timeout=PATIENCE_S)
        )
        self.turn()
        self.sockets[-1].sendall(data)
        return self.sockets[-1]

    def turn(self, timeout_s: float = PATIENCE_S) -> None:
        for hello, link in self.server.admit(self.server.wait(self.joined.values(), timeout_s)):
            self.joined[hello["number"]] = link

    def close(self) -> None:
        self.server.__exit__(None, None, None)
        for one in self.sockets:
            one.close()
        for link in self.joined.values():
            link.close()


@pytest.fixture
def scene(request: pytest.FixtureRequest) -> Iterator[Scene]:
    with HeldPort(HostPort("127.0.0.1", 0)) as port:
        scene = Scene(port, getattr(request, "param", PATIENCE_S))
        yield scene
        scene.close()


def test_a_silent_connection_holds_up_no_other(scene: Scene) -> None:
    for data in (b"", b"", b"{"):
        scene.connect(data)
    scene.connect(b'{"number": 1}\n')
    deadline = time.monotonic() + PATIENCE_S / 2
    while 1 not in scene.joined and time.monotonic() < deadline:
        scene.turn()
    assert list(scene.joined) == [1]


def test_a_hello_may_come_in_pieces(scene: Scene) -> None:
    one = scene.connect(b'{"num')
    scene.turn()
    assert not scene.joined
    one.sendall(b'ber": 1}\n{"nu')
    scene.turn()
    one.sendall(b'mber": 2}\n')
    assert scene.joined[1].receive_one(PATIENCE_S) == {"number": 2}


@pytest.mark.parametrize("scene", [TIMEOUT_S], indirect=True)
def test_a_silent_connection_is_dropped_in_time(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    silent, slow = scene.connect(), scene.connect(b"{")
    began = time.monotonic()
    while len(caplog.records) < 2:
        scene.turn()
        assert time.monotonic() < began + PATIENCE_S / 2
    assert silent.recv(1) == slow.recv(1) == b""
    assert caplog.text.count("what came to --port was no node: TimeoutError") == 2


def test_of_too_many_connections_the_oldest_is_dropped(scene: Scene) -> None:
    first, *others = [scene.connect() for _ in range(MAX_PENDING + 1)]
    assert first.recv(1) == b""
    others[0].sendall(b'{"number": 1}\n')
    scene.turn()
    assert list(scene.joined) == [1]


def test_of_two_equal_hellos_at_once_one_is_refused(scene: Scene) -> None:
    one, other = scene.connect(), scene.connect()
    for each in (one, other):
        each.sendall(b'{"number": 1}\n')
    while not scene.joined:
        scene.turn()
    scene.turn(0)
    assert PeerLink(other).receive_one(PATIENCE_S) == {"refused": "taken"}
    assert list(scene.joined) == [1]


def test_connections_without_a_hello_are_dropped_in_the_end(scene: Scene) -> None:
    silent = scene.connect()
    with scene.server:
        pass
    assert silent.recv(1) == b""
