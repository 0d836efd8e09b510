"""What a `PoolServer` does for a `RemotePool` when things go wrong. How bytes move: `test_ranks`."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch

from baton.errors import TransferError
from baton.layout import KvLayout, LayerKv
from kv_transfer.parts import PartHeader, slot_bytes_for
from kv_transfer.remote import RemoteLink
from kv_transfer.sender import KvSender, PartFailed
from kv_transfer.slot_copies import SlotCopies
from kv_transfer.staging import Staging
from kv_transfer.transport import Arrived, PeerDisconnected
from kv_transfer.transports.memory import MemoryHub, MemoryTransport
from tests.kv_transfer.wire import CallWire

NUM_BLOCKS, PART_BLOCKS, NUM_SLOTS = 4, 2, 2
LAYOUT = KvLayout((LayerKv(2, 2, 2, "float32"),), 2, "f")
SLOT_BYTES = slot_bytes_for(PART_BLOCKS, LAYOUT.block_bytes)
SOON_S = 10.0


class Slow(MemoryTransport):
    """Connects when it may."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.connects, self.may_connect = threading.Event(), threading.Event()
        self.may_connect.set()

    def connect(self, peer: str, address: bytes, timeout_s: float = 1.0) -> None:
        self.connects.set()
        assert self.may_connect.wait(SOON_S)
        super().connect(peer, address, timeout_s)


class Scene:
    """A sender whose pool, slots and transport are on another host, and a peer within reach."""

    def __init__(self) -> None:
        self.hub = MemoryHub()
        self.wakes = threading.Semaphore(0)
        self.pool = torch.arange(NUM_BLOCKS * LAYOUT.block_bytes, dtype=torch.uint8).view(NUM_BLOCKS, -1)
        self.wire = CallWire(self.pool, LAYOUT, self._make_link)
        self.link: RemoteLink = self.wire.pool.open_link(NUM_SLOTS, SLOT_BYTES, PART_BLOCKS, self.wakes.release)
        self.sender = KvSender(self.link.transport, self.link.staging, self.wire.pool, LAYOUT)
        self.peer = MemoryTransport(self.hub, "d", Staging(NUM_SLOTS, SLOT_BYTES, "cpu"), lambda: None)
        self.peer.connect("p", self.there.info())

    def _make_link(self, num_slots: int, slot_bytes: int, wake: Callable[[], None]) -> tuple[Staging, Slow]:
        if num_slots > NUM_SLOTS:
            raise ValueError("--kv-slots: lower them")
        staging = Staging(num_slots, slot_bytes, "cpu")
        self.there = Slow(self.hub, "p", staging, wake)
        return staging, self.there

    def connect(self) -> None:
        self.link.transport.connect("d", self.peer.info())


@pytest.fixture
def scene() -> Scene:
    return Scene()


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as pool:
        yield pool


def test_a_peer_that_dies_fails_its_parts_and_is_told_of_last(scene: Scene) -> None:
    scene.connect()
    assert scene.sender.send("d", 1, 0, [1, 2])
    assert scene.sender.send("d", 1, 1, [3])
    assert not scene.sender.send("d", 1, 2, [3]), "a slot is free"
    scene.hub.kill("d")
    assert scene.wakes.acquire(timeout=SOON_S)
    *failed, lost = scene.sender.poll()
    assert [type(event) for event in failed] == [PartFailed, PartFailed]
    assert isinstance(lost, PeerDisconnected)
    assert scene.sender.num_free_slots == NUM_SLOTS
    scene.sender.check_integrity()


def test_its_transport_may_be_late_as_well(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    relaxed = list[bool]()
    monkeypatch.setattr(scene.there, "relax", relaxed.append)
    scene.link.transport.relax(True)
    scene.link.transport.relax(False)
    assert relaxed == [True, False]


def test_receives_of_a_batch_are_one_message_and_one_batch_there(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    sent, there = list[tuple[str, int]](), list[object]()
    send = scene.wire.send

    def counted(**message: Any) -> None:
        sent.append((message["do"], len(message["receives"])))
        send(**message)

    @contextlib.contextmanager
    def batched() -> Iterator[None]:
        there.append("begins")
        yield
        there.append("ends")

    monkeypatch.setattr(scene.wire, "send", counted)
    monkeypatch.setattr(scene.there, "batched", batched)
    monkeypatch.setattr(scene.there, "expect", lambda peer, tag, *_: there.append((peer, tag)))
    with scene.link.transport.batched():
        for slot in range(2):
            scene.link.transport.expect("d", 7 + slot, slot, SLOT_BYTES)
        assert not sent
    assert sent == [("expect", 2)]
    assert there == ["begins", ("d", 7), ("d", 8), "ends"]
    with scene.link.transport.batched():
        pass
    assert len(sent) == 1


def test_receives_of_a_batch_wait_only_for_copies_under_way(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where another thread waits for a copy, and calls when the batch is over."""
    there, later = list[int | str](), list[Callable[[], None]]()

    @contextlib.contextmanager
    def batched() -> Iterator[None]:
        yield
        there.append("ends")

    monkeypatch.setattr(SlotCopies, "is_done", lambda _, slot: slot == 0)
    monkeypatch.setattr(SlotCopies, "when_done", lambda _, slot, after: later.append(after))
    monkeypatch.setattr(scene.there, "batched", batched)
    monkeypatch.setattr(scene.there, "expect", lambda peer, tag, slot, _: there.append(slot))
    with scene.link.transport.batched():
        for slot in range(2):
            scene.link.transport.expect("d", 7 + slot, slot, SLOT_BYTES)
    assert there == [0, "ends"]
    for call in later:
        call()
    assert there == [0, "ends", 1]


def test_kernels_are_compiled_there(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(SlotCopies, "warm_up", lambda _, kinds, gathers: seen.append((set(kinds), gathers)))
    scene.sender.warm_up()
    assert seen == [(scene.sender._usual_rows(), True)]


def test_a_copy_waits_for_what_was_queued_when_its_part_was_expected(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Earlier owners of its blocks may still be at work there, also in steps that are not launched yet."""
    marks, seen = ["b", "a"], []
    scene.wire.unlaunched = []

    def scatter(_: object, slot: int, ids: object, rows: object, not_before: str) -> Callable[[], None]:
        return lambda: seen.append((slot, not_before))

    monkeypatch.setattr(SlotCopies, "mark", lambda _: marks.pop())
    monkeypatch.setattr(SlotCopies, "scatter", scatter)
    scene.connect()
    for slot in (1, 0):
        scene.link.transport.expect("d", slot, slot, SLOT_BYTES)
    assert len(marks) == 2
    with ThreadPoolExecutor(1) as launching:
        launching.submit(lambda: [marked() for marked in scene.wire.unlaunched or ()])
        for slot in (0, 1):
            scene.link.staging.copies.scatter(slot, [2], scene.sender._usual_rows().pop(), None)()
    assert seen == [(0, "b"), (1, "a")]


def test_a_loss_that_was_told_late_is_not_that_of_a_new_connection(scene: Scene) -> None:
    scene.connect()
    scene.wire.pool.handle({"link": 0, "event": "disconnected", "peer": "d", "reason": "it is gone"})
    scene.connect()
    assert scene.link.transport.poll() == []
    scene.wire.pool.handle({"link": 0, "event": "disconnected", "peer": "d", "reason": "it is gone"})
    assert len(scene.link.transport.poll()) == 1


def test_a_peer_that_is_lost_as_soon_as_it_is_connected_is_told_of(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    def connect(*where: Any) -> None:
        MemoryTransport.connect(scene.there, *where)
        scene.hub.kill("d")

    monkeypatch.setattr(scene.there, "connect", connect)
    scene.connect()
    assert scene.wakes.acquire(timeout=SOON_S)
    (lost,) = scene.link.transport.poll()
    assert isinstance(lost, PeerDisconnected)


def test_a_slot_can_be_used_again_at_once(scene: Scene) -> None:
    scene.connect()
    for part in range(3 * NUM_SLOTS):
        scene.peer.expect("p", 1 << 23 | part, slot := scene.peer.staging.take(), SLOT_BYTES)  # type: ignore[arg-type]
        scene.peer.staging.lend(slot)  # type: ignore[arg-type]
        assert scene.sender.send("d", 1, part, [part % NUM_BLOCKS])
        scene.hub.deliver_all()
        assert len(scene.sender.poll()) == 1
        assert torch.equal(
            scene.peer.staging.memory(slot)[: LAYOUT.block_bytes],  # type: ignore[arg-type]
            scene.pool[part % NUM_BLOCKS],
        )
        scene.peer.poll()
        scene.peer.staging.reclaim(slot)  # type: ignore[arg-type]
        scene.peer.staging.give_back(slot)  # type: ignore[arg-type]


def test_why_a_peer_cannot_be_reached_is_told(scene: Scene) -> None:
    scene.hub.kill("d")
    with pytest.raises(TransferError, match="cannot be reached"):
        scene.connect()


def test_a_peer_that_is_cut_off_while_it_is_being_connected_is_not_connected(
    scene: Scene, pool: ThreadPoolExecutor
) -> None:
    scene.there.may_connect.clear()
    connected = pool.submit(scene.connect)
    assert scene.there.connects.wait(SOON_S)
    scene.link.transport.disconnect("d")
    scene.there.may_connect.set()
    connected.result(SOON_S)
    assert not scene.there.links


def test_a_peer_that_is_wanted_again_meanwhile_is_connected(scene: Scene, pool: ThreadPoolExecutor) -> None:
    scene.there.may_connect.clear()
    connected = pool.submit(scene.connect)
    assert scene.there.connects.wait(SOON_S)
    scene.there.connects.clear()
    scene.link.transport.disconnect("d")
    with ThreadPoolExecutor(1) as other:
        again = other.submit(scene.connect)
        assert scene.there.connects.wait(SOON_S)
        scene.there.may_connect.set()
        connected.result(SOON_S)
        again.result(SOON_S)
    assert scene.there.links


def test_a_peer_that_is_cut_off_before_its_connecting_has_begun_is_not_connected(
    scene: Scene, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call is made on a thread of its own, which may start late."""
    asked, start = threading.Event(), threading.Thread.start
    late: list[threading.Thread] = []

    def start_late(thread: threading.Thread) -> None:
        if thread.name == "kv-connect":
            late.append(thread)
            asked.set()
        else:
            start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_late)
    connected = pool.submit(scene.connect)
    assert asked.wait(SOON_S)
    scene.link.transport.disconnect("d")
    start(late[0])
    connected.result(SOON_S)
    late[0].join(SOON_S)
    assert not scene.there.links


def test_a_late_disconnect_does_not_cut_off_a_new_connection(
    scene: Scene, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene.there.may_connect.clear()
    first = pool.submit(scene.connect)
    assert scene.there.connects.wait(SOON_S)
    scene.there.connects.clear()
    scene.link.transport.disconnect("d")
    disconnect = scene.there.disconnect
    with ThreadPoolExecutor(1) as other:
        again: list[Future[None]] = []

        def disconnect_late(peer: str) -> None:
            again.append(other.submit(scene.connect))
            if scene.there.connects.wait(0.2):  # it must not get so far before this is over
                again[0].result(SOON_S)
            disconnect(peer)

        monkeypatch.setattr(scene.there, "disconnect", disconnect_late)
        scene.there.may_connect.set()
        first.result(SOON_S)
        again[0].result(SOON_S)
    assert scene.there.links


def test_a_peer_that_is_connected_anew_was_not_lost(scene: Scene) -> None:
    scene.connect()
    scene.peer.disconnect("p")
    assert scene.wakes.acquire(timeout=SOON_S)
    scene.peer.connect("p", scene.there.info())
    scene.connect()
    assert scene.sender.poll() == []


def test_slots_that_do_not_fit_there_are_named_by_their_flags(scene: Scene) -> None:
    with pytest.raises(TransferError, match="--kv-slots: lower them"):
        scene.wire.pool.open_link(NUM_SLOTS + 1, SLOT_BYTES, PART_BLOCKS, lambda: None)


def test_a_transport_that_fails_ends_the_rank(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> list[Any]:
        raise RuntimeError("the transport failed")

    monkeypatch.setattr(scene.there, "poll", fails)
    scene.there.wake()
    assert [str(failure) for failure in scene.wire.failures] == ["the transport failed"]


def test_a_header_that_makes_no_sense_is_passed_on_for_its_part_to_be_refused(scene: Scene) -> None:
    """The rank computes checksums before anybody has looked at the header."""
    scene.connect()
    header = PartHeader(1, 0, 1, LAYOUT.whole, 5, 0, LAYOUT.digest(), checked=True).pack()
    for staging in (scene.link.staging, scene.peer.staging):
        slot = staging.take()
        assert slot == 0
        staging.lend(slot)
    scene.link.transport.expect("d", 7, 0, SLOT_BYTES)
    scene.peer.push("p", 7, 0, 40, header)
    scene.hub.deliver_all()
    assert scene.link.transport.poll() == [Arrived("d", 7, 0, header)]
    assert scene.wire.failures == []


def test_closing_ends_what_is_under_way(scene: Scene) -> None:
    scene.connect()
    assert scene.sender.send("d", 1, 0, [1])
    scene.link.transport.close()
    scene.link.transport.close()  # harmless
    (failed,) = scene.sender.poll()
    assert isinstance(failed, PartFailed)


@pytest.mark.parametrize(
    "message", [{"link": 9, "event": "sent"}, {"link": 0, "event": "lost"}, {"link": 0}, {"link": 0, "event": "sent"}]
)
def test_nonsense_is_no_event(scene: Scene, message: dict[str, Any]) -> None:
    with pytest.raises((LookupError, ValueError)):
        scene.wire.pool.handle(message)


@pytest.mark.parametrize("do", ["gather", "melt"])
def test_nonsense_is_not_done(scene: Scene, do: str) -> None:
    with pytest.raises((LookupError, ValueError)):
        scene.wire.send(do=do, link=0)
