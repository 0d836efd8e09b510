"""Rank 0's end of the wire to another rank's KV pool, which the rank's process operates (`kv_transfer.pool_server`)."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

from baton.errors import TransferError
from kv_transfer.remote import RemotePool


class PoolWire:
    """Implements `kv_transfer.remote.Wire`. send: sends a message to rank `number`, in order with its steps, from any
    thread; raises OSError if the rank is lost. `handle` is for one thread."""

    def __init__(self, number: int, send: Callable[[dict[str, Any]], None]) -> None:
        self.number, self._send = number, send
        self.pool = RemotePool(self)
        self._numbers = itertools.count()
        self._requests: dict[int, Future[dict[str, Any]]] = {}
        self._lock = threading.Lock()  # guards the next one, and `_requests`
        self._is_lost = False

    def send(self, **message: Any) -> None:
        with contextlib.suppress(OSError):  # the watcher notices
            self._send(message)

    def request(self, timeout_s: float, **message: Any) -> dict[str, Any]:
        number, answer = next(self._numbers), Future[dict[str, Any]]()
        with self._lock:
            if self._is_lost:
                raise TransferError(f"rank {self.number} is lost")
            self._requests[number] = answer
        self.send(id=number, **message)
        try:
            found = answer.result(timeout_s)
        except TimeoutError:
            raise TransferError(f"rank {self.number} has not answered for {timeout_s:g} s") from None
        finally:
            with self._lock:
                self._requests.pop(number, None)
        if "error" in found:
            raise TransferError(str(found["error"]))
        return found

    def handle(self, message: Mapping[str, Any]) -> None:
        """Handle a message of the rank about its pool. Raises whatever a malformed message causes."""
        if "answers" not in message:
            self.pool.handle(message)
            return
        with self._lock:
            answer = self._requests.get(message["answers"])
        if answer is not None and not answer.done():
            answer.set_result(dict(message))

    def lost(self) -> None:
        """Fail everything that waits for an answer, since none will come."""
        with self._lock:
            self._is_lost = True
            requests = list(self._requests.values())
        for answer in requests:
            if not answer.done():
                answer.set_result({"error": f"rank {self.number} is lost"})
