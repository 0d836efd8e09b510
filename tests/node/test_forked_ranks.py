"""What rank 0 makes of the other ranks of its host: how it reaches them and their pools, and what their loss ends."""

from __future__ import annotations

import logging
import os
import select
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any, NoReturn

import numpy as np
import pytest

from baton.errors import TransferError
from engine.model.other_ranks import Kind
from node.ranks.forks import ENDED_LOADING, LossReason
from node.ranks.hosts import OtherHosts
from node.ranks.rank_links import POOL_REQUEST, unpack_request
from node.ranks.ranks import ForkedRanks, Ranks
from node.ranks.ring import NUM_SLOTS, RingReader, SharedRing
from tests.node.rank_stand_ins import FAILS, LIMITS, LIVES, Forks, hosts_of_two
from tests.node.scenes import PATIENCE_S

pytestmark = pytest.mark.timeout(20)

PATIENT = replace(LIMITS, silence=PATIENCE_S, loading_silence=PATIENCE_S)
NO_VALUES = np.zeros(0, np.int32)


class Exit(BaseException):
    """The node would have ended."""


class Scene:
    """Ranks 1, 2, ... of a node."""

    def __init__(self, *commands: list[str]) -> None:
        self.forks = Forks(*commands, limits=PATIENT)
        self.ring = SharedRing(len(commands))
        self.readers = [RingReader(self.ring, number) for number in range(len(commands))]
        self.forked = ForkedRanks(self.forks.forks, self.ring)
        self.pool = ThreadPoolExecutor(1)

    def ranks(self, report: float = 0.0) -> Ranks:
        """Of which nobody notices the end by itself."""
        self.forks.forks.unwatch()
        return Ranks(len(self.forks.all) + 1, self.forked, None, replace(PATIENT, report=report))

    def load(self) -> None:
        for pipe in self.forks.pipes:
            pipe.send(ready=True)

    def ask(self, number: int) -> Future[dict[str, Any]]:
        """Of the pool of that rank; each rank has taken the request."""
        answer = self.pool.submit(self.forked._wires[number - 1].request, PATIENCE_S, do="count")
        for reader in self.readers:
            kind, values = reader.receive()
            assert (kind, unpack_request(values)[0]) == (POOL_REQUEST, number)
        return answer

    def close(self) -> None:
        for pipe in self.forks.pipes:
            pipe.of_pool.close()
        if self.forked._reader.ident is not None:
            self.forked._reader.join(PATIENCE_S)
        self.pool.shutdown()
        self.forks.close()
        for eventfd in self.ring.eventfds:
            os.close(eventfd)


@pytest.fixture
def scene() -> Iterator[Scene]:
    """Two ranks that live."""
    scene = Scene(LIVES, LIVES)
    yield scene
    scene.close()


@pytest.fixture
def exits(monkeypatch: pytest.MonkeyPatch) -> None:
    def exit_instead(code: int) -> NoReturn:
        raise Exit(code)

    monkeypatch.setattr(os, "_exit", exit_instead)
    monkeypatch.setattr(logging, "shutdown", lambda: None)


def test_all_ranks_are_told_to_load_and_waited_for(scene: Scene) -> None:
    scene.forked.start_loading(host="localhost", port=1)
    assert [pipe.receive() for pipe in scene.forks.pipes] == [{"host": "localhost", "port": 1}] * 2
    later = threading.Timer(0.05, scene.load)
    later.start()
    assert scene.forked.pools() == [wire.pool for wire in scene.forked._wires]
    assert scene.forked.ready
    later.join()


def test_a_rank_that_ends_before_it_is_told_to_load_is_named(scene: Scene) -> None:
    scene.forks.pipes[1].link.close()
    with pytest.raises(RuntimeError, match=f"rank 2 {ENDED_LOADING}"):
        scene.forked.start_loading(port=1)


def test_a_rank_that_fails_as_it_loads_is_named(scene: Scene) -> None:
    scene.forks.pipes[0].send(ready=True)
    scene.forks.pipes[1].failed(ValueError("its part is too large"))
    with pytest.raises(RuntimeError, match=f"rank 2 {ENDED_LOADING}"):
        scene.forked.pools()
    assert not scene.forked.ready
    assert scene.ranks().why(RuntimeError("rank 0")).args == ("rank 2: its part is too large",)


def test_the_error_of_rank_0_is_told_if_no_other_rank_has_failed(scene: Scene) -> None:
    assert scene.ranks().why(RuntimeError("rank 0 has no room")).args == ("rank 0 has no room",)


def test_each_pool_answers_until_its_rank_ends(scene: Scene) -> None:
    scene.load()
    scene.forked.pools()
    for number, pipe in enumerate(scene.forks.pipes, 1):
        answer = scene.ask(number)
        pipe.send_of_pool(answers=0, steps=number)
        assert answer.result(PATIENCE_S)["steps"] == number
    answer = scene.ask(1)
    scene.forks.pipes[0].of_pool.close()
    with pytest.raises(TransferError, match="rank 1 is lost"):
        answer.result(PATIENCE_S)
    answer = scene.ask(2)
    scene.forks.pipes[1].send_of_pool(answers=1, steps=3)
    assert answer.result(PATIENCE_S)["steps"] == 3, "the other one is there still"


def test_a_rank_of_whose_report_nothing_can_be_made_is_ended(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    scene.load()
    scene.forked.pools()
    answer = scene.ask(1)
    scene.forks.pipes[0].of_pool.send(b"{")
    with pytest.raises(TransferError, match="rank 1 is lost"):
        answer.result(PATIENCE_S)
    [lost, other] = scene.forks.all
    assert os.waitpid(lost.pid, 0)[1] == signal.SIGKILL
    assert os.waitpid(other.pid, os.WNOHANG) == (0, 0)
    assert "rank 1: what it reports of its pool fails" in caplog.text


def test_a_rank_that_reads_nothing_is_not_waited_for_longer_than_was_said(scene: Scene) -> None:
    for _ in range(NUM_SLOTS):
        scene.forked.send(Kind.WARM_UP, NO_VALUES)
    scene.forked.limit_sends(0.0)
    with pytest.raises(TimeoutError, match="for 0 s"):
        scene.forked.send(Kind.WARM_UP, NO_VALUES)


def test_ranks_are_told_to_end_once(scene: Scene) -> None:
    ranks = scene.ranks()
    scene.load()
    assert len(ranks.pools()) == 2
    later = [threading.Timer(0.05, pipe.of_pool.close) for pipe in scene.forks.pipes]
    for timer in later:
        timer.start()
    for _ in range(2):
        ranks.close()
    assert [reader.receive()[0] for reader in scene.readers] == [Kind.CLOSE] * 2
    for rank in scene.forks.all:
        assert rank.of_pool.fileno() == -1
        with pytest.raises(ChildProcessError):
            os.waitpid(rank.pid, 0)
    assert select.select(scene.ring.eventfds, [], [], 0)[0] == []
    for timer in later:
        timer.join()


@pytest.mark.parametrize("failed", [False, True])
def test_other_hosts_are_told_whether_the_node_has_failed(
    scene: Scene, failed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OtherHosts, "ready", True)
    hosts, host = hosts_of_two()
    scene.load()
    scene.forks.forks.unwatch()
    ranks = Ranks(5, scene.forked, hosts, PATIENT)
    ranks.pools()
    for pipe in scene.forks.pipes:
        pipe.of_pool.close()
    closing = scene.pool.submit(ranks.close, failed)
    assert host.receive_one(PATIENCE_S) == {"stop": True, "failed": failed}
    host.close()
    closing.result(PATIENCE_S)


def test_ranks_that_load_are_ended_without_a_word(scene: Scene) -> None:
    """They do not listen yet."""
    scene.forks.pipes[0].send(ready=True)
    scene.ranks().close()
    assert select.select(scene.ring.eventfds, [], [], 0)[0] == []


def test_a_rank_that_takes_no_step_any_more_is_ended_with_the_others(scene: Scene) -> None:
    scene.load()
    ranks = scene.ranks()
    ranks.pools()
    for _ in range(NUM_SLOTS):
        ranks.others.warm_up()
    for pipe in scene.forks.pipes:
        pipe.of_pool.close()
    ranks.close()
    for rank in scene.forks.all:
        with pytest.raises(ChildProcessError):
            os.waitpid(rank.pid, 0)


@pytest.mark.parametrize("is_ready", [False, True])
def test_a_rank_that_was_lost_as_the_node_ended_is_named(is_ready: bool, caplog: pytest.LogCaptureFixture) -> None:
    """The line that ends a failed start has named it already."""
    scene = Scene(FAILS)
    scene.forks.all[0].ready = is_ready
    scene.ranks().close()
    assert caplog.messages == [f"rank 1 (process {scene.forks.all[0].pid}) has ended: the node ends"] * is_ready
    scene.close()


@pytest.mark.usefixtures("exits")
def test_the_loss_of_a_rank_ends_the_node(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    """At once, as soon as it serves."""
    ranks, settled = scene.ranks(report=PATIENCE_S), list[bool]()
    ranks.settle = lambda: settled.append(True)
    with pytest.raises(Exit, match="1"):
        ranks._lost(LossReason("rank 2 has ended"), ready=True)
    assert not settled
    assert caplog.messages == ["rank 2 has ended: the node ends"]


@pytest.mark.usefixtures("exits")
def test_a_rank_that_met_the_end_of_another_is_named_only_if_no_other_is_found(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    ranks, settled = scene.ranks(), list[bool]()
    ranks.settle = lambda: settled.append(True)
    met = LossReason("rank 1 (a peer left)", is_secondary=True)
    with pytest.raises(Exit):
        ranks._lost(met, ready=True)
    scene.forks.pipes[1].failed(ValueError("its part is too large"))
    with pytest.raises(Exit):
        ranks._lost(met, ready=True)
    assert caplog.messages == ["rank 1 (a peer left): the node ends", "rank 2: its part is too large: the node ends"]
    assert settled == [True, True]


@pytest.mark.usefixtures("exits")
def test_a_rank_that_is_lost_as_it_loads_leaves_the_last_word_to_rank_0(scene: Scene) -> None:
    """If that has it in time; and once the ranks end, no loss ends the node."""
    reason = LossReason("rank 2 has ended while it loaded its part")
    with pytest.raises(Exit):
        scene.ranks(report=0.01)._lost(reason, ready=False)
    ranks = scene.ranks(report=PATIENCE_S)
    lost = scene.pool.submit(ranks._lost, reason, ready=False)
    ranks.close()
    assert lost.result(PATIENCE_S) is None
    ranks._lost(reason, ready=True)
