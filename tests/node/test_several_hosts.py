"""Nodes whose ranks are on several hosts: whichever part dies, fails or hangs, all hosts end in time and say why, and
no process is left; who does not belong to the node is refused by name."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import select
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn, cast

import pytest

from baton.address import HostPort
from deploy.ports import HeldPort
from node.errors import StartupError
from node.greetings import come
from node.headless import _Host
from node.host_guests import Guests, place_of, shared_flags
from node.hosts import OtherHosts, _HostRank
from node.peer_links import PeerLink
from node.rank_forks import Limits, RankFork, Word, fork
from node.rank_stream import RankStream
from node.settings import NodeSettings
from tests.e2e.cluster import ROOT, wait_until
from tests.fork_server import ForkedProcess, fork_server
from tests.node.host_scene import LIMITS
from tests.node.test_ranks import PATIENCE_S, runs

SILENT = f"has been silent for {LIMITS.silence:g} s"


class Host:
    """One process of `tests.node.host_scene`."""

    def __init__(self, folder: Path, node_rank: int, port: int, case: str, flags: tuple[str, ...]) -> None:
        self._out, self._err = (folder / f"{case}-{port}-{node_rank}.{what}" for what in ("out", "err"))
        roots = (ROOT, ROOT / "proto", ROOT / "kernels")
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, roots)), "OMP_NUM_THREADS": "1"}
        arguments = [str(node_rank), str(port), case, *flags]
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self.process: ForkedProcess = fork_server().start(
                "tests.node.host_scene", arguments, env=env, cwd=ROOT, stdout=out, stderr=err
            )

    @property
    def out(self) -> list[str]:
        return self._out.read_text().splitlines()

    @property
    def err(self) -> str:
        return self._err.read_text()

    @property
    def ranks(self) -> list[int]:
        """The processes of its ranks."""
        return [int(line.split()[1]) for line in self.out if line.startswith("rank ")]


class Scene:
    """Both hosts of a node."""

    def __init__(self, folder: Path, case: str, *flags: str) -> None:
        """flags: of the second host alone."""
        self._port = HeldPort(HostPort("127.0.0.1", 0))
        self.hosts = [Host(folder, rank, self._port.address.port, case, flags if rank else ()) for rank in range(2)]

    def wait(self) -> list[int]:
        """Their exit codes; all ranks have ended as well."""
        codes = [host.process.wait(PATIENCE_S) for host in self.hosts]
        pids = [pid for host in self.hosts for pid in host.ranks]
        wait_until(lambda: f"{left} run" if (left := [pid for pid in pids if runs(pid)]) else None, PATIENCE_S)
        return codes

    def wait_said(self, line: str) -> None:
        first = self.hosts[0]
        wait_until(lambda: None if line in first.out else f"it says {first.out} {first.err}", PATIENCE_S)

    def close(self) -> None:
        for host in self.hosts:
            host.process.kill()
            host.process.wait(PATIENCE_S)
        self._port.close()


RARE = {"dies-load", "fails-step", "differs-weights"}
"""Cases that differ little from others."""


def cases(of: Iterable[str]) -> pytest.MarkDecorator:
    """As a parameter of a test."""
    return pytest.mark.parametrize("case", [pytest.param(c, marks=[pytest.mark.full] if c in RARE else []) for c in of])


LOST = {
    "dies-load": "rank 3 has ended while it loaded its part",
    "fails-load": "rank 3: its part is too large",
    "dies-step": "has ended",
    "fails-step": "has ended (its part is too large)",
    "hangs-step": SILENT,
}
"""What both hosts say, by what becomes of rank 3."""
HOSTS = {
    f"{case}@{rank}": how for case, how in {"host-dies": "has ended", "host-hangs": SILENT}.items() for rank in (1, 3)
}
"""What the other host says, by what becomes of one when a rank of it has a step."""
REFUSED = {
    "differs-dtype": (("dtype=bfloat16",), "--dtype: bfloat16, and --node-rank 0 has auto"),
    "differs-weights": (("weights=other",), "--model: other, and --node-rank 0 has same"),
}
"""What the second host says, by its flags."""


@pytest.fixture(scope="module")
def scenes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Scene]]:
    """All at once: what takes long is waiting."""
    folder = tmp_path_factory.mktemp("hosts")
    own = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    asked = {item.callspec.params.get("case") for item in own}
    cases = ["stays-close", "fails-load@1", *(case for case in (*LOST, *HOSTS, *REFUSED) if case in asked)]
    started = {case: Scene(folder, case, *REFUSED.get(case, ((), ""))[0]) for case in cases}
    yield started
    for scene in started.values():
        scene.close()


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Callable[[str], Scene]]:
    started = []

    def start(case: str) -> Scene:
        started.append(Scene(tmp_path, case))
        return started[-1]

    yield start
    for one in started:
        one.close()


@cases(LOST)
def test_all_hosts_end_and_say_which_rank_is_lost(scenes: dict[str, Scene], case: str) -> None:
    scene = scenes[case]
    assert scene.wait() == [1, 1]
    master, headless = (host.err for host in scene.hosts)
    assert f"{LOST[case]}: this part of the node ends" in headless
    assert "rank 3" in headless
    assert "node rank 1: rank 3" in master
    assert LOST[case] in master
    assert not [rank for rank in (1, 2) if f"rank {rank} (process" in master + headless]
    assert ("serves" in scene.hosts[0].out) == case.endswith("-step")


def test_all_hosts_end_with_their_node(scene: Callable[[str], Scene]) -> None:
    one = scene("works")
    assert one.wait() == [0, 0]
    assert [host.err for host in one.hosts] == ["", ""]
    assert "serves" in one.hosts[0].out


def test_a_rank_that_does_not_end_is_killed(scenes: dict[str, Scene]) -> None:
    """The node has ended in order."""
    assert scenes["stays-close"].wait() == [0, 0]


def test_a_host_that_is_told_to_stop_stops_the_node(scene: Callable[[str], Scene]) -> None:
    one = scene("waits")
    one.wait_said("waits")
    one.hosts[1].process.send_signal(signal.SIGTERM)
    assert one.wait() == [0, 0]


@cases(HOSTS)
def test_hosts_end_with_each_other(scenes: dict[str, Scene], case: str) -> None:
    """The other one says why."""
    scene, lost = scenes[case], int(case.endswith("@3"))
    other = scene.hosts[1 - lost]
    assert other.process.wait(PATIENCE_S) == 1
    assert f"node rank {lost} {HOSTS[case]}: {'the node' if lost else 'this part of the node'} ends" in other.err
    scene.hosts[lost].process.kill()
    scene.wait()


def test_other_hosts_say_which_rank_of_the_first_could_not_load(scenes: dict[str, Scene]) -> None:
    scene = scenes["fails-load@1"]
    assert scene.wait() == [1, 1]
    assert [host.err.count("rank 1: its part is too large") for host in scene.hosts] == [1, 1]


def test_other_hosts_say_which_rank_of_the_first_is_lost(scene: Callable[[str], Scene]) -> None:
    one = scene("waits")
    one.wait_said("waits")
    os.kill(one.hosts[0].ranks[0], signal.SIGKILL)
    assert one.wait() == [1, 1]
    assert "rank 1 (process" in one.hosts[0].err
    assert "node rank 0: rank 1 (process" in one.hosts[1].err


@cases(REFUSED)
def test_a_host_that_serves_something_else_is_refused_by_flag(scenes: dict[str, Scene], case: str) -> None:
    scene = scenes[case]
    assert scene.wait() == [1, 1]
    master, headless = (host.err for host in scene.hosts)
    assert REFUSED[case][1] in headless
    assert f"a host of this node was refused: {REFUSED[case][1]}" in master
    assert "--nnodes: node rank 1 of 2 has not come to 127.0.0.1:" in master


def test_hosts_and_ranks_come_once() -> None:
    """And only those that belong to other hosts."""
    settings = NodeSettings(model="none", tensor_parallel_size=4, nnodes=2)
    second = shared_flags(settings.model_copy(update={"node_rank": 1}))
    guests = Guests(settings, "weights", LIMITS)

    def why_not_host(number: int) -> str | None:
        return guests._why_not({"node_rank": number, "serves": second})

    def why_not_rank(number: int) -> str | None:
        return guests._why_not({"rank": number, "serves": {"--model": "weights"}})

    assert why_not_host(1) is None
    assert [why_not_host(number) for number in (0, 2)] == ["--node-rank: 0 is taken", "--node-rank: 2 is taken"]
    assert [number for number in range(5) if why_not_rank(number) is None] == [2, 3]
    why = guests._why_not({"rank": 2, "serves": {"--model": "other"}})
    assert why == "--model: other, and --node-rank 0 has weights"
    guests._came |= dict.fromkeys([("host", 1), ("rank", 2)], cast("PeerLink", None))
    assert why_not_host(1) == "--node-rank: 1 is taken"
    assert why_not_rank(2) == "--node-rank: rank 2 is there, or belongs to no other host"
    assert why_not_rank(3) is None


def is_let_go(link: PeerLink) -> None:
    with pytest.raises(OSError, match=r"closed|reset"):
        link.receive_one(PATIENCE_S)


def test_a_host_that_ends_before_all_have_come_may_come_again() -> None:
    """So may its ranks. What is no host is let go."""
    with HeldPort(HostPort("127.0.0.1", 0)) as port, ThreadPoolExecutor(1) as pool:
        settings = NodeSettings(model="none", tensor_parallel_size=4, nnodes=2, master_port=port.address.port)
        waiting = pool.submit(Guests(settings, "weights", replace(LIMITS, join=PATIENCE_S)).wait)
        flags = shared_flags(settings)

        def arrive(**said: Any) -> PeerLink:
            return come(place_of(settings), said, PATIENCE_S, answer_s=PATIENCE_S)[0]

        for _ in range(2):
            arrive(node_rank=1, serves=flags).close()
        host = arrive(node_rank=1, serves=flags)
        with pytest.raises(StartupError, match="--node-rank: 1 is taken"):
            arrive(node_rank=1, serves=flags)
        with pytest.raises(StartupError, match="--model: other, and --node-rank 0 has weights"):
            arrive(rank=2, serves={"--model": "other"})
        for nonsense in (
            *({}, {"rank": "x", "serves": {}}, {"node_rank": 1}, {"node_rank": 1, "serves": []}),
            *({"rank": math.inf, "serves": {}}, {"node_rank": math.inf, "serves": flags}, {"rank": math.nan}),
            *({"node_rank": True, "serves": flags}, {"node_rank": 1, "serves": flags | {"--dtype": [3]}}),
        ):
            with socket.create_connection((port.address.host, port.address.port)) as stranger:
                PeerLink(stranger).send(**nonsense)
                is_let_go(PeerLink(stranger))
        for more in (b"{", b"{}\n"):
            with socket.create_connection((port.address.host, port.address.port)) as chatty:
                PeerLink(chatty).send(rank=2, serves={"--model": "weights"})
                chatty.sendall(more)  # a rank has nothing to say yet
                is_let_go(PeerLink(chatty))
        ranks = [PeerLink(socket.create_connection((port.address.host, port.address.port))) for _ in range(2)]
        for number, rank in enumerate(ranks, 2):
            rank.send(rank=number, serves={"--model": "weights"})
        came = waiting.result(PATIENCE_S)
        assert sorted(came) == [("host", 1), ("rank", 2), ("rank", 3)]
        for link in (host, *ranks, *came.values()):
            link.close()


def test_a_host_that_says_nothing_is_given_up_with_its_ranks_while_others_are_missing() -> None:
    """It has vanished with its machine, and nobody closes its connections; another one takes its place."""
    limits = Limits(loading_silence=0.5, join=PATIENCE_S)
    with HeldPort(HostPort("127.0.0.1", 0)) as port, ThreadPoolExecutor(1) as pool:
        settings = NodeSettings(model="none", tensor_parallel_size=4, nnodes=2, master_port=port.address.port)
        waiting = pool.submit(Guests(settings, "weights", limits).wait)
        hello = {"node_rank": 1, "serves": shared_flags(settings)}
        vanished, _ = come(place_of(settings), hello, PATIENCE_S, answer_s=PATIENCE_S)
        gone = PeerLink(socket.create_connection((port.address.host, port.address.port)))
        gone.send(rank=3, serves={"--model": "weights"})
        for link in (vanished, gone):
            is_let_go(link)
        links = [vanished, gone, come(place_of(settings), hello, PATIENCE_S, answer_s=PATIENCE_S)[0]]
        for number in (2, 3):
            links.append(PeerLink(socket.create_connection((port.address.host, port.address.port))))
            links[-1].send(rank=number, serves={"--model": "weights"})
        came = waiting.result(PATIENCE_S)
        assert sorted(came) == [("host", 1), ("rank", 2), ("rank", 3)]
        for link in (*links, *came.values()):
            link.close()


def test_a_host_without_the_cluster_secret_of_the_first_is_refused(tmp_path: Path) -> None:
    """Where its file is may differ."""
    without = NodeSettings(model="none", tensor_parallel_size=4, nnodes=2)
    first, other = (without.model_copy(update={"cluster_secret_file": tmp_path / name}) for name in "ab")

    def why_not(own: NodeSettings, guest: NodeSettings) -> str | None:
        return Guests(own, "weights", LIMITS)._why_not({"node_rank": 1, "serves": shared_flags(guest)})

    assert why_not(first, other) is None
    assert why_not(first, without) == "--cluster-secret-file: none, and --node-rank 0 has one"
    assert why_not(without, first) == "--cluster-secret-file: one, and --node-rank 0 has none"


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
        with pytest.raises(StartupError, match="--nnodes: node rank 1 of 2 has not come"):
            Guests(settings, "weights", Limits(join=0.0)).wait()
    assert ("--master-addr: on this host localhost is " in caplog.text) == is_warned_of


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


@pytest.mark.parametrize(("command", "is_lost"), [("true", False), ("false", True)])
def test_a_rank_that_has_ended_in_order_is_not_lost(
    command: str, is_lost: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its host may hear a moment later that the node ends."""

    def end(code: int) -> NoReturn:
        raise SystemExit(code)

    monkeypatch.setattr(os, "_exit", end)
    monkeypatch.setattr(logging, "shutdown", lambda: None)
    settings = NodeSettings(model="none", tensor_parallel_size=4, nnodes=2, node_rank=1)
    host = _Host(settings, fork([], lambda *_: None, LIMITS), LIMITS)
    host.end(0)
    with subprocess.Popen([command]) as process, socket.socket() as link:
        pidfd = os.pidfd_open(process.pid)
        select.select([pidfd], [], [])
        rank = RankFork(3, process.pid, pidfd, link, -1, ready=True)
        with pytest.raises(SystemExit) if is_lost else contextlib.nullcontext():
            host._rank_lost(rank, Word("rank 3 has ended"))
        os.close(pidfd)


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ({"beat": True}, ["node rank 1 has ended: the node ends"]),
        ({"lost": "rank 3 has ended", "met": False}, ["node rank 1: rank 3 has ended: the node ends"]),
        ({"ended": True}, []),
    ],
)
def test_a_node_that_has_met_a_loss_by_itself_names_the_host(
    said: dict[str, Any], told: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    """It ends in order, before it has heard of the host."""
    hosts, host = hosts_of_two()
    hosts.stop("")
    host.send(**said)
    host.close()
    hosts.end(PATIENCE_S)
    assert [record.getMessage() for record in caplog.records] == told


def hosts_of_two() -> tuple[OtherHosts, PeerLink]:
    """What rank 0 has, and the second host's link, of which nobody is told yet."""
    hosts = OtherHosts(NodeSettings(model="none", tensor_parallel_size=4, nnodes=2), LIMITS)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        host = PeerLink(socket.create_connection(listener.getsockname()))
        hosts._links = {1: PeerLink(listener.accept()[0])}
    return hosts, host


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
        monkeypatch.setattr(hosts._ranks[0].pool, "heard", lambda said: int(said["link"]))
        hosts._start("rank-streams", hosts._read)
        rank.say(link=math.inf)
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
    met, other, first = Word("rank 2 met it", met=True), Word("rank 1 met it", met=True), Word("rank 3 has ended")
    hosts._lost(met)
    assert hosts.word(0) == met
    hosts._lost(other)
    assert hosts.word(0) == met
    with ThreadPoolExecutor(1) as pool:
        word = pool.submit(hosts.word, PATIENCE_S)
        hosts._lost(first)
        assert word.result(PATIENCE_S) == first
    hosts._lost(Word("rank 2 has ended"))
    assert hosts.word(0) == first
    hosts.end(-1.9)
    host.close()
