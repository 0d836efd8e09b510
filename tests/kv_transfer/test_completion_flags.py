"""What is announced, and what the stores themselves say: they ring when they are over."""

from __future__ import annotations

import gc
import signal
import socket
import threading
import weakref
from multiprocessing.connection import wait
from typing import Any

import pytest
import torch

from baton.errors import TransferError
from kv_transfer import staging_for
from kv_transfer.async_operation import RemoteSlot
from kv_transfer.transport import Arrived, Failed, PeerDisconnected, Sent
from kv_transfer.transports.carriers import ipc
from kv_transfer.transports.carriers.completion_flags import NO_FLAG, CompletionFlags, HostFlagWriter
from kv_transfer.transports.carriers.ipc import IpcCarrier, IpcTransport
from kv_transfer.transports.host_memory import REGION_BYTES
from kv_transfer.transports.pair.channel import Channel, Frame, Kind
from kv_transfer.transports.pair.ends import Grant
from kv_transfer.transports.pair.grants import GrantTable
from tests.kv_transfer.granted import LATE, OLD, STORED, granted_pair
from tests.kv_transfer.rig import Rig
from tests.kv_transfer.rig_node import DEADLINE_S, arrived, header_of

SLOT_BYTES = 4096


def heard_all(sender: Any, receiver: Any, tag: int) -> None:
    """A part whose slots are new goes the usual way, behind all that the sender has said so far; nothing else ends."""
    source, target = sender.call("fill", OLD), receiver.call("fill", 0)
    sender.call("push", receiver.name, tag, source)
    receiver.call("post", sender.name, tag, target)
    assert receiver.call("wait", 1) == [arrived(sender.name, tag, target)]
    assert sender.call("wait", 1) == [Sent(receiver.name, tag, source)]
    assert receiver.call("pending_events") == sender.call("pending_events") == []


def test_the_bell_is_enough_for_a_part_to_arrive(ipc_rig: Rig) -> None:
    sender, receiver, source, target = granted_pair(ipc_rig)
    assert sender.call("told", "flags=True")
    sender.call("push_early", receiver.name, 1, source)
    heard_all(sender, receiver, 2)
    sender.call("signal")
    assert receiver.call("wait", 1) == [arrived(sender.name, 1, target)]
    assert receiver.call("values", target) == {STORED}
    assert sender.call("pending_events") == []
    sender.call("end_stores")
    assert sender.call("wait", 1) == [Sent(receiver.name, 1, source)]
    heard_all(sender, receiver, 3)


def test_a_part_that_has_rung_arrives_only_with_its_header(ipc_rig: Rig) -> None:
    sender, receiver, source, target = granted_pair(ipc_rig)
    sender.call("signal")
    heard_all(sender, receiver, 2)
    sender.call("push_early", receiver.name, 1, source)
    assert receiver.call("wait", 1) == [arrived(sender.name, 1, target)]
    sender.call("end_stores")
    assert sender.call("wait", 1) == [Sent(receiver.name, 1, source)]


def test_a_part_that_is_announced_and_has_rung_is_there_before_it_is_pushed(ipc_rig: Rig) -> None:
    sender, receiver, source, target = granted_pair(ipc_rig)
    sender.call("announce", 1)
    heard_all(sender, receiver, 2)
    sender.call("signal")
    assert receiver.call("wait", 1) == [arrived(sender.name, 1, target)]
    assert receiver.call("values", target) == {STORED}
    sender.call("push", receiver.name, 1, source)
    assert sender.call("wait", 1) == [Sent(receiver.name, 1, source)]
    heard_all(sender, receiver, 3)


def test_a_peer_whose_memory_cannot_be_mapped_leaves_no_writer_of_its_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU's flags stay registered with the driver until they are closed."""
    open_writers = []

    class Writer(HostFlagWriter):
        def __init__(self, region: bytes) -> None:
            super().__init__(region)
            open_writers.append(self)

        def close(self) -> None:
            open_writers.remove(self)

    monkeypatch.setattr(ipc, "HostFlagWriter", Writer)
    carrier = IpcCarrier(staging := staging_for("ipc", 1, SLOT_BYTES, "cpu"))
    place = bytearray(carrier.memory)
    place[-REGION_BYTES + 16] ^= 1  # the inode of the slot's region, behind the flags' one
    for _ in range(2):
        with pytest.raises(TransferError, match="another file"):
            carrier.sending("peer", bytes(place), lambda note: None)
    assert open_writers == []
    carrier.sending("peer", carrier.memory, lambda note: None).close()
    assert open_writers == []
    del staging  # which has the memory that is mapped


@pytest.mark.parametrize("is_cut", [False, True])
def test_nothing_is_announced_behind_the_last_words_of_a_link(is_cut: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        said, heard = Channel(socket.create_connection(server.getsockname())), Channel(server.accept()[0])
    grant_table, grant = (
        GrantTable(),
        Grant(SLOT_BYTES, b"", RemoteSlot(torch.empty(SLOT_BYTES, dtype=torch.uint8)), said),
    )
    grant_table.put("peer", 1, grant)
    target = grant_table.acquire_remote_slot("peer", 1, 10, 0.0)
    assert target is not None
    if is_cut:
        assert grant_table.cut("peer", {1: grant}) == {1: grant}
    target.announce(b"header")
    said.close()
    frames: list[Frame] = []
    while not heard.lost:
        assert wait([heard], DEADLINE_S)  # type: ignore[list-item]
        frames += heard.receive()
    heard.close()
    assert frames == [Frame(Kind.BEGIN, 1, 10, b"header")] * (not is_cut)


@pytest.mark.parametrize("who", ["sender", "receiver"])
def test_what_is_announced_when_it_has_been_cut_off_is_not_heard(ipc_rig: Rig, who: str) -> None:
    ipc_rig.cuts = True
    sender, receiver, source, target = granted_pair(ipc_rig)
    (receiver if who == "receiver" else sender).call("disconnect", (sender if who == "receiver" else receiver).name)
    assert isinstance(receiver.call("wait", 1)[0], Failed)
    lost = receiver if who == "sender" else sender
    assert isinstance(lost.call("wait", 1)[0], PeerDisconnected)
    sender.call("announce", 1)
    ipc_rig.link(sender, receiver)
    sender.call("push", receiver.name, 1, source)
    assert isinstance(sender.call("wait", 1)[0], Failed)
    receiver.call("post", sender.name, 2, target)
    arrives_when_it_rings(sender, receiver, source, target)
    sender.call("end_stores")
    receiver.call("wait_for_old_memory")


def test_what_a_peer_said_before_it_died_counts_whichever_of_its_connections_ends_first() -> None:
    stagings = [staging_for("ipc", 1, SLOT_BYTES, "cpu") for _ in range(2)]
    woken = threading.Event()
    here, there = (
        IpcTransport(staging, wake) for staging, wake in zip(stagings, (woken.set, lambda: None), strict=True)
    )
    for one, other, name in ((here, there, "there"), (there, here, "here")):
        one.connect(name, other.info())
    slots = []
    for staging in stagings:
        slot = staging.take()
        assert slot is not None
        staging.lend(slot)
        slots.append(slot)
    here.expect("there", 1, slots[0], SLOT_BYTES)
    while (placed := there.acquire_remote_slot("here", 1, SLOT_BYTES)) is None:
        pass
    goes_on = threading.Event()

    def hear_of_the_end() -> None:
        assert goes_on.wait(DEADLINE_S)
        links = here._pair._links
        outward = links._links["there"].out
        assert outward is not None
        links._lose(outward)

    here._pair.call(hear_of_the_end)
    placed.memory.fill_(STORED)
    placed.announce(header_of(1))
    placed.signal(None)
    goes_on.set()
    events: list[object] = []
    while len(events) < 2:
        assert woken.wait(DEADLINE_S)
        woken.clear()
        events += here.poll()
    assert [type(event) for event in events] == [Arrived, PeerDisconnected]
    there.push("here", 1, slots[1], SLOT_BYTES, header_of(1))
    for transport in (there, here):
        transport.close()


def arrives_when_it_rings(sender: Any, receiver: Any, source: int, target: int) -> None:
    """Tag 2, which has been granted: stored and pushed it is not there yet."""
    while not sender.call("place", receiver.name, 2, LATE):
        pass
    sender.call("push_early", receiver.name, 2, source)
    heard_all(sender, receiver, 3)
    sender.call("signal")
    assert receiver.call("wait", 1) == [arrived(sender.name, 2, target)]


def test_what_rang_for_an_earlier_part_of_the_slot_says_nothing(ipc_rig: Rig) -> None:
    sender, receiver, source, target = granted_pair(ipc_rig)
    sender.call("signal")
    sender.call("push", receiver.name, 1, source)
    assert receiver.call("wait", 1) == [arrived(sender.name, 1, target)]
    assert sender.call("wait", 1) == [Sent(receiver.name, 1, source)]
    receiver.call("post", sender.name, 2, target)
    arrives_when_it_rings(sender, receiver, source, target)
    sender.call("end_stores")


@pytest.mark.parametrize("who", ["sender", "receiver"])
def test_what_rings_when_it_has_been_cut_off_is_not_heard(ipc_rig: Rig, who: str) -> None:
    ipc_rig.cuts = True
    sender, receiver, source, target = granted_pair(ipc_rig)
    sender.call("push_early", receiver.name, 1, source)
    (receiver if who == "receiver" else sender).call("disconnect", (sender if who == "receiver" else receiver).name)
    assert isinstance(receiver.call("wait", 1)[0], Failed)
    lost = receiver if who == "sender" else sender
    assert isinstance(lost.call("wait", 1)[0], PeerDisconnected)
    ipc_rig.link(sender, receiver)
    assert sender.call("told", "no completion flags") == []
    receiver.call("post", sender.name, 2, target)  # the same slot, with other memory and another word
    sender.call("signal")
    sender.call("end_stores")
    assert isinstance(sender.call("wait", 1)[0], Failed)
    arrives_when_it_rings(sender, receiver, source, target)
    sender.call("end_stores")  # or the sender ends with its flags registered, which the next test's is to be
    receiver.call("wait_for_old_memory")


def test_what_has_rung_and_is_never_pushed_does_not_arrive(ipc_rig: Rig) -> None:
    ipc_rig.cuts = True
    sender, receiver, source, _ = granted_pair(ipc_rig)
    sender.call("signal")
    sender.call("disconnect", receiver.name)
    assert [type(event) for event in receiver.call("wait", 2)] == [Failed, PeerDisconnected]
    sender.call("push", receiver.name, 1, source)
    assert isinstance(sender.call("wait", 1)[0], Failed)
    receiver.call("wait_for_old_memory")


@pytest.mark.parametrize("signals", [True, False])
def test_of_a_sender_that_dies_what_rang_has_arrived(ipc_rig: Rig, signals: bool) -> None:
    """All of it is there, and its header; that the sender has not lived to say so, END, makes no difference to it."""
    sender, receiver, source, target = granted_pair(ipc_rig)
    assert sender.call("told", "no completion flags") == []
    address = receiver.call("info")
    receiver.signal(signal.SIGSTOP)
    sender.call("push_early", receiver.name, 1, source)
    sender.call("connect", receiver.name, address)  # it is; by the time of the answer BEGIN has gone
    if signals:
        sender.call("signal")
    sender.kill()
    receiver.signal(signal.SIGCONT)
    ended = receiver.call("wait", 2)
    assert [type(event) for event in ended] == [Arrived if signals else Failed, PeerDisconnected]
    if signals:
        assert ended[0] == arrived(sender.name, 1, target)
        assert receiver.call("values", target) == {STORED}
    receiver.call("wait_for_old_memory")


def test_a_bell_that_may_ring_yet_stays_mapped_when_its_carrier_closes() -> None:
    """A GPU's driver does not forget what was registered there."""
    staging = staging_for("ipc", 1, SLOT_BYTES, "cpu")
    carrier = IpcCarrier(staging)
    signals, rang = (carrier.sending("peer", carrier.memory, print) for _ in range(2))
    writers = [weakref.ref(next(iter(way._flag_writers.values()))) for way in (signals, rang)]
    rang.close()
    carrier.close()
    del signals, rang, carrier
    gc.collect()
    assert [flag_writer() is not None for flag_writer in writers] == [True, False]


def test_where_there_is_no_bell_parts_arrive_all_the_same() -> None:
    staging, flags = staging_for("ipc", 1, SLOT_BYTES, "cpu"), CompletionFlags(3)
    assert [flags.take() for _ in range(3)] == [1, 2, NO_FLAG]
    carrier = IpcCarrier(staging)
    place = bytearray(carrier.memory)
    assert carrier.sending("peer", bytes(place), print).has_flags
    place[16 + 16] ^= 1  # the inode of the words
    way = carrier.sending("peer", bytes(place), print)
    assert not way.has_flags
    target = way.reach(bytes(place), SLOT_BYTES, 1)
    target.memory.fill_(STORED)
    target.signal(None)
    assert int(staging.memory(0).min()) == STORED
    assert not carrier.is_signalled(staging.memory(0), 1)
