"""A rank on another host receives steps over its stream, and requests for its KV pool in order with them."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from engine.model.parallel.others import Kind
from node.ranks.rank_links import RemoteRankLink
from node.ranks.stream import RankStream

pytestmark = pytest.mark.timeout(20)


class Pipe:
    """In the place of `node.ranks.forks.RankPipe`."""

    def send(self, **message: Any) -> None:
        """Nobody listens."""


def test_a_request_after_steps_is_handled_once_the_rank_has_taken_them() -> None:
    """On its thread, though the request is received at once."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = RankStream(socket.create_connection(listener.getsockname()))
        theirs = RankStream(listener.accept()[0])
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
