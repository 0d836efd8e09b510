"""Hosts and ranks that join or have joined: what rank 0 tells them, what it makes of their silence and of their end."""

from __future__ import annotations

import queue
import socket
import struct
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest

from baton.address import HostPort
from baton.errors import TransferError
from deploy.ports import HeldPort
from engine.model.other_ranks import Kind
from kv_transfer.transports.host import address_of
from node.errors import StartupError
from node.limits import Limits
from node.peers.links import PeerLink
from node.peers.rendezvous import join_rendezvous
from node.ranks.forks import BEAT_S, LossReason
from node.ranks.hosts import OtherHosts, _HostRank
from node.ranks.joining import JoiningHosts, rendezvous_of, shared_flags
from node.ranks.stream import RankStream
from node.settings import NodeSettings
from tests.node.rank_stand_ins import LIMITS, hosts_of_two
from tests.node.scenes import PATIENCE_S

pytestmark = pytest.mark.timeout(20)

PATIENT = replace(LIMITS, join=PATIENCE_S, silence=PATIENCE_S, loading_silence=PATIENCE_S)


class Scene:
    """A host with ranks 2 and 3, of which the last one has come first. `ranks`: their ends of the streams."""

    def __init__(self) -> None:
        self.lost = queue.SimpleQueue[str]()
        self.pool = ThreadPoolExecutor(1)
        with HeldPort(HostPort("localhost", 0)) as port:
            where: dict[str, Any] = {"master_addr": "localhost", "master_port": port.address.port}
            settings = NodeSettings(model="none", tensor_parallel_size=4, nnodes=2, **where)
            self.hosts = OtherHosts(settings, PATIENT)
            waiting = self.pool.submit(self.hosts.wait_for_hosts, "weights", self._on_lost)
            hello = {"node_rank": 1, "serves": shared_flags(settings)}
            self.host, _ = join_rendezvous(rendezvous_of(settings), hello, PATIENCE_S, answer_s=PATIENCE_S)
            links = {n: PeerLink(socket.create_connection((port.address.host, port.address.port))) for n in (3, 2)}
            for number, link in links.items():
                link.send(rank=number, serves={"--model": "weights"})
            self.address = waiting.result(PATIENCE_S)
        self.hosts.start_loading(port=7)
        self.told = [link.receive_one(PATIENCE_S) for link in links.values()]
        self.ranks = {number: RankStream(link.release()) for number, link in links.items()}
        for rank in self.ranks.values():
            rank.send_message(ready=True)

    def _on_lost(self, reason: LossReason, ready: bool) -> None:
        self.lost.put(reason.text)

    def close(self) -> None:
        self.host.close()
        for rank in self.ranks.values():
            rank.close()
        self.hosts.stop("the test is over")
        assert self.hosts.end(PATIENCE_S) == []
        assert not any(thread.is_alive() for thread in self.hosts._threads), "it would read a link that is closed"
        self.pool.shutdown()


@pytest.fixture
def scene() -> Iterator[Scene]:
    scene = Scene()
    yield scene
    scene.close()


def test_all_ranks_are_told_where_ranks_meet_and_get_each_step(scene: Scene) -> None:
    assert scene.address == address_of("localhost") != "localhost"
    assert scene.told == [{"port": 7}] * 2
    scene.hosts.pools()
    assert scene.hosts.ready
    scene.hosts.send(Kind.WARM_UP, np.arange(3, dtype=np.int32))
    for rank in scene.ranks.values():
        [step] = rank.receive()
        assert (step.step()[0], step.step()[1].tolist()) == (Kind.WARM_UP, [0, 1, 2])
    scene.hosts.limit_sends(1.5)
    for own in scene.hosts._ranks:
        limit = own.stream._socket.getsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, 16)
        assert struct.unpack("@ll", limit) == (1, 500_000)


def test_each_pool_is_that_of_its_rank_until_the_rank_ends(scene: Scene) -> None:
    for number, pool in zip((2, 3), scene.hosts.pools(), strict=True):
        answer = scene.pool.submit(pool._wire.request, PATIENCE_S, do="count")
        [request] = scene.ranks[number].receive()
        assert request.message() == {"id": 0, "do": "count"}
        scene.ranks[number].close()
        with pytest.raises(TransferError, match=f"rank {number} is lost"):
            answer.result(PATIENCE_S)
        if number == 2:
            assert scene.lost.get(timeout=PATIENCE_S) == "rank 2 has ended"


def test_a_host_that_ends_is_lost(scene: Scene) -> None:
    scene.hosts.pools()
    assert scene.host.receive_one(PATIENCE_S) == {"beat": True}
    scene.host.close()
    assert scene.lost.get(timeout=PATIENCE_S) == "node rank 1 has ended"


def test_a_host_whose_machine_dies_while_others_are_missing_is_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    """Its connections all end at once. It may have said why."""
    is_busy, are_gone = threading.Event(), threading.Event()
    with HeldPort(HostPort("127.0.0.1", 0)) as port, ThreadPoolExecutor(1) as pool:
        address = port.address.host, port.address.port
        settings = NodeSettings(model="none", tensor_parallel_size=4, nnodes=2, master_port=port.address.port)
        joining = JoiningHosts(settings, "weights", PATIENT)

        def refuse_all_else(hello: dict[str, Any]) -> str | None:
            if "serves" not in hello:
                is_busy.set()
                are_gone.wait(PATIENCE_S)
            return JoiningHosts._check_hello(joining, hello)

        joining._check_hello = refuse_all_else
        waiting = pool.submit(joining.wait)
        hello = {"node_rank": 1, "serves": shared_flags(settings)}
        for is_first in (True, False):
            links = [join_rendezvous(rendezvous_of(settings), hello, PATIENCE_S, answer_s=PATIENCE_S)[0]]
            for number in (2, 3)[: 1 if is_first else 2]:
                links.append(PeerLink(socket.create_connection(address)))
                links[-1].send(rank=number, serves={"--model": "weights"})
            if is_first:
                links[0].send(lost="rank 3: no room")  # rank 0 reads it before it reads what the next one says
                with socket.create_connection(address) as other:
                    PeerLink(other).send(what="keeps rank 0 from noticing one end before the other")
                    assert is_busy.wait(PATIENCE_S)
                for link in links:
                    link.close()
                are_gone.set()
        joined = waiting.result(PATIENCE_S)
        assert sorted(joined) == [("host", 1), ("rank", 2), ("rank", 3)]
        for word in (": rank 3: no room", " has ended, and is waited for"):
            assert f"node rank 1 of 2{word}" in caplog.messages
        for link in (*links, *joined.values()):
            link.close()


def test_a_host_that_ends_before_it_is_welcomed_is_no_error() -> None:
    joining = JoiningHosts(NodeSettings(model="none", tensor_parallel_size=4, nnodes=2), "weights", LIMITS)
    hosts, link = hosts_of_two()
    link.close()
    joining._admit({"node_rank": 1}, link)
    assert joining._joined == {("host", 1): link}, "its end is noticed next"
    hosts.stop("")
    hosts.end(0)


def test_those_that_came_are_let_go_if_others_did_not() -> None:
    with HeldPort(HostPort("127.0.0.1", 0)) as port:
        settings = NodeSettings(model="none", tensor_parallel_size=4, nnodes=2, master_port=port.address.port)
        joining = JoiningHosts(settings, "weights", Limits(join=0.0))
        hosts, host = hosts_of_two()
        joining._joined["host", 1] = hosts._links.pop(1)
        with pytest.raises(StartupError, match="--nnodes: rank 2 did not connect"):
            joining.wait()
    with pytest.raises(OSError, match="closed"):
        host.receive_one(PATIENCE_S)
    host.close()


def test_a_name_of_this_host_that_others_can_reach_is_not_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    settings = NodeSettings(model="none", tensor_parallel_size=4, nnodes=2, master_addr="localhost")
    JoiningHosts(settings, "weights", LIMITS)._warn_of_loopback("192.0.2.1")
    assert caplog.messages == []


def test_a_rank_that_ends_before_it_is_told_where_ranks_meet_is_named() -> None:
    hosts, host = hosts_of_two()
    host.close()
    hosts._joined_ranks = {3: host}
    with pytest.raises(RuntimeError, match="rank 3 has ended"):
        hosts.start_loading(port=7)
    hosts.end(0)


@pytest.mark.parametrize("is_ready", [False, True])
def test_a_host_that_hangs_is_lost_when_its_time_is_up(is_ready: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which is longer while ranks load."""
    limits = Limits(silence=5 * BEAT_S, loading_silence=10 * BEAT_S)
    limit_s = limits.silence if is_ready else limits.loading_silence
    hosts, host = hosts_of_two(limits)
    monkeypatch.setattr(OtherHosts, "ready", is_ready)
    lost: list[LossReason] = []
    hosts._on_lost = lambda reason, ready: lost.append(reason)
    for _ in range(round(limit_s / BEAT_S)):
        hosts._beat(1, hosts._links[1])
    assert lost == []
    hosts._beat(1, hosts._links[1])
    assert lost == [LossReason(f"node rank 1 has been silent for {limit_s:g} s")]
    assert host.receive_one(PATIENCE_S) == {"beat": True}
    host.close()
    hosts.end(0)


def test_a_host_that_has_ended_keeps_no_other_from_being_told() -> None:
    """And once the node ends, no loss is reported."""
    hosts, broken = hosts_of_two()
    others, other = hosts_of_two()
    hosts._links[2] = others._links.pop(1)
    hosts._links[1].send(beat=True)  # it reads nothing more, so that its end resets the connection
    broken.close()
    hosts._on_lost = lambda reason, ready: pytest.fail(reason.text)
    hosts.serves(lambda: None)
    hosts.stop("rank 1 has ended")
    assert [other.receive_one(PATIENCE_S) for _ in range(2)] == [{"serves": True}, {"lost": "rank 1 has ended"}]
    hosts._lost(LossReason("node rank 1 has ended"))
    other.close()
    assert hosts.end(PATIENCE_S) == [], "the node has said why it ends"


def test_why_a_rank_has_ended_is_for_its_host_to_say() -> None:
    """And for nobody, once the node ends in order."""
    met = LossReason("node rank 1: rank 3 has ended (a peer left)", is_secondary=True)
    rank = _HostRank(3, cast("Any", None))
    hosts, host = hosts_of_two()
    hosts._lost(met)
    hosts._on_lost = lambda reason, ready: pytest.fail(reason.text)
    hosts._rank_lost(rank, ConnectionResetError())
    assert hosts.loss_reason(0) == met
    others, other = hosts_of_two()
    others.stop("")
    others._rank_lost(rank, ConnectionResetError())
    assert others.loss_reason(0) is None
    for end in (host, other):
        end.close()
    for ended in (hosts, others):
        ended.end(0)
