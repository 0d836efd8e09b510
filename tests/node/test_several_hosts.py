"""Nodes whose ranks are on several hosts, as processes: whichever part dies, fails or hangs, all hosts end in time and
say why, and no process is left; a host that serves something else is refused by name."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

import pytest

from baton.address import HostPort
from deploy.ports import HeldPort
from tests.node.host_scene import LIMITS
from tests.node.scenes import PATIENCE_S, SceneProcess, all_closed, wait_ended

SILENT = f"has been silent for {LIMITS.silence:g} s"


class Host(SceneProcess):
    """One process of `tests.node.host_scene`."""

    def __init__(self, folder: Path, node_rank: int, port: int, case: str, flags: tuple[str, ...]) -> None:
        arguments = [str(node_rank), str(port), case, *flags]
        super().__init__("tests.node.host_scene", arguments, folder / f"{case}-{port}-{node_rank}")

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
        wait_ended([pid for host in self.hosts for pid in host.ranks])
        return codes

    def wait_said(self, line: str) -> None:
        self.hosts[0].wait_said(line)

    def close(self) -> None:
        for host in self.hosts:
            host.close()
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
    "dies-close": "has ended",
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
    own = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    asked = {item.callspec.params.get("case") for item in own}
    cases = ["stays-close", "fails-load@1", *(case for case in (*LOST, *HOSTS, *REFUSED) if case in asked)]
    folder = tmp_path_factory.mktemp("hosts")
    with all_closed(lambda case: Scene(folder, case, *REFUSED.get(case, ((), ""))[0])) as start:
        yield {case: start(case) for case in cases}


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Callable[[str], Scene]]:
    with all_closed(partial(Scene, tmp_path)) as start:
        yield start


@cases(LOST)
def test_all_hosts_end_and_say_which_rank_is_lost(scenes: dict[str, Scene], case: str) -> None:
    scene = scenes[case]
    assert scene.wait() == [case != "dies-close", 1]
    master, headless = (host.err for host in scene.hosts)
    assert f"{LOST[case]}: this part of the node ends" in headless
    assert "rank 3" in headless
    assert "node rank 1: rank 3" in master
    assert LOST[case] in master
    assert not [rank for rank in (1, 2) if f"rank {rank} (process" in master + headless]
    assert ("serves" in scene.hosts[0].out) == case.endswith(("-step", "-close"))


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
    assert "--nnodes: node rank 1 of 2 did not connect to 127.0.0.1:" in master
