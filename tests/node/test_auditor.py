"""Audits of a node: one for all queries before it, pauses in between, and nobody waits for an engine that is gone."""

from __future__ import annotations

import dataclasses
import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import pytest

from baton.audit import KvAudit, KvBlock
from baton.errors import DeadlineExceeded, NodeUnavailable
from baton.node_info import NodeRole
from node.auditor import PAUSE_FACTOR, Auditor
from node.status import _host, _message_pieces

WAIT_S = 20.0
AUDIT = KvAudit("d", "i", NodeRole.DECODE, "ok", True, {"free": 1}, {}, (), (), ())


class Engine:
    """Runs calls while `free` is set. `audits`: the kinds that it ran; `took_s`: how long the next ones take."""

    def __init__(self) -> None:
        self.audits: list[str] = []
        self.times: list[float] = []
        self.took_s = 0.0
        self.free = threading.Event()
        self.free.set()
        self.called = threading.Semaphore(0)

    def run_engine_call(self, call: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()

        def run() -> None:
            self.called.release()
            if self.free.wait(WAIT_S) and future.set_running_or_notify_cancel():
                future.set_result(call())

        threading.Thread(target=run, daemon=True).start()
        return future

    def audit(self, kind: str, result: Any) -> Callable[[], Any]:
        def run() -> Any:
            self.audits.append(kind)
            self.times.append(time.monotonic())
            time.sleep(self.took_s)
            return result

        return run


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def auditor(engine: Engine) -> Iterator[Auditor]:
    auditor = Auditor(engine.run_engine_call, engine.audit("verdict", "ok"), engine.audit("audit", AUDIT), 5.0)
    yield auditor
    auditor.close()


def test_one_audit_serves_all_queries_before_it(engine: Engine, auditor: Auditor) -> None:
    engine.free.clear()
    first = auditor.integrity()
    assert engine.called.acquire(timeout=WAIT_S)
    rest = [auditor.integrity() if i % 2 else auditor.audit(KvAudit.json_pieces) for i in range(50)]
    engine.free.set()
    assert first.result(WAIT_S) == "ok"
    for answer in rest:
        said = answer.result(WAIT_S)
        assert said == "ok" or json.loads("".join(said))["node_id"] == "d"
    assert engine.audits == ["verdict", "audit"]


def test_the_next_audit_waits_many_times_as_long_as_one_took(engine: Engine, auditor: Auditor) -> None:
    engine.took_s = 0.01
    for _ in range(3):
        auditor.integrity().result(WAIT_S)
    gaps = [after - before for before, after in zip(engine.times, engine.times[1:], strict=False)]
    assert min(gaps) >= PAUSE_FACTOR * engine.took_s


def test_an_engine_that_hangs_fails_the_query_and_not_the_next(engine: Engine) -> None:
    auditor = Auditor(engine.run_engine_call, engine.audit("verdict", "ok"), engine.audit("audit", AUDIT), 0.05)
    engine.free.clear()
    with pytest.raises(DeadlineExceeded, match=r"no turn of the engine ended within 0\.05 s"):
        auditor.integrity().result(WAIT_S)
    engine.free.set()
    assert auditor.integrity().result(WAIT_S) == "ok"
    auditor.close()


def test_an_audit_that_fails_is_reported_and_is_not_the_last(engine: Engine) -> None:
    failures = [ZeroDivisionError()]

    def verdict() -> str:
        if failures:
            raise failures.pop()
        return "ok"

    def run_engine_call(call: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(call())
        except ZeroDivisionError as error:
            future.set_exception(error)
        return future

    auditor = Auditor(run_engine_call, verdict, lambda: AUDIT, 1.0)
    with pytest.raises(ZeroDivisionError):
        auditor.integrity().result(WAIT_S)
    assert auditor.integrity().result(WAIT_S) == "ok"
    auditor.close()


def test_closing_fails_queries_that_wait_and_later_ones(engine: Engine, auditor: Auditor) -> None:
    auditor.integrity().result(WAIT_S)  # so that the next one has to wait
    engine.took_s = 0.2
    auditor.integrity().result(WAIT_S)
    waiting = auditor.integrity()
    auditor.close()
    for answer in (waiting, auditor.audit(KvAudit.json_pieces)):
        with pytest.raises(NodeUnavailable, match="the node was stopped"):
            answer.result(WAIT_S)


def test_pieces_make_the_whole() -> None:
    blocks = tuple(KvBlock(i, "cached", 0, 0, 0, "ab", (), 1.5) for i in range(1, 251))
    audit = dataclasses.replace(AUDIT, blocks=blocks)
    said = json.loads("".join(audit.json_pieces()))
    assert said["blocks"] == [
        {"block": i, "state": "cached", "ref": 0, "readers": 0, "writer": 0, "hash": "ab", "holders": [], "age_s": 1.5}
        for i in range(1, 251)
    ]
    assert said["holders"] == said["slots"] == []
    assert (said["role"], said["num_blocks"], said["idle"]) == ("decode", {"free": 1}, True)
    first, *others = _message_pieces(audit)
    for piece in others:
        first.MergeFrom(piece)
    assert [block.block for block in first.blocks] == list(range(1, 251))
    assert dict(first.num_blocks) == {"free": 1}


@pytest.mark.parametrize(
    ("peer", "host"),
    [("ipv4:127.0.0.1:80", "127.0.0.1"), ("ipv6:%5B::1%5D:80", "::1"), ("ipv6:[::1]:80", "::1"), ("unix:/x", "")],
)
def test_the_peers_address(peer: str, host: str) -> None:
    assert _host(peer) == host
