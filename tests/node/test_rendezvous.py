"""A node takes the hellos of its peers side by side: a silent connection holds up no other."""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from typing import Any

import pytest

from baton.address import HostPort
from deploy.ports import HeldPort
from node.errors import StartupError
from node.peers.links import PeerLink
from node.peers.rendezvous import RendezvousEndpoint, RendezvousServer, join_rendezvous, mismatch

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


def test_an_address_that_is_not_this_machines_is_named() -> None:
    """By its own flag: the port may be free."""
    endpoint = RendezvousEndpoint(HostPort("192.0.2.1", 1), "--address", "--port", "node")
    with pytest.raises(StartupError, match=r"^--address: cannot listen on 192.0.2.1:1: "):
        endpoint.listen()


def test_it_listens_at_an_address_of_either_family() -> None:
    with HeldPort(HostPort("::1", 0)) as port:
        endpoint = RendezvousEndpoint(port.address, "--address", "--port", "node")
        with endpoint.listen() as listener:
            assert listener.family is socket.AF_INET6


def test_an_answer_that_does_not_come_is_asked_for_again_until_the_time_is_over() -> None:
    """As of a host that has vanished, and comes back at its address."""
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
        listener.settimeout(PATIENCE_S / 2)
        endpoint = RendezvousEndpoint(HostPort(*listener.getsockname()), "--address", "--port", "node")
        with pytest.raises(StartupError, match=r"--address: could not reach .* within 0.1 s: nothing has come"):
            join_rendezvous(endpoint, {"number": 1}, 0.1)
        joined = pool.submit(join_rendezvous, endpoint, {"number": 2}, PATIENCE_S, answer_s=0.1)
        with ExitStack() as stack:
            numbers: list[int] = []
            while not joined.done():  # the answer may come too late again
                if not select.select([listener], [], [], 0.05)[0]:
                    continue
                link = stack.enter_context(closing(PeerLink(listener.accept()[0])))
                numbers.append(link.receive_one(PATIENCE_S)["number"])
                if len(numbers) > 2:
                    link.send(welcome=True)
            assert numbers[:3] == [1, 2, 2]
            link, answer = joined.result()
            assert answer == {"welcome": True}
            link.close()


def test_a_flag_that_a_peer_does_not_know_is_named() -> None:
    """It may be of another version."""
    assert mismatch({"--a": "1"}, {"--a": "1", "--b": "2"}, "rank 0") == "--b: None, and rank 0 has 2"


def pair() -> tuple[PeerLink, PeerLink]:
    """Both ends of a connection, which was made with a timeout."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = PeerLink(socket.create_connection(listener.getsockname(), timeout=PATIENCE_S))
        return one, PeerLink(listener.accept()[0])


def test_a_message_is_read_alone_whatever_its_length_and_not_waited_for_without_end() -> None:
    one, other = pair()
    for _ in range(2):
        other.send(text="x" * 5000)
    assert [one.receive_one(PATIENCE_S) for _ in range(2)] == [{"text": "x" * 5000}] * 2
    with pytest.raises(TimeoutError, match="nothing has come for 0 s"):
        one.receive_one(0.0)
    one.close()
    other.close()


def test_a_link_sends_at_once_and_waits_as_long_as_it_must() -> None:
    one, other = pair()
    assert one._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    assert one._socket.gettimeout() is None
    one.close()
    other.close()
