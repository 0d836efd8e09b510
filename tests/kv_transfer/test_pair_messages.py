"""The messages of one link and its grants, without a thread: what is offered, cut off and reported, and how often."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from multiprocessing.connection import wait

import pytest
import torch
from torch import Tensor

from baton.errors import TransferError
from kv_transfer.async_operation import DONE, AsyncOperation, RemoteSlot
from kv_transfer.staging import Staging
from kv_transfer.transport import Arrived, Failed, Sent, TransportEvent
from kv_transfer.transports.mailbox import Mailbox
from kv_transfer.transports.pair import ends, messages
from kv_transfer.transports.pair.address import PairAddress
from kv_transfer.transports.pair.carrier import OneSidedReceiving
from kv_transfer.transports.pair.channel import Channel, Frame, Kind
from kv_transfer.transports.pair.ends import Expect, Grant, Inbound, Link, Outbound, Push
from kv_transfer.transports.pair.grants import GrantTable
from kv_transfer.transports.pair.messages import Messages
from tests.kv_transfer.rig_node import DEADLINE_S

SLOT_BYTES = 64
THEIRS = PairAddress("a" * 32, "test", "1", "boot", (), 1)


class Operation:
    def __init__(self) -> None:
        self.error = ""
        self.is_over = False

    def query(self) -> bool:
        return self.is_over


class FakeSending:
    """Kernels can reach the peer's slots if `reaches`."""

    def __init__(self, reaches: bool) -> None:
        self.reaches = reaches
        self.sent: list[Operation] = []

    def send(self, memory: Tensor, num_bytes: int, place: bytes) -> AsyncOperation:
        self.sent.append(Operation())
        return self.sent[-1]

    def reach(self, place: bytes, num_bytes: int, tag: int) -> RemoteSlot | None:
        return RemoteSlot(torch.empty(num_bytes, dtype=torch.uint8)) if self.reaches else None

    def abort(self) -> None: ...

    def close(self) -> None: ...


class FakeReceiving(OneSidedReceiving):
    def export_slot(self, memory: Tensor) -> bytes:
        return b"place"


class FakeTwoSidedReceiving(FakeReceiving):
    def __init__(self) -> None:
        self.native = Operation()

    def begin(self, memory: Tensor, num_bytes: int) -> AsyncOperation | None:
        return self.native


def connection() -> tuple[Channel, Channel]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return Channel(socket.create_connection(server.getsockname())), Channel(server.accept()[0])


class Scene:
    """A link with both of its connections, and what the peer hears on the one for pushes."""

    def __init__(self, reaches: bool = True) -> None:
        (said, self.heard), (inward, self.granted) = connection(), connection()
        self.staging = Staging(4, SLOT_BYTES, "cpu")
        for _ in range(4):
            self.staging.lend(self.staging.take() or 0)
        self.events: list[TransportEvent] = []
        self.mailbox = Mailbox()
        self.messages = Messages(self.staging, self.mailbox, self.events.append)
        self.sending = FakeSending(reaches)
        self.out = Outbound(said, self.sending)
        self.inward = Inbound(inward, FakeReceiving(), THEIRS.id)
        self.link = Link("peer", b"", THEIRS, out=self.out, inward=self.inward)

    def grant(self, tag: int, num_bytes: int = SLOT_BYTES) -> None:
        self.messages.take_grant(self.link, self.out, Frame(Kind.GRANT, tag, num_bytes, b"place"))

    def acquire(self, tag: int, num_bytes: int = SLOT_BYTES) -> RemoteSlot | None:
        return self.messages.acquire_remote_slot("peer", tag, num_bytes)

    def push(self, tag: int, storing: AsyncOperation = DONE) -> None:
        push = Push(tag, tag, SLOT_BYTES, b"header", storing)
        if not self.messages.push_cut("peer", push):
            self.messages.submit(self.link, push)

    def cut(self) -> None:
        self.messages.cut(self.link)
        self.messages.fail(self.link, "gone")

    def said(self) -> list[tuple[Kind, int]]:
        """All that the peer has heard, and hears ever."""
        self.out.channel.hang_up()
        frames: list[Frame] = []
        while not self.heard.lost:
            assert wait([self.heard], DEADLINE_S)  # type: ignore[list-item]
            frames += self.heard.receive()
        return [(frame.kind, frame.tag) for frame in frames]

    def close(self) -> None:
        for channel in (self.out.channel, self.heard, self.inward.channel, self.granted):
            channel.close()


@pytest.fixture
def scene() -> Iterator[Scene]:
    made = Scene()
    yield made
    made.close()


# ---- grants ----


def test_a_granted_slot_is_acquired_once_and_by_what_fits(scene: Scene) -> None:
    scene.grant(1)
    assert scene.acquire(1, SLOT_BYTES + 1) is None
    assert scene.acquire(2) is None
    assert scene.acquire(1) is not None
    assert scene.acquire(1) is None


def test_a_slot_whose_message_is_under_way_is_not_offered_any_more(scene: Scene) -> None:
    """Stores there would land behind it, in memory that the peer uses for something else by then."""
    scene.grant(1)
    scene.push(1)
    assert scene.acquire(1) is None
    assert len(scene.sending.sent) == 1


def test_a_slot_of_a_link_that_is_gone_is_not_offered_any_more(scene: Scene) -> None:
    scene.grant(1)
    scene.cut()
    assert scene.acquire(1) is None
    assert scene.said() == []  # nobody stores there
    assert scene.out.is_over
    assert not scene.messages.push_cut("peer", Push(1, 1, SLOT_BYTES, b""))


def test_a_slot_that_is_stored_to_when_its_link_goes_is_told_of_and_waited_for(scene: Scene) -> None:
    storing = Operation()
    scene.grant(1)
    assert scene.acquire(1) is not None
    scene.cut()
    assert not scene.out.is_over
    scene.push(1, storing)
    assert not scene.out.is_over
    scene.messages.report_failed()
    assert scene.events == []
    storing.is_over = True
    assert scene.out.is_over
    for _ in range(2):
        scene.messages.report_failed()
    assert [(type(event), event.slot) for event in scene.events if isinstance(event, Failed)] == [(Failed, 1)]
    assert len(scene.events) == 1
    assert scene.said() == [(Kind.STRAY, 1)]
    assert not scene.messages.push_cut("peer", Push(1, 1, SLOT_BYTES, b""))  # the tag of a later link


def test_who_waits_for_a_grant_is_woken_by_it() -> None:
    grant_table, given = GrantTable(), threading.Event()

    def acquire() -> None:
        if grant_table.acquire_remote_slot("peer", 1, SLOT_BYTES, 60.0) is not None:
            given.set()

    thread = threading.Thread(target=acquire, daemon=True)
    thread.start()
    while thread.is_alive() and not grant_table._changed._waiters:  # type: ignore[attr-defined]
        pass
    target = RemoteSlot(torch.empty(SLOT_BYTES, dtype=torch.uint8))
    with socket.socket() as unused:
        grant_table.put("peer", 1, Grant(SLOT_BYTES, b"", target, Channel(unused)))
        assert given.wait(10)
        thread.join()


@pytest.mark.parametrize("tags", [[1, 1], [1, 2, 3]])
def test_a_peer_grants_each_tag_once_and_not_too_many(
    scene: Scene, tags: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A grant in another's place would hide that its slot is still stored to."""
    monkeypatch.setattr(messages, "_MOST_GRANTS", 2)
    *well, last = tags
    for tag in well:
        scene.grant(tag)
    with pytest.raises(TransferError, match="grants more than there can be"):
        scene.grant(last)


# ---- pushed ----


def test_stores_that_failed_are_not_told_as_a_message_that_is_there(scene: Scene) -> None:
    storing = Operation()
    storing.is_over, storing.error = True, "the device failed"
    scene.grant(1)
    assert scene.acquire(1) is not None
    scene.push(1, storing)
    with pytest.raises(TransferError, match="the device failed"):
        scene.messages.collect(scene.link)
    scene.cut()
    assert scene.events == [Failed("peer", 1, 1, "gone")]
    assert (Kind.END, 1) not in scene.said()


@pytest.mark.parametrize("error", ["", "the device failed"])
def test_of_what_is_over_when_a_link_is_cut_the_whole_is_sent(error: str) -> None:
    scene = Scene(reaches=False)
    for tag in (1, 2):
        scene.grant(tag)
        scene.push(tag)
    over, under_way = scene.sending.sent
    over.is_over, over.error = True, error
    memory = [scene.staging.memory(slot).data_ptr() for slot in (1, 2)]
    scene.cut()
    ended = Failed("peer", 1, 1, "gone") if error else Sent("peer", 1, 1)
    assert scene.events == [ended, Failed("peer", 2, 2, "gone")]
    assert scene.staging.memory(2).data_ptr() != memory[1]  # the old memory is read yet
    assert not scene.out.is_over
    under_way.is_over = True
    assert scene.out.is_over
    scene.close()


def test_a_message_longer_than_its_slot_is_not_sent_and_ends_once() -> None:
    scene = Scene(reaches=False)
    scene.grant(1, SLOT_BYTES - 1)
    scene.push(1)
    scene.cut()
    assert scene.events == [Sent("peer", 1, 1)]
    assert scene.sending.sent == []
    assert scene.said() == [(Kind.LONG, 1)]
    scene.close()


def test_what_is_cut_off_fails_at_once_when_the_thread_is_over(scene: Scene) -> None:
    scene.grant(1)
    assert scene.acquire(1) is not None
    scene.cut()
    scene.mailbox.close()
    scene.push(1, Operation())
    assert [type(event) for event in scene.events] == [Failed]


def test_a_tag_is_used_once_in_each_direction(scene: Scene) -> None:
    for _ in range(2):
        scene.messages.submit(scene.link, Push(1, 1, SLOT_BYTES, b""))
        scene.messages.submit(scene.link, Expect(1, 2, SLOT_BYTES))
    assert scene.events == [Failed("peer", 1, slot, "the tag is in use") for slot in (1, 2)]


# ---- expected ----


@pytest.mark.parametrize(
    "said",
    [
        [Frame(Kind.BEGIN, 1, SLOT_BYTES + 1)],
        [Frame(Kind.BEGIN, 2, 1)],
        [Frame(Kind.LONG, 1, SLOT_BYTES)],
        [Frame(Kind.LONG, 2, SLOT_BYTES + 1)],
        [Frame(Kind.BEGIN, 1, 1), Frame(Kind.LONG, 1, SLOT_BYTES + 1)],
        [Frame(Kind.BEGIN, 1, 1), Frame(Kind.END, 1, SLOT_BYTES + 1)],
        [Frame(Kind.END, 1, 1)],
    ],
)
def test_what_no_peer_says_ends_no_receive_but_the_connection(scene: Scene, said: list[Frame]) -> None:
    scene.messages.submit(scene.link, Expect(1, 1, SLOT_BYTES))
    memory = scene.staging.memory(1).data_ptr()
    for frame in said:
        assert not scene.inward.channel.lost
        scene.messages.handle(scene.link, scene.inward, frame)
    assert scene.inward.channel.lost
    assert scene.events == []
    scene.cut()
    assert scene.events == [Failed("peer", 1, 1, "gone")]
    assert scene.staging.memory(1).data_ptr() != memory


def test_a_receive_ends_once(scene: Scene) -> None:
    for tag in (1, 2, 3):
        scene.messages.submit(scene.link, Expect(tag, tag, SLOT_BYTES))
    scene.messages.handle(scene.link, scene.inward, Frame(Kind.LONG, 1, SLOT_BYTES + 1))
    scene.messages.handle(scene.link, scene.inward, Frame(Kind.BEGIN, 2, SLOT_BYTES, b"header"))
    scene.messages.handle(scene.link, scene.inward, Frame(Kind.END, 2, SLOT_BYTES))
    scene.messages.handle(scene.link, scene.inward, Frame(Kind.END, 2, SLOT_BYTES))
    assert not scene.inward.channel.lost
    scene.cut()
    assert [(type(event), event.tag) for event in scene.events if not isinstance(event, Sent)] == [
        (Failed, 1),
        (Arrived, 2),
        (Failed, 3),
    ]


def test_what_this_end_receives_itself_arrives_when_that_is_over(scene: Scene) -> None:
    """Whatever the sender says of its own end."""
    receiving = scene.inward.receiving = FakeTwoSidedReceiving()
    scene.messages.submit(scene.link, Expect(1, 1, SLOT_BYTES))
    for kind in (Kind.BEGIN, Kind.END):
        scene.messages.handle(scene.link, scene.inward, Frame(kind, 1, SLOT_BYTES, b"header"))
        scene.messages.collect(scene.link)
    assert scene.events == []
    receiving.native.is_over = True
    scene.messages.collect(scene.link)
    assert scene.events == [Arrived("peer", 1, 1, b"header")]


def test_what_this_end_receives_itself_when_it_is_cut_off_is_waited_for(scene: Scene) -> None:
    receiving = scene.inward.receiving = FakeTwoSidedReceiving()
    for tag in (1, 2):
        scene.messages.submit(scene.link, Expect(tag, tag, SLOT_BYTES))
    scene.messages.handle(scene.link, scene.inward, Frame(Kind.BEGIN, 1, SLOT_BYTES))
    scene.cut()
    assert scene.events == [Failed("peer", tag, tag, "gone") for tag in (1, 2)]
    scene.inward.said_bye = True
    scene.inward.end()
    assert not scene.inward.is_over
    receiving.native.is_over = True
    assert scene.inward.is_over


# ---- memory of a peer that is gone ----


def test_memory_that_a_dead_peer_was_granted_is_used_again_only_after_a_while(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy on its GPU may outlive it."""
    monkeypatch.setattr(ends, "DEATH_S", 3600.0)
    inward, native = scene.inward, Operation()
    inward.has_granted = True
    assert not inward.is_over
    inward.end()
    assert not inward.is_over
    monkeypatch.setattr(ends, "DEATH_S", -1.0)
    inward.leaving = [native]
    assert not inward.is_over
    native.is_over = True
    assert inward.is_over


def test_memory_that_a_peer_was_granted_is_used_again_when_it_has_left(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ends, "DEATH_S", 3600.0)
    scene.inward.has_granted = scene.inward.said_bye = True
    assert not scene.inward.is_over
    scene.inward.end()
    assert scene.inward.is_over
