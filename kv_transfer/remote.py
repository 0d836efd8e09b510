"""The KV pool of another rank: its slots and transport are in the rank's process, the mover that decides about them is
here.

    KvSender or KvReceiver -> RemoteSlots, RemoteCopies, RemoteTransport ==wire==> PoolServer -> pool, slots, transport

The mover is the same as for a local pool, and keeps the states of all slots. Its operations on memory are sent over the
wire instead, in order with the steps of the same rank: so a gather or a scatter is done before a step that was sent
after it. Only `open_link`, `warm_up`, `connect` and `close` wait for the rank.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

from baton.errors import TransferError
from kv_transfer.async_operation import DONE, AsyncOperation, RemoteSlot
from kv_transfer.copies import Mark, Move
from kv_transfer.events import EventSource
from kv_transfer.parts import MAX_PIECES, Checksums, PartHeader
from kv_transfer.slices import Rows
from kv_transfer.slots import Slots
from kv_transfer.transport import CONNECT_S, Arrived, Failed, PeerDisconnected, Sent, TransportEvent

_OPEN_S = 90.0
_WARM_UP_S = 300.0
_CLOSE_S = 10.0
_MARGIN_S = 1.0
"""Extra time, so that the other process can answer that its own deadline has passed."""


class Wire(Protocol):
    """The connection to the process that has the pool. Messages keep their order. For any thread."""

    def send(self, **message: Any) -> None:
        """Send a message. Does nothing if the process is lost, since this process then ends as well."""

    def request(self, timeout_s: float, **message: Any) -> dict[str, Any]:
        """Send a message and wait for the answer. Raises TransferError with the error that the other process reports,
        or if it is lost or late."""


class RemoteLink(NamedTuple):
    """The `node.base.Link` of a pool in another process."""

    staging: RemoteSlots
    transport: RemoteTransport


class RemotePool:
    """Used in place of a pool's tensor. `handle` takes the messages of the pool's process, on one thread."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._numbers = itertools.count()
        self._links: dict[int, RemoteLink] = {}

    def open_link(self, num_slots: int, slot_bytes: int, part_blocks: int, wake: Callable[[], None]) -> RemoteLink:
        """Have slots and a transport made in the rank's process. Raises TransferError."""
        number = next(self._numbers)
        sizes = {"num_slots": num_slots, "slot_bytes": slot_bytes, "part_blocks": part_blocks}
        address = bytes.fromhex(self._wire.request(_OPEN_S, do="open", link=number, **sizes)["address"])
        copies = RemoteCopies(self._wire, number, part_blocks)
        link = RemoteLink(
            RemoteSlots(num_slots, slot_bytes, copies), RemoteTransport(self._wire, number, address, wake)
        )
        self._links[number] = link
        return link

    def handle(self, message: Mapping[str, Any]) -> None:
        """Handle an event of a transport. Raises LookupError, TypeError or ValueError for a malformed one."""
        staging, transport = self._links[message["link"]]
        if message["event"] == "connected":
            transport.handle_connected(message["peer"])
            return
        event = _event(message)
        if isinstance(event, Arrived):
            staging.copies.num_damaged_in[event.slot] = int(message["num_damaged"])
        transport.handle_event(event)


class RemoteSlots(Slots):
    """The states of slots whose memory is in another process."""

    def __init__(self, num_slots: int, slot_bytes: int, copies: RemoteCopies) -> None:
        super().__init__(num_slots, slot_bytes)
        self.copies = copies


class RemoteCopies:
    """Implements `Copies`. A copy counts as done when it is sent, since later messages are handled after it."""

    def __init__(self, wire: Wire, link: int, part_blocks: int) -> None:
        self.most_pieces = max(part_blocks, MAX_PIECES)
        self.num_damaged_in: dict[int, int] = {}
        """By slot: how many damaged pieces the pool's process has found."""
        self._wire, self._link = wire, link

    def mark(self) -> Mark:
        return None

    def gather(
        self, slot: int, ids: Sequence[int], rows: Rows, checksums: Checksums | None, placed: RemoteSlot | None = None
    ) -> AsyncOperation:
        assert placed is None, "no slot of a peer is in reach"
        self._send("gather", slot, ids, rows, checksums=checksums)
        return DONE

    def scatter(self, slot: int, ids: Sequence[int], rows: Rows, not_before: Mark, in_advance: bool = False) -> Move:
        return partial(self._send, "scatter", slot, tuple(ids), rows)

    def on_device(self) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext()

    def make_stream_wait(self, slot: int) -> None:
        """Nothing to do: the rank's steps wait anyway."""

    def is_done(self, slot: int) -> bool:
        return True

    def when_done(self, slot: int, after: Callable[[], None]) -> None:
        after()

    def warm_up(self, kinds: Iterable[Rows], gathers: bool) -> None:
        """Raises TransferError."""
        flat = [_flat(rows) for rows in kinds]
        self._wire.request(_WARM_UP_S, do="warm_up", link=self._link, rows=flat, gathers=gathers)

    def num_damaged(self, slot: int, header: PartHeader) -> int:
        return self.num_damaged_in.get(slot, 0)

    def _send(self, what: str, slot: int, ids: Sequence[int], rows: Rows, **more: Any) -> None:
        self._wire.send(do=what, link=self._link, slot=slot, ids=list(ids), rows=_flat(rows), **more)


class RemoteTransport(EventSource):
    """Implements `Transport`."""

    def __init__(self, wire: Wire, link: int, address: bytes, wake: Callable[[], None]) -> None:
        super().__init__(wake)
        self._wire, self._link, self._address = wire, link, address
        self._closing = threading.Lock()
        self._is_closed = False
        self._holding = threading.Lock()  # guards the next two
        self._num_holds = 0
        self._receives: list[tuple[str, int, int, int]] = []  # to be sent

    def info(self) -> bytes:
        return self._address

    def connect(self, peer: str, address: bytes, timeout_s: float = CONNECT_S) -> None:
        fields = {"peer": peer, "address": address.hex(), "within_s": timeout_s}
        self._wire.request(timeout_s + _MARGIN_S, do="connect", link=self._link, **fields)

    def acquire_remote_slot(self, peer: str, tag: int, num_bytes: int) -> RemoteSlot | None:
        return None

    def push(
        self, peer: str, tag: int, slot: int, num_bytes: int, header: bytes, storing: AsyncOperation = DONE
    ) -> None:
        assert storing is DONE, "nothing was placed"
        fields = {"peer": peer, "tag": tag, "slot": slot, "num_bytes": num_bytes, "header": header.hex()}
        self._wire.send(do="push", link=self._link, **fields)

    def expect(self, peer: str, tag: int, slot: int, num_bytes: int) -> None:
        with self._holding:
            self._receives.append((peer, tag, slot, num_bytes))
        self._send_receives()

    @contextlib.contextmanager
    def batched(self) -> Iterator[None]:
        """Send the receives that are posted within the context as one message."""
        with self._holding:
            self._num_holds += 1
        try:
            yield
        finally:
            with self._holding:
                self._num_holds -= 1
            self._send_receives()

    def _send_receives(self) -> None:
        with self._holding:
            if self._num_holds or not self._receives:
                return
            receives, self._receives = self._receives, []
        self._wire.send(do="expect", link=self._link, receives=receives)

    def relax(self, relaxed: bool) -> None:
        self._wire.send(do="relax", link=self._link, relaxed=relaxed)

    def disconnect(self, peer: str) -> None:
        self._wire.send(do="disconnect", link=self._link, peer=peer)

    def close(self) -> None:
        with self._closing:
            closed, self._is_closed = self._is_closed, True
        if not closed:
            with contextlib.suppress(TransferError):  # the process is lost, and its transport with it
                self._wire.request(_CLOSE_S, do="close", link=self._link)

    def handle_connected(self, peer: str) -> None:
        """Drop earlier events: they belong to an earlier connection."""
        self._events.forget(peer)

    def handle_event(self, event: TransportEvent) -> None:
        self._events.put(event)
        self._events.deliver()


def _flat(rows: Rows) -> list[Any]:
    """Rows as a JSON list."""
    return [*(rows._asdict() | {"runs": [(run.start, run.stop) for run in rows.runs]}).values()]


def _event(message: Mapping[str, Any]) -> TransportEvent:
    match message["event"]:
        case "sent":
            return Sent(message["peer"], message["tag"], message["slot"])
        case "arrived":
            return Arrived(message["peer"], message["tag"], message["slot"], bytes.fromhex(message["header"]))
        case "failed":
            return Failed(message["peer"], message["tag"], message["slot"], message["reason"])
        case "disconnected":
            return PeerDisconnected(message["peer"], message["reason"])
        case other:
            raise ValueError(f"{other!r} is no event of a transport")
