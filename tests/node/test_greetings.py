"""Those that come to a node are greeted side by side: who says nothing keeps nobody out."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest

from baton.address import HostPort
from deploy.ports import HeldPort
from node.peers.greetings import Greeter, Place
from node.peers.links import PeerLink

PATIENCE_S = 20.0
TIMEOUT_S = 0.3
MAX_COMING = 4


class Scene:
    def __init__(self, port: HeldPort, timeout_s: float) -> None:
        self.place = Place(port.address, "--address", "--port", "node")
        self.greeter = Greeter(self.place, self._why_not, timeout_s=timeout_s, max_coming=MAX_COMING)
        self.came: dict[Any, PeerLink] = {}
        self.sockets: list[socket.socket] = []

    def _why_not(self, said: dict[str, Any]) -> str | None:
        return "taken" if said["number"] in self.came else None

    def arrive(self, data: bytes = b"") -> socket.socket:
        """One that sends this, once the greeter has taken its connection."""
        self.sockets.append(socket.create_connection((self.place.at.host, self.place.at.port), timeout=PATIENCE_S))
        self.turn()
        self.sockets[-1].sendall(data)
        return self.sockets[-1]

    def turn(self, timeout_s: float = PATIENCE_S) -> None:
        for said, link in self.greeter.greet(self.greeter.wait(self.came.values(), timeout_s)):
            self.came[said["number"]] = link

    def close(self) -> None:
        self.greeter.__exit__(None, None, None)
        for one in self.sockets:
            one.close()
        for link in self.came.values():
            link.close()


@pytest.fixture
def scene(request: pytest.FixtureRequest) -> Iterator[Scene]:
    with HeldPort(HostPort("127.0.0.1", 0)) as port:
        scene = Scene(port, getattr(request, "param", PATIENCE_S))
        yield scene
        scene.close()


def test_who_says_nothing_keeps_nobody_out(scene: Scene) -> None:
    for data in (b"", b"", b"{"):
        scene.arrive(data)
    scene.arrive(b'{"number": 1}\n')
    deadline = time.monotonic() + PATIENCE_S / 2
    while 1 not in scene.came and time.monotonic() < deadline:
        scene.turn()
    assert list(scene.came) == [1]


def test_a_hello_may_come_in_pieces(scene: Scene) -> None:
    one = scene.arrive(b'{"num')
    scene.turn()
    assert not scene.came
    one.sendall(b'ber": 1}\n{"nu')
    scene.turn()
    one.sendall(b'mber": 2}\n')
    assert scene.came[1].receive_one(PATIENCE_S) == {"number": 2}


@pytest.mark.parametrize("scene", [TIMEOUT_S], indirect=True)
def test_who_says_nothing_is_let_go_in_time(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    silent, slow = scene.arrive(), scene.arrive(b"{")
    began = time.monotonic()
    while len(caplog.records) < 2:
        scene.turn()
        assert time.monotonic() < began + PATIENCE_S / 2
    assert silent.recv(1) == slow.recv(1) == b""
    assert caplog.text.count("what came to --port was no node: TimeoutError") == 2


def test_of_too_many_the_oldest_is_let_go(scene: Scene) -> None:
    first, *others = [scene.arrive() for _ in range(MAX_COMING + 1)]
    assert first.recv(1) == b""
    others[0].sendall(b'{"number": 1}\n')
    scene.turn()
    assert list(scene.came) == [1]


def test_of_two_that_say_the_same_at_once_one_is_refused(scene: Scene) -> None:
    one, other = scene.arrive(), scene.arrive()
    for each in (one, other):
        each.sendall(b'{"number": 1}\n')
    while not scene.came:
        scene.turn()
    scene.turn(0)
    assert PeerLink(other).receive_one(PATIENCE_S) == {"refused": "taken"}
    assert list(scene.came) == [1]


def test_what_has_not_said_hello_is_let_go_in_the_end(scene: Scene) -> None:
    silent = scene.arrive()
    with scene.greeter:
        pass
    assert silent.recv(1) == b""
