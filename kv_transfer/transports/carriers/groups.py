"""A carrier over groups of two processes that send and receive in order and without tags, as NCCL does.

A connection (`pair/transport.py`) has one direction and a group of its own, joined when its first message is both
pushed and granted. The pusher announces messages over the connection (BEGIN) in the order in which it sends them, and
the receiver posts its receives in the order of these announcements, so both orders are the same. A receive is posted
only once its message is on the way, so nothing waits on the device for a push that may never come.

Joining and aborting a group may take long, so each lane does them on a thread of its own. A group whose peer was lost
is never used again; the next connection has another.
"""

from __future__ import annotations

import json
import logging
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._C._distributed_c10d import (
    PrefixStore,
    Store,
    TCPStore,
)  # torch.distributed does not declare these as exported

from baton.errors import TransferError
from kv_transfer.async_operation import AsyncOperation, RemoteSlot
from kv_transfer.transports.host import LOOPBACK, listen_on
from kv_transfer.transports.pair.carrier import Note

log = logging.getLogger(__name__)

JOIN_S = 30.0
_CLOSE_S = 5.0
_SENDER, _RECEIVER = 0, 1


class Group(Protocol):
    """This process and one other. `send` and `receive` do not block; they may raise anything."""

    def send(self, memory: Tensor) -> AsyncOperation: ...

    def receive(self, memory: Tensor) -> AsyncOperation: ...

    def abort(self) -> None:
        """End all operations, and the group. May block."""


MakeGroup = Callable[[Store, int], Group]
"""Joins the group that meets at that store, as that rank of two; waits for the other. May raise anything."""


class GroupCarrier:
    """Groups made by `make`, which meet at a store in the sender's process, on the address `host` (None: all)."""

    memory = b""

    def __init__(
        self, kind: str, version: str, device: torch.device, make: MakeGroup, host: str | None = LOOPBACK
    ) -> None:
        self.kind = kind
        self.version = version
        self.device = device
        self._host = host
        self._make = make
        self._lanes: list[Lane] = []
        self._closed: list[Lane] = []  # lanes that may still be aborting their groups

    def start(self, name: str) -> None:
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        self._store = _serve_store(self._host)

    def sending(self, peer: str, memory: bytes, note: Note) -> GroupSending:
        return GroupSending(self._lane(), note, self._store)

    def receiving(self, peer: str, host: str) -> GroupReceiving:
        return GroupReceiving(self._lane(), host)

    def progress(self) -> None:
        for lane in self._lanes:
            lane.advance()

    def close(self) -> None:
        for lane in list(self._lanes):
            lane.close()
        deadline = time.monotonic() + _CLOSE_S
        for lane in self._closed:
            lane.wait(max(0.0, deadline - time.monotonic()))
        del self._store

    def _lane(self) -> Lane:
        lane = Lane(self._make, self._forget)
        self._lanes.append(lane)
        return lane

    def _forget(self, lane: Lane) -> None:
        self._lanes.remove(lane)
        self._closed = [*(before for before in self._closed if before.is_ending), lane]


class Message:
    """A message in its lane's queue, as an `AsyncOperation`."""

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self.native: AsyncOperation | None = None
        self.error = ""

    def query(self) -> bool:
        if self.native is None:
            return bool(self.error)  # over if it could not begin
        if not self.native.query():
            return False
        self.error = self.native.error
        return True


class Lane:
    """The messages of one direction, in order, over a group that `join` joins. Transport's thread only."""

    def __init__(self, make: MakeGroup, forget: Callable[[Lane], None]) -> None:
        self._make = make
        self._forget = forget
        self._rank = _SENDER
        self._queue: deque[Message] = deque()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()  # guards the next three
        self._group: Group | None = None
        self._failure = ""
        self._aborted = False

    @property
    def is_joining(self) -> bool:
        """Whether `join` was called."""
        return self._thread is not None

    @property
    def is_ending(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def join(self, open_store: Callable[[], Store], rank: int) -> None:
        """Start to join the group with the other end."""
        self._rank = rank
        self._thread = threading.Thread(target=self._join, args=(open_store,), name="kv-group", daemon=True)
        self._thread.start()

    def submit(self, memory: Tensor) -> Message:
        message = Message(memory)
        self._queue.append(message)
        self.advance()
        return message

    def advance(self) -> None:
        """Pass the waiting messages to the group."""
        with self._lock:
            group, failure = self._group, self._failure
        while self._queue and (group is not None or failure):
            message = self._queue.popleft()
            if group is None or failure:
                message.error = failure
                continue
            try:
                message.native = (group.send if self._rank == _SENDER else group.receive)(message.memory)
            except Exception as error:  # noqa: BLE001 - any error of the library ends the connection
                message.error = failure = str(error) or type(error).__name__

    def abort(self) -> None:
        """Abort the group; messages that have not begun fail."""
        with self._lock:
            if self._aborted:
                return
            self._aborted = True
            self._failure = self._failure or "cut off"
            group, self._group = self._group, None
        self.advance()
        if group is not None:
            self._thread = threading.Thread(target=_abort, args=(group,), name="kv-group-end", daemon=True)
            self._thread.start()

    def close(self) -> None:
        self.abort()
        self._forget(self)

    def wait(self, timeout_s: float) -> None:
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _join(self, open_store: Callable[[], Store]) -> None:
        failure, group = "", None
        try:
            group = self._make(open_store(), self._rank)
        except Exception as error:  # noqa: BLE001 - any error of the library ends the connection
            failure = f"the group was not joined: {error}"
        with self._lock:
            if not self._aborted:
                self._group, self._failure = group, failure
                return
        if group is not None:
            _abort(group)


class GroupSending:
    def __init__(self, lane: Lane, note: Note, store: TCPStore) -> None:
        self._lane = lane
        self._note = note
        self._store = store

    def send(self, memory: Tensor, num_bytes: int, place: bytes) -> AsyncOperation:
        if not self._lane.is_joining:
            prefix = uuid.uuid4().hex
            self._note(json.dumps([self._store.port, prefix]).encode())
            self._lane.join(lambda: PrefixStore(prefix, self._store), _SENDER)
        return self._lane.submit(memory[:num_bytes])

    def reach(self, place: bytes, num_bytes: int, tag: int) -> RemoteSlot | None:
        return None

    def abort(self) -> None:
        self._lane.abort()

    def close(self) -> None:
        self._lane.close()


class GroupReceiving:
    def __init__(self, lane: Lane, host: str) -> None:
        self._lane = lane
        self._host = host

    def export_slot(self, memory: Tensor) -> bytes:
        return b""

    def begin(self, memory: Tensor, num_bytes: int) -> AsyncOperation | None:
        return self._lane.submit(memory[:num_bytes])

    def has_arrived(self, memory: Tensor, tag: int) -> bool:
        return False

    def handle_note(self, note: bytes) -> None:
        try:
            port, prefix = json.loads(note)
        except (ValueError, TypeError, RecursionError):
            raise TransferError("the peer does not say where its group meets") from None
        if self._lane.is_joining or type(port) is not int or not 0 < port <= 65535 or not isinstance(prefix, str):
            raise TransferError("the peer's group meets nowhere")
        self._lane.join(lambda: PrefixStore(prefix, _store(self._host, port)), _RECEIVER)

    def abort(self) -> None:
        self._lane.abort()

    def close(self) -> None:
        self._lane.close()


def _serve_store(host: str | None) -> TCPStore:
    """A store that listens on `host` (None: all); torch itself always listens on all. Raises TransferError."""
    listener = listen_on(host)
    port = listener.getsockname()[1]
    return _store(host or LOOPBACK, port, is_master=True, master_listen_fd=listener.detach())


def _store(host: str, port: int, **more: Any) -> TCPStore:
    try:
        return TCPStore(host, port, wait_for_workers=False, timeout=timedelta(seconds=JOIN_S), **more)
    except Exception as error:  # noqa: BLE001 - of many classes
        raise TransferError(f"no store at {host}:{port}: {error}") from None


def _abort(group: Group) -> None:
    try:
        group.abort()
    except Exception:  # the thread's boundary; the group is not used again either way
        log.exception("group did not end")
