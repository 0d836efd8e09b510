"""Garbage of a node's start: collected once, while nothing waits for it, and never looked at again. A node that another
one tells to stop, or a Ctrl-C while it starts."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
import uvloop

from baton.messages import AttemptId
from baton.settings import LONGEST_S
from engine.model.other_ranks import Kind
from engine.model.parallel.group import ONE_RANK
from node import run
from node.base import Base
from node.errors import StartupError
from node.fences import Fences
from node.garbage import collected_once
from node.limits import Limits
from node.parts import RoleParts
from node.peers.nodes import PeerNodes
from node.ranks import process
from node.ranks.ranks import Ranks
from node.run import _make_frozen_parts, _stopped_by
from node.settings import NodeSettings
from prefill_node.node import make_role
from prefill_node.settings import PrefillSettings
from tests.fork_server import ROOT, fork_server

SETTINGS = NodeSettings(model="nowhere")
SIMULATED = PrefillSettings(model="baton-tiny", engine="simulated", profile="h200-8b")


class Knot:
    """Garbage for the collector, once nobody holds it."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def _thawed() -> Iterator[None]:
    yield
    gc.unfreeze()


def test_what_is_made_is_collected_once_and_stays() -> None:
    knots: list[weakref.ref[Knot]] = []

    def role(base: Base) -> RoleParts:
        assert base.settings is SIMULATED
        assert not gc.isenabled()
        knots.append(weakref.ref(Knot()))
        assert knots[0]() is not None
        return make_role(base)

    with contextlib.closing(_make_frozen_parts(role, SIMULATED, lambda: None)) as parts:
        assert gc.isenabled()
        assert knots[0]() is None
        assert not any(known is parts for known in gc.get_objects())


def test_what_was_there_before_is_not_looked_at_even_once() -> None:
    """As nothing is that was imported."""
    with collected_once():
        knot = weakref.ref(Knot())
        _make_frozen_parts(make_role, SIMULATED, lambda: None).close()
    assert knot() is not None


def test_a_start_that_fails_leaves_the_collector_on() -> None:
    def fail(base: Base) -> RoleParts:
        raise ValueError("no such model")

    with pytest.raises(ValueError, match="no such model"):
        _make_frozen_parts(fail, SIMULATED, lambda: None)
    assert gc.isenabled()


class Tells:
    """In the place of PeerNodes and of Ranks."""

    def __init__(self) -> None:
        self.stops: list[Callable[[], object]] = []

    def ready(self, stop: Callable[[], object]) -> None:
        self.stops.append(stop)

    serves = ready


def test_a_node_may_be_told_to_stop_at_any_time() -> None:
    """By another node, and another host; also when it has stopped by itself."""
    peers, ranks = Tells(), Tells()

    async def serve() -> None:
        stopped = _stopped_by(cast(PeerNodes, peers), cast(Ranks, ranks))
        for stop in (*peers.stops, *ranks.stops):
            await asyncio.to_thread(stop)
        await asyncio.wait_for(stopped, 20.0)

    uvloop.run(serve())
    for stop in (*peers.stops, *ranks.stops):
        stop()


def test_ranks_hosts_and_other_nodes_are_given_up_after_the_silence_that_is_set() -> None:
    settings = NodeSettings(model="nowhere", silence_timeout=7.0)
    assert Limits.of(settings).silence == 7.0


@pytest.mark.parametrize("flag", ["request_timeout", "drain_timeout", "distributed_timeout_seconds"])
@pytest.mark.parametrize("seconds", [float("inf"), 1e10])
def test_a_time_limit_for_which_no_thread_can_wait_is_refused(flag: str, seconds: float) -> None:
    """With an infinite one, a router's first Abort without a deadline ended the engine's thread."""
    with pytest.raises(ValueError, match=flag):
        NodeSettings(model="nowhere", **{flag: seconds})  # type: ignore[arg-type]
    Fences(LONGEST_S).fence(AttemptId(1, "r", 0), 0.0)


class Link:
    """A RankLink of the only rank, which the node closes at once."""

    number = 0
    host: str | None = None

    def join(self, device: torch.device, fingerprint: Callable[[], str]) -> tuple[Any, None]:
        assert not gc.isenabled()
        self.frozen = gc.get_freeze_count()  # the imports' objects
        return ONE_RANK, None

    def ready(self, device: torch.device, serve: object) -> None:
        assert gc.isenabled()
        assert gc.get_freeze_count() > self.frozen > 10_000

    def receive(self) -> tuple[int, Any]:
        return Kind.CLOSE, np.zeros(0, np.int32)


def test_a_rank_that_serves_never_looks_at_what_it_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks would wait for its collections."""
    monkeypatch.setattr(process, "configure_logging", lambda *_, **__: None)  # this process has its own
    gc.unfreeze()
    flags: dict[str, Any] = {"device": "cpu", "max_model_len": 64, "kv_cache_memory_bytes": 1 << 20, "cpu_threads": 1}
    link = Link()
    process.run_rank(link, NodeSettings(model="baton-tiny", **flags))
    assert link.frozen


@pytest.mark.parametrize("code", [0, 1, None])
def test_ranks_learn_whether_their_node_has_failed(code: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if it could not start, though they could."""
    closed: list[bool] = []

    class Closing:
        def close(self, failed: bool) -> None:
            closed.append(failed)

    def run_ranks(*arguments: object) -> int:
        if code is None:
            raise StartupError("--listen: the port is taken")
        return code

    monkeypatch.setattr(run, "fork_ranks", lambda *_: Closing())
    monkeypatch.setattr(run, "_run_ranks", run_ranks)
    unused: Any = None
    with pytest.raises(StartupError) if code is None else contextlib.nullcontext():
        assert run._run(SETTINGS, unused, unused) == code
    assert closed == [code != 0]


@pytest.mark.parametrize(
    ("stage", "code"), [("load", -signal.SIGINT), ("container", 128 + signal.SIGINT), ("warm-up", -signal.SIGINT)]
)
def test_a_ctrl_c_ends_a_node_that_starts_whatever_it_is_in(stage: str, code: int) -> None:
    with Path(os.devnull).open("wb") as nothing:
        output = {"stdout": nothing, "stderr": nothing}
        node = fork_server().start("tests.node.interrupted", [stage], env=os.environ, cwd=ROOT, **output)
    assert node.wait(60.0) == code
