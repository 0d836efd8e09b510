"""Which connections wake a transport's thread."""

from __future__ import annotations

import os
import select
import socket
from collections.abc import Iterator

import pytest

from kv_transfer.transports.pair.channel import Channel, Kind
from kv_transfer.transports.pair.poller import ChannelPoller

READ, WRITE = select.EPOLLIN, select.EPOLLOUT


class End:
    def __init__(self, channel: Channel) -> None:
        self.channel = channel


class OpenedEnd(End):
    """What becomes of an end, with the same channel."""


class Scene:
    """A poller that also waits for `other`."""

    def __init__(self) -> None:
        self.other, self._peer = socket.socketpair()
        self.poller = ChannelPoller[End](self.other)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._sockets = [self.other, self._peer, self._listener]

    def connect(self) -> tuple[socket.socket, socket.socket]:
        ends = socket.create_connection(self._listener.getsockname()), self._listener.accept()[0]
        self._sockets += ends
        return ends

    def end(self) -> tuple[End, socket.socket]:
        """One that is polled, and the socket of its peer."""
        ours, theirs = self.connect()
        end = End(Channel(ours))
        self.poller.put(end)
        return end, theirs

    def ready(self) -> dict[int, int]:
        return dict(self.poller.wait(0.0))

    def close(self) -> None:
        self.poller.close_all()
        for one in self._sockets:
            one.close()


@pytest.fixture
def scene() -> Iterator[Scene]:
    scene = Scene()
    yield scene
    scene.close()


def test_what_has_arrived_wakes_it(scene: Scene) -> None:
    (one, its_peer), (two, other_peer) = scene.end(), scene.end()
    assert scene.ready() == {}
    other_peer.sendall(b"x")
    assert scene.ready() == {two.channel.fileno(): READ}
    its_peer.sendall(b"x")
    scene._peer.sendall(b"x")
    expected = {one.channel.fileno(): READ, two.channel.fileno(): READ, scene.other.fileno(): READ}
    assert scene.ready() == expected


def test_room_to_write_wakes_it_only_while_something_is_left_to_send(scene: Scene) -> None:
    end, _ = scene.end()
    assert scene.ready() == {}
    end.channel.send(Kind.NOTE, more_follows=True)
    assert scene.ready() == {end.channel.fileno(): WRITE}
    end.channel.flush()
    assert scene.ready() == {}


def test_a_lost_connection_that_is_kept_wakes_it_only_to_write(scene: Scene) -> None:
    """Else the thread would spin until the end is closed."""
    end, peer = scene.end()
    peer.shutdown(socket.SHUT_WR)
    descriptor = end.channel.fileno()
    assert scene.ready()[descriptor] & READ
    end.channel.lost = True
    for _ in range(2):
        assert scene.ready() == {}
    end.channel.send(Kind.BYE, more_follows=True)
    assert scene.ready()[descriptor] & WRITE
    end.channel.hang_up()
    assert scene.ready() == {}
    scene.poller.close(end)


def test_a_closed_connection_wakes_it_no_more(scene: Scene) -> None:
    """Though a fork of this process has it, too."""
    end, peer = scene.end()
    assert scene.ready() == {}
    of_fork = os.dup(end.channel.fileno())
    scene.poller.close(end)
    peer.sendall(b"x")
    assert scene.ready() == {}
    os.close(of_fork)


def test_a_connection_with_the_number_of_a_closed_one_wakes_it(scene: Scene) -> None:
    """Though both wait for the same."""
    first, _ = scene.end()
    spare, peer = scene.connect()
    descriptor = first.channel.fileno()
    assert scene.ready() == {}
    scene.poller.close(first)
    assert (scene.poller.at(descriptor), first.channel.fileno()) == (None, -1)
    assert os.dup2(spare.fileno(), descriptor) == descriptor
    scene.poller.put(End(Channel(socket.socket(fileno=descriptor))))
    peer.sendall(b"x")
    assert scene.ready() == {descriptor: READ}


def test_an_end_takes_the_place_of_another_one_with_its_channel(scene: Scene) -> None:
    end, peer = scene.end()
    scene.end()
    assert scene.ready() == {}
    opened, descriptor = OpenedEnd(end.channel), end.channel.fileno()
    scene.poller.put(opened)
    assert scene.poller.at(descriptor) is opened
    assert (scene.poller.of(OpenedEnd), len(scene.poller.of(End))) == ([opened], 2)
    peer.sendall(b"x")
    assert scene.ready() == {descriptor: READ}


def test_all_connections_are_closed_polled_or_not(scene: Scene) -> None:
    (polled, its_peer), *_ = scene.end(), scene.ready()
    _, other_peer = scene.end()
    scene.poller.close_all()
    for peer in (its_peer, other_peer):
        assert peer.recv(1) == b""
    assert polled.channel.fileno() == -1
    with pytest.raises(ValueError, match="closed epoll"):
        scene.ready()
