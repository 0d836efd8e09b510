"""In NCCL's place on a machine without GPUs: groups of two with its manners, over sockets.

Messages match by order alone, no tag and no length is looked at, a peer that is gone is never noticed, and what waits,
waits until `abort`. (Gloo would be nearer to NCCL, but what waits in it cannot be ended: its `abort` leaves it so.)
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import Store

from kv_transfer.transports.carriers.groups import GroupCarrier


class OrderedGroup:
    """A thread runs one operation after the other, as NCCL's stream does."""

    def __init__(self, store: Store, rank: int) -> None:
        if rank == 0:
            with socket.create_server(("127.0.0.1", 0)) as server:
                store.set("port", str(server.getsockname()[1]))
                self._socket, _ = server.accept()
        else:
            self._socket = socket.create_connection(("127.0.0.1", int(store.get("port"))))
        self._aborted = threading.Event()
        self._queue: SimpleQueue[tuple[Callable[[Any], None], Tensor, _Operation] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def send(self, memory: Tensor) -> _Operation:
        return self._submit(self._socket.sendall, memory)

    def receive(self, memory: Tensor) -> _Operation:
        return self._submit(self._receive_all, memory)

    def abort(self) -> None:
        self._aborted.set()
        self._queue.put(None)
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._socket.close()

    def _submit(self, verb: Callable[[Any], None], memory: Tensor) -> _Operation:
        operation = _Operation()
        self._queue.put((verb, memory, operation))
        return operation

    def _receive_all(self, view: memoryview) -> None:
        while view and (count := self._socket.recv_into(view)):
            view = view[count:]
        if view:
            raise OSError("end of stream")

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            verb, memory, operation = item
            try:
                array: Any = memory.numpy()
                verb(memoryview(array))
            except OSError:
                self._aborted.wait()
            operation.over.set()


class _Operation:
    def __init__(self) -> None:
        self.error = ""
        self.over = threading.Event()

    def query(self) -> bool:
        return self.over.is_set()


def ordered_carrier() -> GroupCarrier:
    return GroupCarrier("ordered", "1", torch.device("cpu"), OrderedGroup)
