"""Processes of a node of several ranks: whichever dies, fails or hangs, the node ends in time, says which, and leaves
none behind."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from node.ranks.forks import LossReason, to_blame
from tests.node.rank_scene import LIMITS
from tests.node.scenes import PATIENCE_S, SceneProcess, all_closed, wait_ended


class Scene(SceneProcess):
    """One run of `tests.node.rank_scene`."""

    def __init__(self, folder: Path, case: str) -> None:
        super().__init__("tests.node.rank_scene", [case], folder / case)

    @property
    def ranks(self) -> list[int]:
        """Their processes."""
        return [int(pid) for pid in self.out[0].split()[1:]]

    def wait(self) -> int:
        """Its exit code; its ranks have ended as well."""
        code = self.process.wait(PATIENCE_S)
        wait_ended(self.ranks)
        return code


ENDS = {
    "dies-start": "rank 2 has ended while it loaded its part",
    "dies-load": "rank 2 has ended while it loaded its part",
    "fails-start": "rank 2: its part is too large",
    "fails-load": "rank 2: its part is too large",
    "rambles-start": "rank 2: its part is too large: ",
    "hangs-start": f"has been silent for {LIMITS.loading_silence:g} s: the node ends",
    "hangs-load": f"has been silent for {LIMITS.loading_silence:g} s: the node ends",
    "dies-step": "has ended: the node ends",
    "fails-step": "has ended (its part is too large): the node ends",
    "hangs-step": f"has been silent for {LIMITS.silence:g} s: the node ends",
    "dies-close": "has ended: the node ends",
}
"""What the node says, by what becomes of rank 2. Rank 1 meets its end, and is not to blame."""


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Scene]]:
    """All at once: what takes long is waiting."""
    with all_closed(partial(Scene, tmp_path_factory.mktemp("ranks"))) as start:
        yield {case: start(case) for case in [*ENDS, "stays-close"]}


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Callable[[str], Scene]]:
    with all_closed(partial(Scene, tmp_path)) as start:
        yield start


@pytest.mark.parametrize("case", ENDS)
def test_the_node_ends_and_says_which_rank_is_lost(scenes: dict[str, Scene], case: str) -> None:
    scene = scenes[case]
    assert scene.wait() == (case != "dies-close")
    said = scene.err
    assert ENDS[case] in said
    assert "rank 2" in said
    assert "rank 1" not in said
    assert ("serves" in scene.out) == case.endswith(("-step", "-close"))


def test_a_rank_that_met_the_end_of_another_is_blamed_only_if_no_other_is_found() -> None:
    met, other = (LossReason(f"rank {number}", is_secondary=True) for number in (1, 3))
    cause = LossReason("rank 2")
    assert to_blame([]) is None
    assert to_blame([met, other]) == met
    assert to_blame([met, cause, other]) == cause


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
    """But not with a Ctrl-C, of which ranks are told, too: the node ends them when it has drained."""
    one = scene("waits")
    one.wait_said("waits")
    for pid in one.ranks:
        [ignored] = re.findall(r"(?m)^SigIgn:\s+(\w+)$", Path(f"/proc/{pid}/status").read_text())
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            assert int(ignored, 16) >> number - 1 & 1, f"{number!r} ends it"
    os.kill(one.ranks[0], signal.SIGKILL)
    assert one.wait() == 1
    assert "rank 1 (process" in one.err
