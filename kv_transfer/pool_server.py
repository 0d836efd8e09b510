"""Operates a rank's KV pool, slots and transport for rank 0's `RemotePool`: the other end of its wire."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any

from torch import Tensor

from baton.errors import TransferError
from baton.layout import KvLayout
from kv_transfer.copies import Mark
from kv_transfer.parts import Checksums, PartHeader
from kv_transfer.slices import Rows
from kv_transfer.slot_copies import SlotCopies
from kv_transfer.staging import Staging
from kv_transfer.transport import Arrived, Failed, OperationEvent, PeerDisconnected, Sent, Transport

_LAUNCH_S = 300.0
"""How long to wait until earlier steps are launched; their own deadlines are shorter."""
AfterSteps = Callable[[Callable[[], None]], None]
Send = Callable[..., None]
"""Sends its keyword arguments to the other end; for any thread."""
MakeLink = Callable[[int, int, Callable[[], None]], tuple[Staging, Transport]]
"""Makes slots and a transport from the number of slots, their bytes, and what the transport calls when `poll` has
events."""


class PoolServer:
    """pool_bytes: [num_blocks, block_bytes], uint8, of that layout. make_link: raises TransferError. after_steps: calls
    its argument once all earlier steps are launched, on the thread that launches them. fail: called on any thread when
    a transport fails, since the rank is then of no use. `handle` is for one thread: the one that launches steps, or one
    that launches none but uses the same CUDA stream."""

    def __init__(
        self,
        pool_bytes: Tensor,
        layout: KvLayout,
        make_link: MakeLink,
        send: Send,
        after_steps: AfterSteps,
        fail: Callable[[Exception], None],
    ) -> None:
        self._pool, self._layout, self._make_link = pool_bytes, layout, make_link
        self._send, self._after_steps, self._fail = send, after_steps, fail
        self._links: dict[int, _Link] = {}

    def handle(self, message: Mapping[str, Any]) -> None:
        """Handle a message. A malformed one raises whatever it causes: the other end is a process of the same node."""
        match message["do"]:
            case "open":
                self._answer(message, partial(self._open, message))
            case "connect":
                link = self._links[message["link"]]
                link.begin_connect(message["peer"])  # here, so that a disconnect that comes next knows of the call
                connect = partial(link.connect, message["peer"], bytes.fromhex(message["address"]), message["within_s"])
                threading.Thread(target=self._answer, args=(message, connect), name="kv-connect", daemon=True).start()
            case "warm_up":
                self._answer(
                    message, partial(self._links[message["link"]].warm_up, message["rows"], message["gathers"])
                )
            case "close":
                self._answer(message, self._links[message["link"]].close)
            case _:
                self._links[message["link"]].handle(message)

    def _answer(self, message: Mapping[str, Any], do: Callable[[], dict[str, Any] | None]) -> None:
        try:
            self._send(answers=message["id"], **(do() or {}))
        except TransferError as error:
            self._send(answers=message["id"], error=error.message)
        except ValueError as error:  # what does not fit, by its flags
            self._send(answers=message["id"], error=str(error))

    def _open(self, message: Mapping[str, Any]) -> dict[str, Any]:
        number, ready = message["link"], threading.Event()

        def wake() -> None:
            if ready.is_set():
                self._links[number].poll()

        staging, transport = self._make_link(message["num_slots"], message["slot_bytes"], wake)
        copies = SlotCopies(staging, self._pool, self._layout, message["part_blocks"], spin_wait=True)
        send = partial(self._send, link=number)
        self._links[number] = _Link(staging, transport, copies, send, self._after_steps, self._fail)
        ready.set()
        self._links[number].poll()
        return {"address": transport.info().hex()}


class _Link:
    """The slots of one direction. They are all held, unless the transport has them; the other end knows their
    states."""

    def __init__(
        self,
        staging: Staging,
        transport: Transport,
        copies: SlotCopies,
        send: Send,
        after_steps: AfterSteps,
        fail: Callable[[Exception], None],
    ) -> None:
        self._staging, self._transport, self._copies = staging, transport, copies
        self._send, self._after_steps, self._fail = send, after_steps, fail
        self._marks: dict[int, Future[Mark]] = {}  # by slot
        self._states = threading.Lock()
        self._links = threading.Lock()  # guards the next two
        self._connecting: dict[str, int] = {}  # by peer: calls under way
        self._unwanted: set[str] = set()  # peers to disconnect when these calls are over
        self._polling = threading.Lock()  # held until what was polled is sent
        while staging.take() is not None:
            pass
        transport.subscribe(self._operations_ended)

    def handle(self, message: Mapping[str, Any]) -> None:
        match message["do"]:
            case "gather":
                checksums = None if message["checksums"] is None else Checksums(*message["checksums"])
                self._copies.gather(message["slot"], message["ids"], _rows(message["rows"]), checksums)
            case "scatter":
                slot = message["slot"]
                mark = self._marks[slot].result(_LAUNCH_S)
                self._copies.scatter(slot, message["ids"], _rows(message["rows"]), mark)()
                self._copies.make_stream_wait(slot)
            case "push":
                self._copies.when_done(message["slot"], partial(self._push, message))
            case "expect":
                # An earlier step, even one that is not launched yet, may use the blocks of the slots' parts.
                marked = Future[Mark]()
                self._after_steps(lambda: marked.set_result(self._copies.mark()))
                with self._transport.batched():
                    for peer, tag, slot, num_bytes in message["receives"]:
                        self._marks[slot] = marked
                        self._post(peer, tag, slot, num_bytes)
            case "relax":
                self._transport.relax(message["relaxed"])
            case "disconnect":
                self._disconnect(message["peer"])
            case other:
                raise ValueError(f"{other!r} cannot be done to a KV pool")

    def warm_up(self, kinds: list[list[Any]], gathers: bool) -> None:
        self._copies.warm_up(map(_rows, kinds), gathers)

    def begin_connect(self, peer: str) -> None:
        """Note that one call of `connect` follows."""
        with self._polling, self._links:
            self._connecting[peer] = self._connecting.get(peer, 0) + 1
            self._unwanted.discard(peer)

    def connect(self, peer: str, address: bytes, timeout_s: float) -> None:
        """Raises TransferError."""
        try:
            self._transport.connect(peer, address, timeout_s)
            self._send(event="connected", peer=peer)
        finally:
            with self._links:
                self._connecting[peer] -= 1
                is_unwanted = not self._connecting[peer] and peer in self._unwanted
                if not self._connecting[peer]:
                    del self._connecting[peer]
                    self._unwanted.discard(peer)
                if is_unwanted:  # with the lock, so that it does not cut off a connection that begins now
                    self._transport.disconnect(peer)
            self.poll()

    def close(self) -> None:
        self._transport.close()

    def poll(self) -> None:
        """Report disconnected peers. On any thread. Does nothing while a peer is being connected, after which this is
        called again: the transport still knows then which losses were of earlier connections, and the other end could
        not tell."""
        try:
            with self._polling:
                if self._connecting:
                    return
                for event in self._transport.poll():
                    assert isinstance(event, PeerDisconnected)
                    self._send(event="disconnected", peer=event.peer, reason=event.reason)
        except RuntimeError as error:  # the transport has failed
            self._fail(error)

    def _disconnect(self, peer: str) -> None:
        with self._links:
            if peer in self._connecting:
                self._unwanted.add(peer)
                return
        self._transport.disconnect(peer)

    def _push(self, message: Mapping[str, Any]) -> None:
        with self._states:
            self._staging.lend(message["slot"])
        header = bytes.fromhex(message["header"])
        self._transport.push(message["peer"], message["tag"], message["slot"], message["num_bytes"], header)

    def _post(self, peer: str, tag: int, slot: int, num_bytes: int) -> None:
        """Post a receive when the slot's last copy is done. Mostly it is; then this happens at once, since the copies'
        thread would do it only after the batch."""
        expect = partial(self._expect, peer, tag, slot, num_bytes)
        if self._copies.is_done(slot):
            expect()
        else:
            self._copies.when_done(slot, expect)

    def _expect(self, peer: str, tag: int, slot: int, num_bytes: int) -> None:
        with self._states:
            self._staging.lend(slot)
        self._transport.expect(peer, tag, slot, num_bytes)

    def _operations_ended(self, events: list[OperationEvent]) -> None:
        try:
            for event in events:
                with self._states:
                    self._staging.reclaim(event.slot)
                self._pass_on(event)
        except Exception as error:  # noqa: BLE001 - the transport's thread has no use for it
            self._fail(error)

    def _pass_on(self, event: OperationEvent) -> None:
        named = {"peer": event.peer, "tag": event.tag, "slot": event.slot}
        match event:
            case Sent():
                self._send(event="sent", **named)
            case Arrived(_, _, slot, header):
                self._send(event="arrived", header=header.hex(), num_damaged=self._num_damaged(slot, header), **named)
            case Failed(_, _, _, reason):
                self._send(event="failed", reason=reason, **named)

    def _num_damaged(self, slot: int, data: bytes) -> int:
        """The number of damaged pieces in the slot, computed in advance; 0 for a part that will be refused because of
        its header."""
        try:
            header = PartHeader.parse(data)
        except TransferError:
            return 0
        if not header.checked or not header.num_pieces or header.message_bytes > self._staging.slot_bytes:
            return 0
        with self._copies.on_device():
            return self._copies.num_damaged(slot, header)


def _rows(flat: list[Any]) -> Rows:
    rows = Rows(*flat)
    return rows._replace(runs=tuple(range(start, stop) for start, stop in rows.runs))
