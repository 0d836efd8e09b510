"""A rank receives requests for its KV pool in order with its steps: in the ring, or over a stream from another host."""

from __future__ import annotations

import os
import queue
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NoReturn

import numpy as np
import pytest
import torch
from torch._C._distributed_c10d import HashStore

from baton.errors import TransferError
from engine.model.other_ranks import Kind
from engine.model.parallel.group import RankGroup
from node.ranks.pool_wire import PoolWire
from node.ranks.rank_links import (
    POOL_REQUEST,
    ForkedRankLink,
    RemoteRankLink,
    join_group,
    pack_request,
    unpack_request,
)
from node.ranks.ring import RingWriter, SharedRing
from node.ranks.stream import RankStream

pytestmark = pytest.mark.timeout(20)


class Pipe:
    """In the place of `node.ranks.forks.RankPipe`. `said`: what the rank has reported."""

    def __init__(self) -> None:
        self.said: list[Any] = []

    def send(self, **message: Any) -> None:
        self.said.append(message)

    def send_of_pool(self, **message: Any) -> None:
        """Nobody listens."""

    def failed(self, error: Exception) -> None:
        self.said.append(error)


def stream_ends() -> tuple[RankStream, RankStream]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return RankStream(socket.create_connection(listener.getsockname())), RankStream(listener.accept()[0])


def test_a_request_after_steps_is_handled_once_the_rank_has_taken_them() -> None:
    """On its thread, though the request is received at once."""
    ours, theirs = stream_ends()
    link = RemoteRankLink(1, 2, Pipe(), None, 1.0)  # type: ignore[arg-type]
    link._stream = theirs
    done: list[Any] = []
    received = threading.Event()

    class Server:
        def __init__(self, send: object, after_steps: Callable[[Callable[[], None]], None], fail: object) -> None:
            self._after_steps = after_steps

        def handle(self, message: dict[str, Any]) -> None:
            self._after_steps(lambda: done.append((message["do"], threading.current_thread())))
            received.set()

    link.ready(torch.device("cpu"), Server)  # type: ignore[arg-type]
    ours.send_step(0, np.arange(1, dtype=np.int32))
    ours.send_step(1, np.arange(2, dtype=np.int32))
    ours.send_message(do="expect")
    ours.send_step(2, np.arange(3, dtype=np.int32))
    assert received.wait(10)
    for kind in range(2):
        assert link.receive()[0] == kind
        assert not done
    assert link.receive()[0] == 2
    assert done == [("expect", threading.current_thread())]
    ours.close()
    assert link.receive()[0] == Kind.CLOSE
    theirs.close()


def test_the_ring_has_requests_in_order_with_steps_each_for_one_rank() -> None:
    ring = SharedRing(2)
    writer, done = RingWriter(ring), list[Any]()

    class Server:
        def __init__(self, send: object, after_steps: Callable[[Callable[[], None]], None], fail: object) -> None:
            self._after_steps = after_steps

        def handle(self, message: dict[str, Any]) -> None:
            self._after_steps(lambda: done.append(message))

    links = [ForkedRankLink(number, 3, Pipe(), ring, number - 1) for number in (1, 2)]  # type: ignore[arg-type]
    for link in links:
        link.ready(torch.device("cpu"), Server)  # type: ignore[arg-type]
    writer.send(0, np.arange(1, dtype=np.int32))
    writer.send(POOL_REQUEST, pack_request(2, {"do": "scatter", "ids": [5, 6]}))
    writer.send(1, np.arange(2, dtype=np.int32))
    for link, handled in zip(links, ([], [{"do": "scatter", "ids": [5, 6]}]), strict=True):
        assert link.receive()[0] == 0
        assert not done
        assert link.receive()[0] == 1
        assert done == handled
    for eventfd in ring.eventfds:
        os.close(eventfd)


class Exit(BaseException):
    """The process would have ended."""


def exit_instead(code: int) -> NoReturn:
    raise Exit(code)


def test_a_rank_whose_pool_fails_says_why_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though no step comes: others wait for KV that it has."""
    monkeypatch.setattr(os, "_exit", exit_instead)
    ring, fails, error = SharedRing(1), list[Callable[[Exception], None]](), RuntimeError("the transport has failed")
    ours, theirs = stream_ends()
    pipes = [Pipe(), Pipe()]
    forked, remote = ForkedRankLink(1, 2, pipes[0], ring, 0), RemoteRankLink(1, 2, pipes[1], None, 1.0)  # type: ignore[arg-type]
    remote._stream = theirs
    for link in (forked, remote):
        link.ready(torch.device("cpu"), lambda send, after_steps, fail: fails.append(fail))  # type: ignore[arg-type, return-value]
    for fail in fails:
        with pytest.raises(Exit, match="1"):
            fail(error)
    assert [pipe.said for pipe in pipes] == [[{"ready": True}, error]] * 2
    assert [frame.message() for frame in ours.receive()] == [{"ready": True}]
    ours.close()
    assert remote.receive()[0] == Kind.CLOSE
    theirs.close()
    os.close(ring.eventfds[0])


def test_a_rank_ends_with_whatever_comes_of_what_was_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its thread that reads says so before it ends: the next step would never come."""
    exits, pipe = queue.SimpleQueue[int](), Pipe()
    monkeypatch.setattr(os, "_exit", exits.put)
    ours, theirs = stream_ends()
    link = RemoteRankLink(1, 2, pipe, None, 1.0)  # type: ignore[arg-type]
    link._stream = theirs

    class Server:
        def handle(self, message: dict[str, Any]) -> None:
            raise KeyError(message["do"])

    link.ready(torch.device("cpu"), lambda *_: Server())  # type: ignore[arg-type]
    ours.send_message(do="nothing known")
    assert exits.get(timeout=10) == 1
    assert repr(pipe.said[-1]) == "KeyError('nothing known')"
    for end in (ours, theirs):
        end.close()


def test_a_request_to_a_rank_that_is_lost_fails_at_once() -> None:
    wire = PoolWire(3, lambda message: wire.lost() if message["do"] == "first" else None)
    for do in ("first", "second"):
        with pytest.raises(TransferError, match="rank 3 is lost"):
            wire.request(10.0, do=do)


def test_an_answer_that_is_late_or_comes_twice_changes_nothing() -> None:
    """As when the rank answers in the moment in which it is given up."""

    def answer_twice(message: dict[str, Any]) -> None:
        for steps in (1, 2):
            wire.handle({"answers": message["id"], "steps": steps})
        wire.lost()

    wire = PoolWire(3, answer_twice)
    assert wire.request(10.0, do="count") == {"answers": 0, "steps": 1}
    late = PoolWire(3, lambda message: None)
    with pytest.raises(TransferError, match="rank 3 has not answered for 0 s"):
        late.request(0.0, do="count")
    late.handle({"answers": 0, "steps": 3})


def test_what_is_sent_to_a_rank_that_has_ended_is_dropped() -> None:
    """Its end is noticed elsewhere."""

    def fail(message: dict[str, Any]) -> None:
        raise BrokenPipeError

    PoolWire(3, fail).send(do="relax")


def test_requests_of_any_length_go_through_the_ring() -> None:
    for length in range(5):
        assert unpack_request(pack_request(2, {"do": "x" * length})) == (2, {"do": "x" * length})


def test_ranks_meet_at_the_addresses_of_their_hosts() -> None:
    """Not at a loopback address, which no other host reaches."""
    store, address = HashStore(), "127.0.0.2"

    def join(rank: int) -> RankGroup:
        return join_group(store, rank, 2, torch.device("cpu"), address)

    with ThreadPoolExecutor(2) as pool:
        groups = list(pool.map(join, range(2)))
        assert list(pool.map(lambda group: group.minimum(group.rank), groups)) == [0, 0]
    assert [group._host for group in groups] == [address] * 2  # type: ignore[attr-defined]
