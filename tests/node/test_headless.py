"""What a host that has only ranks makes of signals, of what rank 0 says, and of the loss of a rank."""

from __future__ import annotations

import logging
import os
import signal
import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NoReturn

import pytest

from node import preflight
from node.limits import Limits
from node.peers.links import PeerLink
from node.peers.rendezvous import HELLO_TIMEOUT_S, RendezvousEndpoint
from node.ranks import headless
from node.ranks.forks import BEAT_S, HAS_ENDED, LossReason, fork
from node.ranks.joining import rendezvous_of, shared_flags
from node.settings import NodeSettings
from tests.node.rank_stand_ins import FAILS, LIMITS, LIVES, Forks, hosts_of_two
from tests.node.scenes import PATIENCE_S

pytestmark = pytest.mark.timeout(20)

PATIENT = replace(LIMITS, close=PATIENCE_S)
SETTINGS = NodeSettings(model="none", tensor_parallel_size=4, nnodes=2, node_rank=1)


class Exit(BaseException):
    """The process would have ended."""


@pytest.fixture(autouse=True)
def exits(monkeypatch: pytest.MonkeyPatch) -> None:
    def exit_instead(code: int) -> NoReturn:
        raise Exit(code)

    monkeypatch.setattr(os, "_exit", exit_instead)
    monkeypatch.setattr(logging, "shutdown", lambda: None)


class Scene:
    """A host without ranks that has joined. `first`: what rank 0 has of it."""

    def __init__(self, limits: Limits = PATIENT) -> None:
        self.first, self.link = hosts_of_two()
        self.host = headless._Host(SETTINGS, fork([], lambda *_: None, limits), limits)
        self.host._link = self.link
        self.signals, self._other = socket.socketpair()

    @property
    def of_first(self) -> PeerLink:
        return self.first._links[1]

    def follow(self) -> int:
        return self.host._follow(self.link, self.signals)

    def signal(self) -> None:
        self._other.send(bytes([signal.SIGTERM]))

    def close(self) -> None:
        for end in (self.signals, self._other, self.link, self.of_first):
            end.close()


@pytest.fixture
def scene() -> Iterator[Scene]:
    scene = Scene()
    yield scene
    scene.close()


def test_why_the_node_ends_is_heard_though_a_signal_comes_first(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    """Of which rank 0 can be told no more."""
    scene.link.send(beat=True)  # it reads nothing more, so that its end resets the connection
    scene.first.stop("rank 1 has ended")
    scene.of_first.close()
    scene.signal()
    assert scene.follow() == 1
    assert caplog.messages == ["node rank 0: rank 1 has ended: this part of the node ends"]


def test_the_rank_that_failed_first_is_named() -> None:
    """Though one was noticed before that only met its end."""
    limits = replace(LIMITS, report=0.0)
    forks = Forks(FAILS, FAILS, limits=limits)
    host = headless._Host(SETTINGS, forks.forks, limits)
    first, host._link = hosts_of_two()
    for pipe, error in zip(forks.pipes, (RuntimeError("a peer left"), ValueError("no room")), strict=True):
        pipe.failed(error)
    with pytest.raises(Exit, match="1"):
        host._rank_lost(forks.all[0], forks.all[0].loss_reason(HAS_ENDED))
    assert first._links[1].receive_one(PATIENCE_S) == {"lost": "rank 2: no room", "met": False}
    host._link.close()
    first.end(0)
    forks.close()


def joins(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> list[NodeSettings]:
    """When it runs. Returns the settings that it checks."""
    checked: list[NodeSettings] = []

    def join(endpoint: RendezvousEndpoint, hello: Any, timeout_s: float, *, answer_s: float) -> tuple[PeerLink, Any]:
        assert endpoint == rendezvous_of(SETTINGS)
        assert hello == {"node_rank": 1, "serves": shared_flags(SETTINGS)}
        assert (timeout_s, answer_s) == (PATIENT.join, HELLO_TIMEOUT_S)
        return scene.link, {}

    monkeypatch.setattr(preflight, "check", checked.append)
    monkeypatch.setattr(headless, "join_rendezvous", join)
    return checked


def test_a_host_ends_with_rank_0(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Once it has found that its own machine has what it needs, and has come."""
    checked = joins(scene, monkeypatch)
    scene.of_first.close()
    assert scene.host.run() == 1
    assert scene.host.end(1) == 1
    assert checked == [SETTINGS]
    assert caplog.messages == ["node rank 0 has ended: this part of the node ends"]


@pytest.fixture
def sigterms() -> Iterator[list[int]]:
    """Those that would have killed the process."""
    killed: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: killed.append(number))
    yield killed
    signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("is_second", [False, True])
def test_a_signal_while_the_host_ends_with_its_node_does_not_kill_it_unless_it_is_the_second(
    scene: Scene, is_second: bool, sigterms: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All hosts may be told to stop, one a moment after another."""
    joins(scene, monkeypatch)

    def end_ranks(timeout_s: float) -> list[LossReason]:
        assert timeout_s == PATIENT.close
        os.kill(os.getpid(), signal.SIGTERM)
        return []

    monkeypatch.setattr(scene.host._forks, "end", end_ranks)
    scene.host._signalled = is_second
    scene.first.serves(lambda: None)
    scene.first.stop("")
    assert scene.host.run() == 0
    if is_second:
        with pytest.raises(Exit, match=str(128 + signal.SIGTERM)):
            scene.host.end(0)
    else:
        assert scene.host.end(0) == 0
        assert scene.of_first.receive_one(PATIENCE_S) == {"ended": True}
    scene.host._signals.close()
    assert sigterms == []


def test_a_signal_while_the_node_serves_is_passed_on_once(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    scene.signal()
    monkeypatch.setattr(scene.host, "_take_ready", lambda: scene.first.stop(""))
    assert scene.follow() == 0
    assert [scene.of_first.receive_one(PATIENCE_S) for _ in range(2)] == [{"stopping": True}, {"beat": True}]
    scene.link.close()
    with pytest.raises(OSError, match="closed"):
        scene.of_first.receive()


@pytest.mark.parametrize("failed", [False, True])
def test_a_host_exits_as_its_node_does(scene: Scene, failed: bool, caplog: pytest.LogCaptureFixture) -> None:
    """So that whatever starts the node again starts all of its hosts. All ranks end in order."""
    scene.first.stop("", failed)
    assert scene.follow() == 0
    assert scene.host.end(0) == failed
    assert scene.of_first.receive_one(PATIENCE_S) == {"ended": True}
    assert caplog.messages == ["node rank 0 has ended with exit code 1: this part of the node ends"] * failed


def test_a_host_whose_node_is_lost_kills_its_ranks_and_says_no_more(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    """What became of them matters to nobody now."""
    forks = Forks(FAILS, LIVES)
    host = headless._Host(SETTINGS, forks.forks, PATIENT)
    host._link = scene.link
    assert host.end(1) == 1
    assert caplog.messages == []
    with pytest.raises(OSError, match="closed"):
        scene.of_first.receive()
    forks.close()


def test_a_signal_before_the_node_serves_and_a_second_one_end_the_host(scene: Scene) -> None:
    with pytest.raises(Exit, match=str(128 + signal.SIGHUP)):
        scene.host._heed(signal.SIGHUP, None)
    scene.host._handle({"serves": True})
    scene.host._heed(signal.SIGTERM, None)
    with pytest.raises(Exit, match=str(128 + signal.SIGINT)):
        scene.host._heed(signal.SIGINT, None)


def test_a_host_waits_for_its_node_longer_while_that_starts(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Rank 0 says nothing before all hosts have come."""
    limits = Limits(join=3 * BEAT_S, loading_silence=2 * BEAT_S, silence=BEAT_S)
    scene = Scene(limits)
    messages: list[dict[str, Any]] = [{}, {"beat": True}, {"serves": True}, {"beat": True}]
    limits_s = []
    for message in messages:
        assert scene.host._handle(message) is None
        limits_s.append(scene.host._silence_s)
    assert limits_s == [limits.join, limits.loading_silence, limits.silence, limits.silence]
    turns, began = list[bool](), time.monotonic()
    monkeypatch.setattr(scene.host, "_take_ready", lambda: turns.append(True))
    assert scene.follow() == 1
    assert scene.link.num_silent == 2, "more than one slice"
    assert time.monotonic() - began > 0.9 * BEAT_S
    assert len(turns) < 10, "it computes all the time"
    assert caplog.messages == [f"node rank 0 has been silent for {limits.silence:g} s: this part of the node ends"]
    assert scene.of_first.receive_one(PATIENCE_S) == {"beat": True}
    scene.close()


def test_ranks_that_have_loaded_may_be_silent_for_a_shorter_time() -> None:
    forks = Forks(LIVES, LIVES)
    host = headless._Host(SETTINGS, forks.forks, LIMITS)
    forks.pipes[0].send(ready=True)
    for _ in range(2):
        host._take_ready()
    assert [rank.ready for rank in forks.all] == [True, False]
    forks.close()
