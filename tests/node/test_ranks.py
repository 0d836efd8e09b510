"""Processes of a node of several ranks: whichever dies, fails or hangs, the node ends in time, says which, and leaves
none behind."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e.cluster import ROOT, wait_until
from tests.fork_server import ForkedProcess, fork_server
from tests.node.rank_scene import LIMITS

PATIENCE_S = 60.0


class Scene:
    """One run of `tests.node.rank_scene`."""

    def __init__(self, folder: Path, case: str) -> None:
        self._out, self._err = folder / f"{case}.out", folder / f"{case}.err"
        roots = (ROOT, ROOT / "proto", ROOT / "kernels")
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, roots)), "OMP_NUM_THREADS": "1"}
        with self._out.open("wb") as out, self._err.open("wb") as err:
            arguments = ("tests.node.rank_scene", [case])
            self.process: ForkedProcess = fork_server().start(*arguments, env=env, cwd=ROOT, stdout=out, stderr=err)

    @property
    def out(self) -> list[str]:
        return self._out.read_text().splitlines()

    @property
    def err(self) -> str:
        return self._err.read_text()

    @property
    def ranks(self) -> list[int]:
        """Their processes."""
        return [int(pid) for pid in self.out[0].split()[1:]]

    def wait(self) -> int:
        """Its exit code; its ranks have ended as well."""
        code = self.process.wait(PATIENCE_S)
        wait_until(lambda: f"{left} run" if (left := [pid for pid in self.ranks if runs(pid)]) else None, PATIENCE_S)
        return code

    def wait_said(self, line: str) -> None:
        wait_until(lambda: None if line in self.out else f"it says {self.out} {self.err}", PATIENCE_S)

    def close(self) -> None:
        self.process.kill()
        self.process.wait(PATIENCE_S)


def runs(pid: int) -> bool:
    """Also if it is stopped. Not, if nobody has taken note of its end."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


ENDS = {
    "dies-start": "rank 2 has ended while it loaded its part",
    "dies-load": "rank 2 has ended while it loaded its part",
    "fails-start": "rank 2: its part is too large",
    "fails-load": "rank 2: its part is too large",
    "hangs-start": f"has been silent for {LIMITS.loading_silence:g} s: the node ends",
    "hangs-load": f"has been silent for {LIMITS.loading_silence:g} s: the node ends",
    "dies-step": "has ended: the node ends",
    "fails-step": "has ended (its part is too large): the node ends",
    "hangs-step": f"has been silent for {LIMITS.silence:g} s: the node ends",
}
"""What the node says, by what becomes of rank 2. Rank 1 meets its end, and is not to blame."""


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Scene]]:
    """All at once: what takes long is waiting."""
    folder = tmp_path_factory.mktemp("ranks")
    started = {case: Scene(folder, case) for case in [*ENDS, "stays-close"]}
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


@pytest.mark.parametrize("case", ENDS)
def test_the_node_ends_and_says_which_rank_is_lost(scenes: dict[str, Scene], case: str) -> None:
    scene = scenes[case]
    assert scene.wait() == 1
    said = scene.err
    assert ENDS[case] in said
    assert "rank 2" in said
    assert "rank 1" not in said
    assert ("serves" in scene.out) == case.endswith("-step")


def test_ranks_end_with_their_node(scene: Callable[[str], Scene]) -> None:
    one = scene("works")
    assert one.wait() == 0
    assert one.out[1:] == ["serves"]
    assert one.err == ""


def test_a_rank_that_does_not_end_is_killed(scenes: dict[str, Scene]) -> None:
    """The node has ended in order."""
    assert scenes["stays-close"].wait() == 0


@pytest.mark.parametrize("stopped", [False, True])
def test_ranks_die_with_their_node(scene: Callable[[str], Scene], stopped: bool) -> None:
    one = scene("waits")
    one.wait_said("waits")
    if stopped:
        os.kill(one.ranks[0], signal.SIGSTOP)
    one.process.kill()
    assert one.wait() == -signal.SIGKILL


def test_a_node_that_is_idle_ends_with_a_rank(scene: Callable[[str], Scene]) -> None:
    one = scene("waits")
    one.wait_said("waits")
    os.kill(one.ranks[0], signal.SIGKILL)
    assert one.wait() == 1
    assert "rank 1 (process" in one.err
