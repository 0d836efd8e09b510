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
    """Implements `kv_transfer.remote.Wire`. All that is said goes through JSON."""

    def __init__(self, pool_bytes: Tensor, layout: KvLayout, make_link: MakeLink) -> None:
        self.failures: list[Exception] = []
        self.said: list[dict[str, Any]] = []
        """What the server has said, as it was said."""
        self.pool = RemotePool(self)
        self.unlaunched: list[Callable[[], None]] | None = None
        """What waits for steps to be launched; None: nothing has to."""
        self._server = PoolServer(pool_bytes, layout, make_link, self._back, self._after_steps, self.failures.append)
        self._numbers = itertools.count()
        self._asked: dict[int, Future[dict[str, Any]]] = {}

    def say(self, **said: Any) -> None:
        self._server.heard(json.loads(json.dumps(said)))

    def _after_steps(self, do: Callable[[], None]) -> None:
        if self.unlaunched is None:
            do()
        else:
            self.unlaunched.append(do)

    def ask(self, timeout_s: float, **said: Any) -> dict[str, Any]:
        number = next(self._numbers)
        answer = self._asked[number] = Future()
        self.say(id=number, **said)
        found = answer.result(timeout_s)
        if "error" in found:
            raise TransferError(found["error"])
        return found

    def _back(self, **said: Any) -> None:
        heard: dict[str, Any] = json.loads(json.dumps(said))
        self.said.append(heard)
        if "answers" in heard:
            self._asked.pop(heard["answers"]).set_result(heard)
        else:
            self.pool.heard(heard)
