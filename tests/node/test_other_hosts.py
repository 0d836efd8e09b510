"""What rank 0 and another host make of the messages of each other and of anybody else: who belongs to the node, who is
lost, and which of several losses is to blame."""

from __future__ import annotations

import contextlib
import logging
import math
import mmap
import os
import select
import socket
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn, cast

import pytest

from baton.address import HostPort
from deploy.ports import HeldPort
from node.errors import StartupError
from node.limits import Limits
from node.peers.links import PeerLink
from node.peers.rendezvous import join_rendezvous
from node.ranks.forks import BEAT_S, LossReason, RankFork, RankForks, fork
from node.ranks.headless import _Host
from node.ranks.hosts import _HostRank
from node.ranks.joining import JoiningHosts, rendezvous_of, shared_flags
from node.ranks.stream import RankStream
from node.settings import NodeSettings
from tests.node.host_scene import LIMITS
from tests.node.rank_stand_ins import hosts_of_two
from tests.node.scenes import PATIENCE_S


def test_hosts_and_ranks_join_once() -> None:
    """And only those that belong to other hosts."""
    settings = NodeSettings(model="none", tensor_parallel_size=4, nnodes=2)
    second = shared_flags(settings.model_copy(update={"node_rank": 1}))
    hosts = JoiningHosts(settings, "weights", LIMITS)

    def refusal_of_host(number: int) -> str | None:
        return hosts._check_hello({"node_rank": number, "serves": second})

    def refusal_of_rank(number: int) -> str | None:
        return hosts._check_hello({"rank": number, "serves": {"--model": "weights"}})

    assert refusal_of_host(1) is None
    assert [refusal_of_host(number) for number in (0, 2)] == ["--node-rank: 0 is taken", "--node-rank: 2 is taken"]
    assert [number for number in range(5) if refusal_of_rank(number) is None] == [2, 3]
    why = hosts._check_hello({"rank": 2, "serves": {"--model": "other"}})
    assert why == "--model: other, and --node-rank 0 has weights"
    hosts._joined |= dict.fromkeys([("host", 1), ("rank", 2)], cast("PeerLink", None))
    assert refusal_of_host(1) == "--node-rank: 1 is taken"
    assert refusal_of_rank(2) == "--node-rank: rank 2 is there, or belongs to no other host"
    assert refusal_of_rank(3) is None


def is_dropped(link: PeerLink) -> None:
    with pytest.raises(OSError, match=r"closed|reset"):
        link.receive_one(PATIENCE_S)


def test_a_host_that_ends_before_all_have_joined_may_join_again() -> None:
    """So may its ranks. What is no host is disconnected."""
    with HeldPort(HostPort("127.0.0.1", 0)) as port, ThreadPoolExecutor(1) as pool:
        settings = NodeSettings(model="none", tensor_parallel_size=4, nnodes=2, master_port=port.address.port)
        waiting = pool.submit(JoiningHosts(settings, "weights", replace(LIMITS, join=PATIENCE_S)).wait)
        flags = shared_flags(settings)

        def join(**hello: Any) -> PeerLink:
            return join_rendezvous(rendezvous_of(settings), hello, PATIENCE_S, answer_s=PATIENCE_S)[0]

        for _ in range(2):
            join(node_rank=1, serves=flags).close()
        host = join(node_rank=1, serves=flags)
        with pytest.raises(StartupError, match="--node-rank: 1 is taken"):
            join(node_rank=1, serves=flags)
        with pytest.raises(StartupError, match="--model: other, and --node-rank 0 has weights"):
            join(rank=2, serves={"--model": "other"})
        for nonsense in (
            *({}, {"rank": "x", "serves": {}}, {"node_rank": 1}, {"node_rank": 1, "serves": []}),
            *({"rank": math.inf, "serves": {}}, {"node_rank": math.inf, "serves": flags}, {"rank": math.nan}),
            *({"node_rank": True, "serves": flags}, {"node_rank": 1, "serves": flags | {"--dtype": [3]}}),
        ):
            with socket.create_connection((port.address.host, port.address.port)) as other:
                PeerLink(other).send(**nonsense)
                is_dropped(PeerLink(other))
        host.send(beat=True)
        for more in (b"{", b"{}\n"):
            with socket.create_connection((port.address.host, port.address.port)) as chatty:
                PeerLink(chatty).send(rank=2, serves={"--model": "weights"})
                chatty.sendall(more)  # a rank has nothing to say yet
                is_dropped(PeerLink(chatty))
        ranks = [PeerLink(socket.create_connection((port.address.host, port.address.port))) for _ in range(2)]
        for number, rank in enumerate(ranks, 2):
            rank.send(rank=number, serves={"--model": "weights"})
        joined = waiting.result(PATIENCE_S)
        assert sorted(joined) == [("host", 1), ("rank", 2), ("rank", 3)]
        for link in (host, *ranks, *joined.values()):
            link.close()


def test_a_host_that_says_nothing_is_given_up_with_its_ranks_while_others_are_missing() -> None:
    """It has vanished with its machine, and nobody closes its connections; another one takes its place."""
    limits = Limits(loading_silence=0.5, join=PATIENCE_S)
    with HeldPort(HostPort("127.0.0.1", 0)) as port, ThreadPoolExecutor(1) as pool:
        settings = NodeSettings(model="none", tensor_parallel_size=4, nnodes=2, master_port=port.address.port)
        waiting = pool.submit(JoiningHosts(settings, "weights", limits).wait)
        hello = {"node_rank": 1, "serves": shared_flags(settings)}
        vanished, _ = join_rendezvous(rendezvous_of(settings), hello, PATIENCE_S, answer_s=PATIENCE_S)
        gone = PeerLink(socket.create_connection((port.address.host, port.address.port)))
        gone.send(rank=3, serves={"--model": "weights"})
        for link in (vanished, gone):
            is_dropped(link)
        links = [vanished, gone, join_rendezvous(rendezvous_of(settings), hello, PATIENCE_S, answer_s=PATIENCE_S)[0]]
        for number in (2, 3):
            links.append(PeerLink(socket.create_connection((port.address.host, port.address.port))))
            links[-1].send(rank=number, serves={"--model": "weights"})
        joined = waiting.result(PATIENCE_S)
        assert sorted(joined) == [("host", 1), ("rank", 2), ("rank", 3)]
        for link in (*links, *joined.values()):
            link.close()


def test_a_host_takes_its_own_ranks_with_it_once_it_was_silent_for_too_long() -> None:
    settings = NodeSettings(model="none", tensor_parallel_size=6, nnodes=3)
    hosts = JoiningHosts(settings, "weights", Limits(loading_silence=5 * BEAT_S))
    with contextlib.ExitStack() as stack:
        members = [("host", 1), ("host", 2), *(("rank", number) for number in range(2, 6))]
        hosts._joined = {member: PeerLink(stack.enter_context(socket.socket())) for member in members}
        for _ in range(5):
            hosts._joined["host", 1].num_silent = 0
            hosts._count_silence()
        assert len(hosts._joined) == 6
        hosts._lost(("rank", 2), "has ended")
        assert list(hosts._joined) == [member for member in members if member != ("rank", 2)]
        hosts._joined["host", 1].num_silent = 0
        hosts._count_silence()
        assert list(hosts._joined) == [("host", 1), ("rank", 3)]


def test_a_host_without_the_cluster_secret_of_the_first_is_refused(tmp_path: Path) -> None:
    """Where its file is may differ."""
    without = NodeSettings(model="none", tensor_parallel_size=4, nnodes=2)
    first, other = (without.model_copy(update={"cluster_secret_file": tmp_path / name}) for name in "ab")

    def refusal(own: NodeSettings, other: NodeSettings) -> str | None:
        return JoiningHosts(own, "weights", LIMITS)._check_hello({"node_rank": 1, "serves": shared_flags(other)})

    assert refusal(first, other) is None
    assert refusal(first, without) == "--cluster-secret-file: none, and --node-rank 0 has one"
    assert refusal(without, first) == "--cluster-secret-file: one, and --node-rank 0 has none"


@pytest.mark.parametrize(("master_addr", "is_warned_of"), [("localhost", True), ("127.0.0.1", False)])
def test_a_name_that_only_this_host_can_connect_to_is_warned_of(
    master_addr: str, is_warned_of: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with HeldPort(HostPort(master_addr, 0)) as port:
        settings = NodeSettings(
            model="none",
            tensor_parallel_size=4,
            nnodes=2,
            master_addr=master_addr,
            master_port=port.address.port,
        )
        with pytest.raises(StartupError, match="--nnodes: node rank 1 of 2 did not connect"):
            JoiningHosts(settings, "weights", Limits(join=0.0)).wait()
    assert (f"--master-addr: on this host {master_addr} is " in caplog.text) == is_warned_of


def test_a_rank_that_breaks_off_before_it_is_told_where_ranks_meet_is_lost() -> None:
    """In the middle of a line: nothing that follows would be what it seems."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        rank = PeerLink(socket.create_connection(listener.getsockname()))
        link = PeerLink(listener.accept()[0])
    rank._socket.sendall(b"{")
    assert link.receive() == []
    with pytest.raises(OSError, match="in the middle of a line"):
        link.release()
    rank.close()
    link.close()


@pytest.mark.parametrize(
    ("command", "is_secondary", "node_ends", "is_lost"),
    [
        ("true", False, True, False),
        ("true", False, False, True),
        ("false", False, True, True),
        ("false", True, True, False),
        ("false", True, False, True),
    ],
)
def test_a_rank_that_has_ended_with_its_node_is_not_lost(
    command: str, is_secondary: bool, node_ends: bool, is_lost: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In order, or since it has met the loss of another: its host may hear a moment later that the node ends."""

    def end(code: int) -> NoReturn:
        raise SystemExit(code)

    monkeypatch.setattr(os, "_exit", end)
    monkeypatch.setattr(logging, "shutdown", lambda: None)
    limits = replace(LIMITS, report=0.0)
    settings = NodeSettings(model="none", tensor_parallel_size=4, nnodes=2, node_rank=1)
    host = _Host(settings, fork([], lambda *_: None, limits), limits)
    if node_ends:
        host.end(0)
    first, host._link = hosts_of_two()
    with subprocess.Popen([command]) as process, socket.socket() as link:
        pidfd = os.pidfd_open(process.pid)
        select.select([pidfd], [], [])
        rank = RankFork(3, process.pid, pidfd, link, link, ready=True)
        with pytest.raises(SystemExit) if is_lost else contextlib.nullcontext():
            host._rank_lost(rank, LossReason("rank 3 has ended", is_secondary))
        os.close(pidfd)
    host._link.close()
    lost = [{"lost": "rank 3 has ended", "met": is_secondary}] * is_lost
    for message in lost:
        assert first._links[1].receive_one(PATIENCE_S) == message
    first.end(0)


@pytest.mark.parametrize(("command", "code"), [("true", 0), ("false", 1)])
def test_a_rank_lost_before_the_node_ends_in_order_is_reported(command: str, code: int) -> None:
    """Rank 0 met that loss by itself, and ends in order before its host has noticed."""
    settings = NodeSettings(model="none", tensor_parallel_size=4, nnodes=2, node_rank=1)
    first, second = hosts_of_two()
    link, of_rank = socket.socketpair()
    of_rank.close()
    with subprocess.Popen([command]) as process:
        rank = RankFork(3, process.pid, os.pidfd_open(process.pid), link, link, ready=True)
        host = _Host(settings, RankForks([rank], mmap.mmap(-1, 8), LIMITS), LIMITS)
        host._link = second
        first.stop("")
        assert host._handle(second.receive_one(PATIENCE_S)) == 0
        assert host.end(0) == code
    lost = [f"node rank 1: rank 3 (process {process.pid}) has ended"]
    assert [reason.text for reason in first.end(PATIENCE_S)] == lost * code


@pytest.mark.parametrize(
    ("message", "lost"),
    [
        ({"beat": True}, ["node rank 1 has ended"]),
        ({"lost": "rank 3 has ended", "met": False}, ["node rank 1: rank 3 has ended"]),
        ({"ended": True}, []),
    ],
)
def test_a_node_that_has_met_a_loss_by_itself_names_the_host(message: dict[str, Any], lost: list[str]) -> None:
    """It ends in order, before it has heard of the host."""
    hosts, host = hosts_of_two()
    hosts.stop("")
    host.send(**message)
    host.close()
    assert [reason.text for reason in hosts.end(PATIENCE_S)] == lost


def test_why_a_host_ends_is_heard_though_a_heartbeat_meets_its_end() -> None:
    hosts, host = hosts_of_two()
    [link] = hosts._links.values()
    link.send(beat=True)  # it reads nothing more, so that its end resets the connection
    host.send(lost="rank 3 has ended", met=False)
    host.close()
    hosts._beat(1, link)
    hosts._watch(1, link)
    assert hosts.loss_reason(0) == LossReason("node rank 1: rank 3 has ended")
    hosts.end(0)


def test_a_host_that_is_told_to_stop_as_the_node_ends_has_nothing_to_add() -> None:
    """All hosts are told at once, and what serves is gone."""
    hosts, host = hosts_of_two()
    asked: list[bool] = []
    hosts.serves(lambda: asked.append(True))
    hosts.stop("")
    host.send(stopping=True)
    host.send(ended=True)
    host.close()
    hosts.end(PATIENCE_S)
    assert asked == []


def test_a_host_that_is_told_to_stop_before_the_node_serves_stops_it_then() -> None:
    hosts, host = hosts_of_two()
    asked: list[bool] = []
    hosts._handle(1, {"stopping": True})
    hosts.serves(lambda: asked.append(True))
    assert host.receive_one(PATIENCE_S) == {"serves": True}
    assert asked == [True]
    hosts._handle(1, {"beat": True})
    assert asked == [True]
    host.close()
    hosts.end(0)


def test_hosts_are_ready_when_all_of_their_ranks_are() -> None:
    hosts, host = hosts_of_two()
    unused: Any = None
    ranks = [_HostRank(number, unused) for number in (2, 3)]
    assert not hosts.ready, "there are none yet"
    hosts._ranks = ranks
    for rank in ranks:
        assert not hosts.ready
        rank._handle({"ready": True})
    assert hosts.ready
    ranks[1].lost()
    hosts._ranks.append(_HostRank(4, unused))
    hosts._ranks[-1].lost()
    assert not hosts.ready
    with pytest.raises(RuntimeError, match="rank 4 has ended"):
        hosts.pools()
    hosts._ranks.clear()
    host.close()
    hosts.end(0)


@pytest.mark.parametrize("of", ["host", "rank"])
def test_whatever_comes_of_what_was_heard_is_a_loss(of: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What reads on a thread says so before it ends."""
    hosts, host = hosts_of_two()
    lost: list[str] = []
    hosts._on_lost = lambda word, ready: lost.append(word.text)
    hosts._limits = replace(LIMITS, report=0.0)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        rank = RankStream(socket.create_connection(listener.getsockname()))
        hosts._ranks = [_HostRank(2, RankStream(listener.accept()[0]))]
    if of == "host":

        def fail() -> None:
            raise ArithmeticError

        hosts._stop = fail
        hosts._start("host-1", hosts._watch, 1, hosts._links[1])
        host.send(stopping=True)
    else:
        monkeypatch.setattr(hosts._ranks[0].pool, "handle", lambda message: int(message["link"]))
        hosts._start("rank-streams", hosts._read)
        rank.send_message(link=math.inf)
    hosts._threads[0].join(PATIENCE_S)
    assert lost == ["node rank 1 has ended" if of == "host" else "rank 2 has ended"]
    host.close()
    rank.close()
    hosts.end(0)


def test_a_thread_that_does_not_end_is_not_waited_for_without_end() -> None:
    hosts, host = hosts_of_two()
    host.send(ended=True)
    over = threading.Event()
    hosts._start("stuck", lambda: over.wait(PATIENCE_S))
    hosts.end(-1.9)
    assert hosts._threads[0].is_alive()
    over.set()
    hosts._threads[0].join(PATIENCE_S)
    host.close()


def test_a_rank_that_has_met_the_end_of_another_is_to_blame_only_if_no_other_is() -> None:
    hosts, host = hosts_of_two()
    met, other = (LossReason(f"rank {number} met it", is_secondary=True) for number in (2, 1))
    first = LossReason("rank 3 has ended")
    hosts._lost(met)
    assert hosts.loss_reason(0) == met
    hosts._lost(other)
    assert hosts.loss_reason(0) == met
    with ThreadPoolExecutor(1) as pool:
        reason = pool.submit(hosts.loss_reason, PATIENCE_S)
        hosts._lost(first)
        assert reason.result(PATIENCE_S) == first
    hosts._lost(LossReason("rank 2 has ended"))
    assert hosts.loss_reason(0) == first
    hosts.end(-1.9)
    host.close()
