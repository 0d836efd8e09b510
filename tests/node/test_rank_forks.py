"""What a process makes of its forked ranks: what they said, whether they live, and why they were lost."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from node.ranks.forks import BEAT_S, ENDED_LOADING, HAS_ENDED, MAX_ERROR_CHARS, LossReason, RankFork
from tests.node.rank_stand_ins import ENDS, FAILS, LIMITS, LIVES, Forks
from tests.node.scenes import PATIENCE_S

pytestmark = pytest.mark.timeout(20)


@pytest.fixture
def live() -> Iterator[Forks]:
    """Two ranks that live."""
    forks = Forks(LIVES, LIVES)
    yield forks
    forks.close()


def test_what_a_rank_said_is_left_until_it_is_ready(live: Forks) -> None:
    rank, pipe = live.all[0], live.pipes[0]
    assert rank.peek() == {}
    assert not rank.take_ready(rank.peek())
    pipe.send(ready=True)
    assert rank.peek() == rank.peek() == {"ready": True}
    rank.num_silent = 3
    assert rank.take_ready(rank.peek())
    assert (rank.ready, rank.num_silent, rank.peek()) == (True, 0, {})
    assert not live.forks.ready
    live.all[1].ready = True
    assert live.forks.ready
    pipe.failed(ValueError("its part is too large"))
    assert not rank.take_ready(rank.peek())
    assert rank.peek() == {"error": "its part is too large", "met": False}


def test_what_a_rank_said_is_there_after_its_end(live: Forks) -> None:
    """Also if it ended before it read what it was told."""
    rank, pipe = live.all[0], live.pipes[0]
    rank.send(port=1)
    pipe.failed(ValueError("no room"))
    pipe.link.close()
    assert rank.peek() == {"error": "no room", "met": False}
    rank.link.recv(1000)
    assert rank.peek() is None
    assert not rank.take_ready(rank.peek())


def test_a_rank_whose_node_has_ended_notices_when_it_asks_it_something(live: Forks) -> None:
    rank, pipe = live.all[0], live.pipes[0]
    rank.send(port=1)
    assert pipe.receive() == {"port": 1}
    pipe.send_of_pool(answers=2)
    assert rank.of_pool.recv(1000) == b'{"answers": 2}'
    for end in (rank.link, rank.of_pool):
        end.close()
    with pytest.raises(OSError, match="the other process has ended"):
        pipe.receive()
    with pytest.raises(OSError, match="Broken pipe"):
        pipe.send(ready=True)
    pipe.send_of_pool(answers=3)
    pipe.failed(ValueError("nobody hears it"))


@pytest.mark.parametrize(
    ("error", "text", "met"),
    [
        (ValueError("no room"), "no room", False),
        (RuntimeError("rank 2 has left"), "rank 2 has left", True),
        (ValueError(), "ValueError()", False),
        (ValueError("\N{SNOWMAN}" * 20_000), "\N{SNOWMAN}" * MAX_ERROR_CHARS, False),
    ],
)
def test_the_error_of_a_rank_is_told(live: Forks, error: Exception, text: str, met: bool) -> None:
    live.pipes[0].failed(error)
    assert live.all[0].peek() == {"error": text, "met": met}


@pytest.mark.parametrize(
    ("is_ready", "why", "said", "text", "is_secondary"),
    [
        (False, HAS_ENDED, {}, f"rank 1 {ENDED_LOADING}", False),
        (False, HAS_ENDED, {"error": "no room", "met": False}, "rank 1: no room", False),
        (False, HAS_ENDED, {"error": "a peer left", "met": True}, "rank 1: a peer left", True),
        (False, "is silent", {}, "rank 1 (process PID) is silent", False),
        (True, HAS_ENDED, {}, "rank 1 (process PID) has ended", False),
        (True, HAS_ENDED, {"error": "a peer left", "met": True}, "rank 1 (process PID) has ended (a peer left)", True),
    ],
)
def test_a_loss_is_told_with_the_error_of_the_rank(
    live: Forks, is_ready: bool, why: str, said: dict[str, Any], text: str, is_secondary: bool
) -> None:
    rank = live.all[0]
    rank.ready = is_ready
    if said:
        live.pipes[0].send(**said)
    assert rank.loss_reason(why) == LossReason(text.replace("PID", str(rank.pid)), is_secondary)


def test_the_rank_that_failed_first_is_found_though_others_met_its_end_before() -> None:
    forks = Forks(LIVES, LIVES, LIVES)
    forks.pipes[0].failed(RuntimeError("a peer left"))
    forks.pipes[1].send(ready=True)
    assert forks.forks.loss_reason(0.0) == LossReason("rank 1: a peer left", is_secondary=True)
    forks.pipes[2].link.close()
    assert forks.forks.loss_reason(PATIENCE_S) == LossReason(f"rank 3 {ENDED_LOADING}"), "all have spoken: at once"
    forks.close()


def test_ranks_of_which_none_has_failed_are_waited_for(live: Forks) -> None:
    live.pipes[0].send(ready=True)
    assert live.forks.loss_reason(0.01) is None
    timer = threading.Timer(0.05, live.pipes[1].failed, [ValueError("late")])
    timer.start()
    assert live.forks.loss_reason(PATIENCE_S) == LossReason("rank 2: late")
    timer.join()


def test_ranks_that_do_not_end_are_killed_and_those_that_failed_are_named() -> None:
    forks = Forks(ENDS, FAILS, LIVES)
    for rank in forks.all:
        rank.ready = True
    assert forks.forks.end(0.0) == [LossReason(f"rank 2 (process {forks.all[1].pid}) has ended")]
    for rank in forks.all:
        with pytest.raises(ChildProcessError):
            os.waitpid(rank.pid, 0)
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(rank.pidfd)
        assert rank.link.fileno() == -1
    forks.close()


def test_ranks_have_their_time_to_end(live: Forks) -> None:
    """Nobody takes their end for a loss then, unless it is no end in order."""
    for rank in live.all:
        rank.ready = True
    live.forks.watch(lambda rank, reason: pytest.fail(reason.text))
    live.forks.unwatch()
    assert not live.forks._watcher.is_alive()
    assert not live.all[0].has_ended_in_order, "it has not ended"
    timers = [threading.Timer(0.05, os.kill, [rank.pid, signal.SIGTERM]) for rank in live.all]
    for timer in timers:
        timer.start()
    ended = live.forks.end(PATIENCE_S)
    assert ended == [LossReason(f"rank {rank.number} (process {rank.pid}) has ended") for rank in live.all]


def test_ranks_that_end_are_watched_no_more(live: Forks) -> None:
    lost: list[LossReason] = []
    live.forks.watch(lambda rank, reason: lost.append(reason))
    assert live.forks.end(0.0) == []
    assert not live.forks._watcher.is_alive()
    assert lost == []


class Lost:
    """Waits for `on_lost`."""

    def __init__(self, forks: Forks, beating: tuple[int, ...]) -> None:
        self.said: list[tuple[int, str]] = []
        self._heard = threading.Event()
        for index in range(len(forks.all)):
            forks.counts[index] = 7  # each has lived
        forks.forks.watch(self)
        while not self._heard.wait(0.02):
            for index in beating:
                forks.counts[index] += 1

    def __call__(self, rank: RankFork, reason: LossReason) -> None:
        self.said.append((rank.number, reason.text))
        self._heard.set()


@pytest.mark.parametrize(("is_ready", "limit_s"), [(False, LIMITS.loading_silence), (True, LIMITS.silence)])
def test_a_rank_that_hangs_is_lost_when_its_time_is_up(live: Forks, is_ready: bool, limit_s: float) -> None:
    """Which is longer while it loads. The other one has none to say, and beats."""
    live.all[1].ready = is_ready
    lost = Lost(live, beating=(0,))
    live.forks.unwatch()
    assert lost.said == [(2, f"rank 2 (process {live.all[1].pid}) has been silent for {limit_s:g} s")]
    assert (live.all[0].num_silent < 2, live.all[1].num_silent) == (True, round(limit_s / BEAT_S))


def test_a_rank_that_ends_is_lost_at_once() -> None:
    forks = Forks(LIVES, ENDS)
    lost = Lost(forks, beating=(0, 1))
    assert lost.said == [(2, f"rank 2 {ENDED_LOADING}")]
    forks.close()
