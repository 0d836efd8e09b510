"""Data parallel nodes: who is let in, how waves of steps begin and end everywhere, how all stop, what a loss ends."""

from __future__ import annotations

import logging
import math
import os
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from baton.address import HostPort
from baton.incarnation import failure_domain
from deploy.ports import HeldPort
from node.errors import StartupError
from node.limits import Limits
from node.peers import nodes as peer_nodes
from node.peers.data_parallel import join_nodes
from node.peers.links import PeerLink
from node.peers.nodes import BEAT_S, PeerNodes
from node.peers.rendezvous import HELLO_TIMEOUT_S
from node.settings import NodeSettings

HOST = "127.0.0.1"
PATIENCE_S = 20.0
LIMITS = Limits(join=PATIENCE_S, silence=PATIENCE_S, loading_silence=PATIENCE_S, report=0.0)
SERVES = {"--model": "m", "--dtype": "auto"}
HUGE = b'{"rank": Infinity, "size": 2, "serves": {}}\n'


class Scene:
    """Nodes as threads of this process; those that are not `meet` are played by the test."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
        self.held = HeldPort(HostPort(HOST, 0))
        self.pool = ThreadPoolExecutor(8)
        self.exits = threading.Semaphore(0)
        self.log = caplog
        self.nodes: list[PeerNodes] = []
        self.links: list[PeerLink] = []
        monkeypatch.setattr(os, "_exit", self._exit)
        monkeypatch.setattr(logging, "shutdown", lambda: None)

    def _exit(self, code: int) -> None:
        assert code == 1
        next(node for node in self.nodes if node._watcher is threading.current_thread())._left.set()
        self.exits.release()

    def settings(self, rank: int, size: int, port: int | None = None) -> NodeSettings:
        return NodeSettings(
            model="none",
            enable_expert_parallel=True,
            data_parallel_size=size,
            data_parallel_rank=rank,
            data_parallel_rpc_port=port or self.held.address.port,
        )

    def meet(
        self,
        rank: int,
        size: int,
        wake: Callable[[], None] = lambda: None,
        limits: Limits = LIMITS,
        serves: dict[str, str] = SERVES,
    ) -> Future[PeerNodes]:
        def run() -> PeerNodes:
            self.nodes.append(join_nodes(self.settings(rank, size), serves, wake, limits))
            return self.nodes[-1]

        return self.pool.submit(run)

    def together(self, size: int, wake: Callable[[], None] = lambda: None) -> list[PeerNodes]:
        return [future.result(PATIENCE_S) for future in [self.meet(rank, size, wake) for rank in range(size)]]

    def connect(self, **hello: Any) -> PeerLink:
        """As a node with this hello; once rank 0 listens."""
        for _ in range(1000):
            try:
                link = PeerLink(socket.create_connection(self.address, timeout=PATIENCE_S))
                break
            except ConnectionRefusedError:
                threading.Event().wait(0.01)
        self.links.append(link)
        if hello:
            link.send(**hello)
        return link

    @property
    def address(self) -> tuple[str, int]:
        return self.held.address.host, self.held.address.port

    def ended(self, why: str, number: int = 1) -> None:
        """So many nodes have ended, all for this reason."""
        for _ in range(number):
            assert self.exits.acquire(timeout=PATIENCE_S)
        said = [record.getMessage() for record in self.log.records if record.levelno == logging.CRITICAL]
        assert said == [f"{why}: the node ends"] * number

    def close(self) -> None:
        for node in self.nodes:
            node._left.set()
        for link in self.links:
            link.close()
        for node in sorted(self.nodes, key=lambda node: -node._rank):
            node.close()
        self.pool.shutdown()
        self.held.close()


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[Scene]:
    scene = Scene(monkeypatch, caplog)
    yield scene
    scene.close()


# ---- rendezvous ----


def test_the_others_may_come_before_rank_0_and_all_know_where_ranks_meet(scene: Scene) -> None:
    others = [scene.meet(rank, 3) for rank in (2, 1)]
    first = scene.meet(0, 3).result(PATIENCE_S)
    found = [first.rendezvous, *(other.result(PATIENCE_S).rendezvous for other in others)]
    assert len({(rendezvous.store, rendezvous.group) for rendezvous in found}) == 1
    assert [rendezvous.server is None for rendezvous in found] == [False, True, True]
    assert failure_domain(first.incarnation) == failure_domain(others[0].result().incarnation) == first.rendezvous.group
    assert first.incarnation != others[0].result().incarnation


@pytest.mark.parametrize(
    ("rank", "size", "serves", "why"),
    [
        (1, 2, {}, "--data-parallel-size: 2, and rank 0 has 3"),
        (1, 3, {"--model": "other"}, "--model: other, and data parallel rank 0 has m"),
        (2, 3, {}, "--data-parallel-rank: 2 is taken"),
    ],
)
def test_a_node_that_does_not_belong_is_refused_and_the_right_one_is_not(
    scene: Scene, rank: int, size: int, serves: dict[str, str], why: str
) -> None:
    first = scene.meet(0, 3)
    taken = scene.connect(rank=2, size=3, serves=SERVES)
    with pytest.raises(StartupError, match=why):
        scene.meet(rank, size, serves={**SERVES, **serves}).result(PATIENCE_S)
    scene.meet(1, 3).result(PATIENCE_S)
    rendezvous = first.result(PATIENCE_S).rendezvous
    assert taken.receive_one(PATIENCE_S) == {"port": rendezvous.store.port, "group": rendezvous.group}


@pytest.mark.parametrize(
    "data", [b"GET / HTTP/1.1\r\n\r\n", b'{"rank": 1}\n', b"[" * 5000 + b"\n", b"[]\n", b'"a"\n', HUGE]
)
def test_what_is_no_node_is_disconnected(scene: Scene, data: bytes) -> None:
    first = scene.meet(0, 2)
    link = scene.connect()
    link._socket.sendall(data)
    with pytest.raises(OSError, match=r"closed|reset"):
        link.receive_one(PATIENCE_S)
    scene.meet(1, 2).result(PATIENCE_S)
    first.result(PATIENCE_S)
    assert "was no data parallel node" in scene.log.text


def test_a_silent_connection_holds_up_no_node(scene: Scene) -> None:
    first = scene.meet(0, 2)
    for _ in range(3):
        scene.connect()
    scene.meet(1, 2).result(HELLO_TIMEOUT_S)
    first.result(HELLO_TIMEOUT_S)


def test_a_node_that_ended_while_others_were_missing_may_join_again(scene: Scene) -> None:
    first = scene.meet(0, 3)
    scene.connect(rank=1, size=3, serves=SERVES).close()
    others = [scene.meet(rank, 3) for rank in (1, 2)]
    for future in (first, *others):
        future.result(PATIENCE_S)


def test_who_is_missing_is_named(scene: Scene) -> None:
    first = scene.meet(0, 3, limits=Limits(join=0.5))
    scene.connect(rank=1, size=3, serves=SERVES)
    with pytest.raises(StartupError, match=r"^--data-parallel-size: rank (1, )?2 of 3 did not connect within 0.5 s"):
        first.result(PATIENCE_S)
    with pytest.raises(StartupError, match=f"--data-parallel-address: could not reach {HOST}:"):
        scene.meet(1, 3, limits=Limits(join=0.3)).result(PATIENCE_S)


def test_nodes_wait_for_each_other_as_long_as_the_flag_says(scene: Scene) -> None:
    settings = scene.settings(0, 2).model_copy(update={"distributed_timeout_seconds": 0.2})
    with pytest.raises(StartupError, match=r"^--data-parallel-size: rank 1 of 2 did not connect within 0.2 s"):
        join_nodes(settings, SERVES, lambda: None)


def test_a_port_that_is_taken_is_named(scene: Scene) -> None:
    with (
        socket.create_server((HOST, 0)) as taken,
        pytest.raises(StartupError, match="--data-parallel-rpc-port: cannot"),
    ):
        join_nodes(scene.settings(0, 2, taken.getsockname()[1]), SERVES, lambda: None, LIMITS)


# ---- waves ----


@pytest.mark.parametrize("starter", [0, 1])
def test_a_wave_begins_on_all_nodes_and_each_ends_it(scene: Scene, starter: int) -> None:
    woken = threading.Semaphore(0)
    nodes = scene.together(3, woken.release)
    for _ in range(3):
        assert not any(node.running for node in nodes)
        nodes[starter].start()
        for _ in range(2):
            assert woken.acquire(timeout=PATIENCE_S)
        assert all(node.running for node in nodes)
        nodes[starter].start()  # says nothing more
        for node in nodes:
            node.end()
    assert not woken.acquire(blocking=False)


def test_a_wave_that_began_before_the_last_one_ended_here_is_not_lost(scene: Scene) -> None:
    """The other node has ended wave 0, and has work again."""
    woken = threading.Semaphore(0)
    one, other = scene.together(2, woken.release)
    one.start()
    assert woken.acquire(timeout=PATIENCE_S)
    one.end()
    one.start()
    assert woken.acquire(timeout=PATIENCE_S)
    assert other.running
    other.end()
    assert other.running
    other._handle(0, {"rank": 0, "wave": 0})
    assert other.running, "one that began at the same time as its own"
    other.end()
    assert not other.running


# ---- the end ----


def test_all_stop_together_and_leave_when_all_have_drained(scene: Scene) -> None:
    woken, told = threading.Semaphore(0), threading.Semaphore(0)
    nodes = scene.together(3, woken.release)
    for node in nodes[:2]:
        node.ready(told.release)
    assert not told.acquire(blocking=False)
    nodes[0].start()
    for _ in nodes[1:]:
        assert woken.acquire(timeout=PATIENCE_S)
    nodes[1].stop_others()
    assert told.acquire(timeout=PATIENCE_S)
    heard_late = threading.Semaphore(0)
    with nodes[2]._state:
        assert nodes[2]._state.wait_for(lambda: nodes[2]._stop_requested, PATIENCE_S)
    nodes[2].ready(heard_late.release)
    assert heard_late.acquire(blocking=False), "it was told before it was ready"
    leaving = [scene.pool.submit(node.leave, PATIENCE_S) for node in nodes]
    for node in nodes[:2]:
        node.stop_others()  # comes after all that they have said
        for heard in (told, heard_late):
            assert heard.acquire(timeout=PATIENCE_S)
    assert not any(node._drained for node in nodes), "a wave runs"
    for node in nodes:
        node.end()
    assert all(future.result(PATIENCE_S) for future in leaving)
    for node in reversed(nodes):
        node.close()
    assert not scene.exits.acquire(blocking=False)


def test_a_node_that_has_drained_says_so_when_the_step_of_the_others_ends(scene: Scene) -> None:
    started = scene.meet(0, 2)
    other = scene.connect(rank=1, size=2, serves=SERVES)
    node = started.result(PATIENCE_S)
    node.start()
    leaving = scene.pool.submit(node.leave, PATIENCE_S)
    while not node._state._waiters:  # type: ignore[attr-defined]
        threading.Event().wait(0.001)
    node.end()
    heard = [other.receive_one(PATIENCE_S) for _ in range(3)]  # where ranks meet, and that a wave began
    while heard[-1] != {"rank": 0, "drained": True}:
        assert len(heard) < 20, "it says no more than that it lives"
        heard.append(other.receive_one(PATIENCE_S))
    other.send(rank=1, drained=True)
    assert leaving.result(PATIENCE_S)


def test_a_node_that_ends_at_once_when_all_have_drained_is_not_lost(scene: Scene) -> None:
    """Though nobody here has seen yet that all have: its last word and the end of its connection come together."""
    started = scene.meet(0, 2)
    other = scene.connect(rank=1, size=2, serves=SERVES)
    node = started.result(PATIENCE_S)
    node.ready(lambda: None)
    with node._state:
        leaving = scene.pool.submit(node.leave, PATIENCE_S)
        node._has_drained(0)
    other.send(rank=1, drained=True)
    other._socket.shutdown(socket.SHUT_RDWR)
    assert leaving.result(PATIENCE_S)
    node._watcher.join(PATIENCE_S)
    assert not scene.exits.acquire(blocking=False)


def test_one_that_gives_up_says_so_at_once_and_can_be_ended(scene: Scene) -> None:
    """While its own requests still run, or it waits for them."""
    woken = threading.Semaphore(0)
    nodes = scene.together(2, woken.release)
    nodes[0].start()
    assert woken.acquire(timeout=PATIENCE_S)
    other = scene.pool.submit(nodes[1].leave, 2 * PATIENCE_S, False)
    with nodes[0]._state:
        assert nodes[0]._state.wait_for(lambda: 1 in nodes[0]._drained, PATIENCE_S)
    first = scene.pool.submit(nodes[0].leave, 2 * PATIENCE_S)
    nodes[1].give_up()
    assert not other.result(PATIENCE_S)
    nodes[0].give_up()
    first.result(PATIENCE_S)


def test_one_that_fails_does_not_wait_for_the_others(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """They go on, and hear of its end by that of its connection."""
    monkeypatch.setattr(peer_nodes, "_LEFT_S", 2 * PATIENCE_S)
    nodes = scene.together(2)
    closing = scene.pool.submit(nodes[0].close)
    closing.result(PATIENCE_S)
    scene.ended("data parallel rank 0 has ended")


def test_rank_0_leaves_last(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it has of the store and of connections is there until the others have ended."""
    monkeypatch.setattr(peer_nodes, "_LEFT_S", 2 * PATIENCE_S)
    nodes = scene.together(2)
    leaving = [scene.pool.submit(node.leave, PATIENCE_S) for node in nodes]
    assert all(future.result(PATIENCE_S) for future in leaving)
    first = scene.pool.submit(nodes[0].close)
    nodes[0]._watcher.join(PATIENCE_S)
    nodes[1]._broadcast(beat=True)
    with pytest.raises(TimeoutError):
        first.result(0.1)
    nodes[1].close()
    first.result(PATIENCE_S)


def test_one_that_does_not_drain_is_not_waited_for_without_end(scene: Scene) -> None:
    nodes = scene.together(2)
    assert not nodes[0].leave(0.1)
    nodes[0]._watcher.join(PATIENCE_S)
    assert not nodes[0]._watcher.is_alive(), "whatever becomes of the others"
    nodes[0]._lost("data parallel rank 1 has ended")
    assert "the node ends" not in scene.log.text


@pytest.mark.parametrize("lost", [0, 2])
def test_a_node_that_dies_ends_all_others_by_name(scene: Scene, lost: int) -> None:
    limits = replace(LIMITS, report=2 * PATIENCE_S)  # for a node that starts
    nodes = [future.result(PATIENCE_S) for future in [scene.meet(rank, 3, limits=limits) for rank in range(3)]]
    for node in nodes:
        node.ready(lambda: None)
    nodes[lost]._left.set()
    for link in nodes[lost]._links.values():
        link._socket.shutdown(socket.SHUT_RDWR)
    scene.ended(f"data parallel rank {lost} has ended", number=2)


def test_whatever_comes_of_what_was_heard_is_a_loss(scene: Scene) -> None:
    """What watches the others says so before it ends."""
    started = scene.meet(0, 2)
    other = scene.connect(rank=1, size=2, serves=SERVES)
    started.result(PATIENCE_S)
    other.send(rank=1, wave=math.inf)
    scene.ended("data parallel rank 1 has ended")


def test_a_node_that_says_nothing_ends_all_others_by_name(scene: Scene) -> None:
    """Once all are ready: while they load it may be silent for longer. The last one beats no more."""
    limits = Limits(PATIENCE_S, silence=3 * BEAT_S, loading_silence=PATIENCE_S, report=0.0)
    started = [scene.meet(rank, 3, limits=limits) for rank in (0, 1)]
    silent = scene.connect(rank=2, size=3, serves=SERVES)
    for future in started:
        future.result(PATIENCE_S).ready(lambda: None)
    silent.send(rank=2, ready=True)
    scene.ended(f"data parallel rank 2 has been silent for {limits.silence:g} s", number=2)


def test_a_node_that_loads_may_be_silent_for_longer(scene: Scene) -> None:
    """As while it imports torch. It may be told to stop meanwhile."""
    limits = Limits(PATIENCE_S, silence=3 * BEAT_S, loading_silence=PATIENCE_S, report=0.0)
    started = scene.meet(0, 2, limits=limits)
    scene.connect(rank=1, size=2, serves=SERVES)
    node = started.result(PATIENCE_S)
    node.ready(lambda: None)
    node._handle(1, {"rank": 1, "stopping": True})
    for _ in range(5):
        node._beat()
    assert node.why_lost(0) is None
    assert not scene.exits.acquire(blocking=False)


@pytest.mark.parametrize("stops", [False, True])
def test_a_node_that_has_loaded_last_stops_only_if_another_one_was_told_to(scene: Scene, stops: bool) -> None:
    started = scene.meet(0, 2)
    scene.connect(rank=1, size=2, serves=SERVES)
    node, told = started.result(PATIENCE_S), list[bool]()
    said: list[dict[str, Any]] = [{"ready": True}, *[{"stopping": True}] * stops, {"wave": 0}]
    for message in said:
        node._handle(1, {"rank": 1, **message})
    node.ready(lambda: told.append(True))
    node._handle(1, {"rank": 1, "wave": 1})
    assert told == [True] * stops


def test_a_node_whose_start_another_one_has_broken_can_say_which(scene: Scene) -> None:
    """It has a moment for it before it is ended."""
    limits = Limits(PATIENCE_S, PATIENCE_S, PATIENCE_S, report=PATIENCE_S)
    started = scene.meet(0, 2, limits=limits)
    other = scene.connect(rank=1, size=2, serves=SERVES)
    node = started.result(PATIENCE_S)
    assert node.why_lost(0) is None
    other.close()
    assert node.why_lost(PATIENCE_S) == "data parallel rank 1 has ended"
    assert node._watcher.is_alive()
    node.give_up()
    node._watcher.join(PATIENCE_S)
    assert not scene.exits.acquire(blocking=False)
    assert "the node ends" not in scene.log.text
