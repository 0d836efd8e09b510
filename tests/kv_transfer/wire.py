"""A pool as if it were on another host: `RemotePool` and `PoolServer` with a wire between them that calls."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from torch import Tensor

from baton.errors import TransferError
from baton.layout import KvLayout
from kv_transfer.pool_server import MakeLink, PoolServer
from kv_transfer.remote import RemotePool


class CallWire:
    """Implements `kv_transfer.remote.Wire`. All messages go through JSON."""

    def __init__(self, pool_bytes: Tensor, layout: KvLayout, make_link: MakeLink) -> None:
        self.failures: list[Exception] = []
        self.messages: list[dict[str, Any]] = []
        """The messages of the server, in order."""
        self.pool = RemotePool(self)
        self.unlaunched: list[Callable[[], None]] | None = None
        """What waits for steps to be launched; None: nothing has to."""
        self._server = PoolServer(pool_bytes, layout, make_link, self._back, self._after_steps, self.failures.append)
        self._numbers = itertools.count()
        self._requests: dict[int, Future[dict[str, Any]]] = {}

    def send(self, **message: Any) -> None:
        self._server.handle(json.loads(json.dumps(message)))

    def _after_steps(self, do: Callable[[], None]) -> None:
        if self.unlaunched is None:
            do()
        else:
            self.unlaunched.append(do)

    def request(self, timeout_s: float, **message: Any) -> dict[str, Any]:
        number = next(self._numbers)
        answer = self._requests[number] = Future()
        self.send(id=number, **message)
        found = answer.result(timeout_s)
        if "error" in found:
            raise TransferError(found["error"])
        return found

    def _back(self, **message: Any) -> None:
        received: dict[str, Any] = json.loads(json.dumps(message))
        self.messages.append(received)
        if "answers" in received:
            self._requests.pop(received["answers"]).set_result(received)
        else:
            self.pool.handle(received)
