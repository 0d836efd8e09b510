"""Does to a rank's KV pool, slots and transport what a `RemotePool` on another host says; the other end of its wire."""

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
from kv_transfer.parts import CHECKSUM_BYTES, PartHeader
from kv_transfer.slices import Rows
from kv_transfer.slot_copies import SlotCopies
from kv_transfer.staging import Staging
from kv_transfer.transport import Arrived, Failed, OperationEvent, PeerDisconnected, Sent, Transport

_LAUNCH_S = 300.0
"""For the steps that came before; their own deadlines are shorter."""
AfterSteps = Callable[[Callable[[], None]], None]
Say = Callable[..., None]
"""Sends its keywords to the other end; on any thread."""
MakeLink = Callable[[int, int, Callable[[], None]], tuple[Staging, Transport]]
"""From the number of slots, their bytes, and what the transport calls when `poll` has something."""


class PoolServer:
    """pool_bytes: [num_blocks, block_bytes], uint8, of that layout. make_link: raises TransferError. after_steps: calls
    what it is given once the steps that came before it are launched, on the thread that launches them. fail: is called,
    on any thread, when a transport fails, without which the rank is of no use. `heard` is for one thread, which
    launches no steps, but whose current stream is theirs."""

    def __init__(
        self,
        pool_bytes: Tensor,
        layout: KvLayout,
        make_link: MakeLink,
        say: Say,
        after_steps: AfterSteps,
        fail: Callable[[Exception], None],
    ) -> None:
        self._pool, self._layout, self._make_link = pool_bytes, layout, make_link
        self._say, self._after_steps, self._fail = say, after_steps, fail
        self._links: dict[int, _Link] = {}

    def heard(self, said: Mapping[str, Any]) -> None:
        """Do it. Raises what comes of nonsense: the other end is a process of the same node."""
        match said["do"]:
            case "open":
                self._answer(said, partial(self._open, said))
            case "connect":
                link = self._links[said["link"]]
                connect = partial(link.connect, said["peer"], bytes.fromhex(said["address"]), said["within_s"])
                threading.Thread(target=self._answer, args=(said, connect), name="kv-connect", daemon=True).start()
            case "warm_up":
                self._answer(said, partial(self._links[said["link"]].warm_up, said["rows"], said["gathers"]))
            case "close":
                self._answer(said, self._links[said["link"]].close)
            case _:
                self._links[said["link"]].do(said)

    def _answer(self, said: Mapping[str, Any], do: Callable[[], dict[str, Any] | None]) -> None:
        try:
            self._say(answers=said["id"], **(do() or {}))
        except TransferError as error:
            self._say(answers=said["id"], error=error.message)
        except ValueError as error:  # what does not fit, by its flags
            self._say(answers=said["id"], error=str(error))

    def _open(self, said: Mapping[str, Any]) -> dict[str, Any]:
        number, ready = said["link"], threading.Event()

        def wake() -> None:
            if ready.is_set():
                self._links[number].poll()

        staging, transport = self._make_link(said["num_slots"], said["slot_bytes"], wake)
        copies = SlotCopies(staging, self._pool, self._layout, said["part_blocks"], spin_wait=True)
        say = partial(self._say, link=number)
        self._links[number] = _Link(staging, transport, copies, say, self._after_steps, self._fail)
        ready.set()
        self._links[number].poll()
        return {"address": transport.info().hex()}


class _Link:
    """The slots of one direction. All of them are held, unless the transport has them: the other end knows more."""

    def __init__(
        self,
        staging: Staging,
        transport: Transport,
        copies: SlotCopies,
        say: Say,
        after_steps: AfterSteps,
        fail: Callable[[Exception], None],
    ) -> None:
        self._staging, self._transport, self._copies = staging, transport, copies
        self._say, self._after_steps, self._fail = say, after_steps, fail
        self._marks: dict[int, Future[Mark]] = {}  # by slot
        self._states = threading.Lock()
        self._links = threading.Lock()  # guards the next two
        self._connecting: dict[str, int] = {}  # by peer: calls under way
        self._unwanted: set[str] = set()  # peers to be disconnected when these are over
        while staging.take() is not None:
            pass
        transport.subscribe(self._operations_ended)

    def do(self, said: Mapping[str, Any]) -> None:
        match said["do"]:
            case "gather":
                self._copies.gather(said["slot"], said["ids"], _rows(said["rows"]), said["checksums_at"])
            case "scatter":
                slot = said["slot"]
                mark = self._marks[slot].result(_LAUNCH_S)
                self._copies.scatter(slot, said["ids"], _rows(said["rows"]), mark)()
                self._copies.make_stream_wait(slot)
            case "push":
                self._copies.when_done(said["slot"], partial(self._push, said))
            case "expect":
                # A step that came before may use the blocks of the slot's part, also one that is not launched yet.
                marked = self._marks[said["slot"]] = Future[Mark]()
                self._after_steps(lambda: marked.set_result(self._copies.mark()))
                self._copies.when_done(said["slot"], partial(self._expect, said))
            case "disconnect":
                self._disconnect(said["peer"])
            case other:
                raise ValueError(f"{other!r} cannot be done to a KV pool")

    def warm_up(self, kinds: list[list[Any]], gathers: bool) -> None:
        self._copies.warm_up(map(_rows, kinds), gathers)

    def connect(self, peer: str, address: bytes, timeout_s: float) -> None:
        """Raises TransferError."""
        with self._links:
            self._connecting[peer] = self._connecting.get(peer, 0) + 1
            self._unwanted.discard(peer)
        try:
            self._transport.connect(peer, address, timeout_s)
            self._say(event="connected", peer=peer)
        finally:
            with self._links:
                self._connecting[peer] -= 1
                is_unwanted = not self._connecting[peer] and peer in self._unwanted
                if not self._connecting[peer]:
                    del self._connecting[peer]
                    self._unwanted.discard(peer)
            if is_unwanted:
                self._transport.disconnect(peer)

    def close(self) -> None:
        self._transport.close()

    def poll(self) -> None:
        """Pass on who is gone. On any thread."""
        try:
            for event in self._transport.poll():
                assert isinstance(event, PeerDisconnected)
                self._say(event="disconnected", peer=event.peer, reason=event.reason)
        except RuntimeError as error:  # the transport has failed
            self._fail(error)

    def _disconnect(self, peer: str) -> None:
        with self._links:
            if peer in self._connecting:
                self._unwanted.add(peer)
                return
        self._transport.disconnect(peer)

    def _push(self, said: Mapping[str, Any]) -> None:
        with self._states:
            self._staging.lend(said["slot"])
        header = bytes.fromhex(said["header"])
        self._transport.push(said["peer"], said["tag"], said["slot"], said["num_bytes"], header)

    def _expect(self, said: Mapping[str, Any]) -> None:
        with self._states:
            self._staging.lend(said["slot"])
        self._transport.expect(said["peer"], said["tag"], said["slot"], said["num_bytes"])

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
                self._say(event="sent", **named)
            case Arrived(_, _, slot, header):
                self._say(event="arrived", header=header.hex(), num_damaged=self._num_damaged(slot, header), **named)
            case Failed(_, _, _, reason):
                self._say(event="failed", reason=reason, **named)

    def _num_damaged(self, slot: int, data: bytes) -> int:
        """Of the pieces in the slot, before anybody asks; none of a part that will be refused for its header."""
        try:
            header = PartHeader.parse(data)
        except TransferError:
            return 0
        fits = header.message_bytes <= self._staging.slot_bytes and not header.piece_bytes % CHECKSUM_BYTES
        if not header.checked or not header.num_pieces or not fits:
            return 0
        with self._copies.on_device():
            return self._copies.num_damaged(slot, header)


def _rows(said: list[Any]) -> Rows:
    rows = Rows(*said)
    return rows._replace(runs=tuple(range(start, stop) for start, stop in rows.runs))
