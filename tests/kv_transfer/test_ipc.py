"""Slots that others map and store into: who may, until when, and what is refused."""

from __future__ import annotations

import gc
import os
import queue
import struct
from dataclasses import replace

import pytest
import torch

from baton.errors import TransferError
from kv_transfer import create, staging_for
from kv_transfer.staging import Staging
from kv_transfer.transport import Arrived, Failed, PeerDisconnected, Sent
from kv_transfer.transports.carriers.ipc import IpcTransport
from kv_transfer.transports.host_memory import CHUNK_BYTES, REGION_BYTES, HostMemory, shared_empty
from kv_transfer.transports.pair import thread
from kv_transfer.transports.pair.address import PairAddress
from kv_transfer.transports.pair.links import Links
from kv_transfer.transports.pair.poller import pause_s
from tests.kv_transfer.granted import LATE, OLD, STORED, granted_pair
from tests.kv_transfer.rig import Rig
from tests.kv_transfer.rig_node import arrived

SLOT_BYTES = 4096


# ---- host memory ----


def num_mapped() -> int:
    with open("/proc/self/maps") as maps:  # noqa: PTH123 - of no size
        return sum("memfd:baton-kv" in line for line in maps)


def test_what_one_maps_the_other_sees_and_nothing_is_left_of_it() -> None:
    gc.collect()  # what earlier tests left
    mapped, descriptors = num_mapped(), len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - counts itself either way
    memory, here = shared_empty(3 * SLOT_BYTES).view(3, SLOT_BYTES), HostMemory()
    region, offset = here.export(memory[2])
    there = here.open(region)
    there[offset : offset + SLOT_BYTES] = STORED
    assert memory.float().mean(1).tolist() == [0, 0, STORED]
    del memory
    assert there[offset] == STORED  # whose owner has gone
    with pytest.raises(TransferError, match="cannot be mapped"):
        here.open(region)
    del there
    assert (num_mapped(), len(os.listdir("/proc/self/fd"))) == (mapped, descriptors)  # noqa: PTH208


def test_only_the_file_that_was_meant_is_mapped() -> None:
    memory, here = shared_empty(SLOT_BYTES), HostMemory()
    region = bytearray(here.export(memory)[0])
    region[16] ^= 1  # the inode: another file has that number by now
    with pytest.raises(TransferError, match="another file"):
        here.open(bytes(region))
    with pytest.raises(TransferError, match="of this process alone"):
        here.export(torch.empty(8, dtype=torch.uint8))


def test_a_copy_is_done_by_and_by_and_can_be_cut() -> None:
    source = torch.full((2 * CHUNK_BYTES + 1,), STORED, dtype=torch.uint8)
    whole, half = torch.zeros_like(source), torch.zeros_like(source)
    copy, cut = HostMemory().copy(source, whole), HostMemory().copy(source, half)
    for _ in range(3):
        assert not copy.query()
        copy.advance()
    assert (copy.query(), copy.error) == (True, "")
    assert torch.equal(whole, source)
    cut.advance()
    cut.cut()
    assert (cut.query(), cut.error) == (True, "cut off")
    cut.advance()
    assert int(half.count_nonzero()) == CHUNK_BYTES


# ---- what is refused ----


class Expandable(Staging):
    """Slots that PyTorch has in expandable segments."""

    is_exportable = False


def test_slots_that_nobody_can_map_are_refused_at_the_start() -> None:
    with pytest.raises(TransferError, match="expandable segments"):
        create("ipc", Expandable(1, SLOT_BYTES, "cpu"), lambda: None)
    with pytest.raises(TransferError, match="of this process alone"):
        create("ipc", Staging(1, SLOT_BYTES, "cpu"), lambda: None)


def test_who_cannot_be_reached_is_refused_when_connected() -> None:
    one, other = (create("ipc", staging_for("ipc", 1, SLOT_BYTES, "cpu"), lambda: None) for _ in range(2))
    address = PairAddress.unpack(other.info(), "other")
    with pytest.raises(TransferError, match="nodes of one host, which other is not on"):
        one.connect("other", replace(address, boot="of another").pack())
    nobody = struct.pack("<i", 2**31 - 1).hex()  # no process has that number
    at = len(address.memory) - 2 * REGION_BYTES  # the slot's region
    elsewhere = address.memory[:at] + nobody + address.memory[at + len(nobody) :]
    with pytest.raises(TransferError, match=r"memory of process 2147483647 cannot be mapped.*of one user"):
        one.connect("other", replace(address, memory=elsewhere).pack())
    one.connect("other", other.info())
    for transport in (one, other):
        transport.close()


# ---- stored straight into the slot at the peer ----


def test_what_is_stored_arrives_when_it_is_pushed(ipc_rig: Rig) -> None:
    sender, receiver, source, target = granted_pair(ipc_rig)
    assert receiver.call("values", target) == {STORED}
    assert receiver.call("pending_events") == []
    sender.call("push", receiver.name, 1, source)
    assert receiver.call("wait", 1) == [arrived(sender.name, 1, target)]
    assert sender.call("wait", 1) == [Sent(receiver.name, 1, source)]
    assert receiver.call("values", target) == {STORED}
    assert not sender.call("place", receiver.name, 1, LATE)


def test_what_is_pushed_early_arrives_when_the_stores_are_over(ipc_rig: Rig) -> None:
    sender, receiver, source, target = granted_pair(ipc_rig)
    sender.call("push_early", receiver.name, 1, source)
    sender.call("store", LATE)
    assert receiver.call("pending_events") == []
    assert sender.call("pending_events") == []
    sender.call("end_stores")
    assert receiver.call("wait", 1) == [arrived(sender.name, 1, target)]
    assert sender.call("wait", 1) == [Sent(receiver.name, 1, source)]
    assert receiver.call("values", target) == {LATE}


# ---- what it costs, and how it ends ----


def test_nobody_spins_for_stores_that_take_long_or_for_nothing(ipc_rig: Rig) -> None:
    sender, receiver, source, _ = granted_pair(ipc_rig)
    window_s = 0.4
    assert max(node.call("spun_s", window_s) for node in (sender, receiver)) < 1e-3
    sender.call("push_early", receiver.name, 1, source)
    waiting = [node.start("spun_s", window_s) for node in (sender, receiver)]
    assert max(spun() for spun in waiting) < 0.1 * window_s
    sender.call("end_stores")
    assert isinstance(receiver.call("wait", 1)[0], Arrived)


@pytest.mark.parametrize("who", ["sender", "receiver"])
def test_what_is_cut_off_when_pushed_early_ends_with_its_stores(ipc_rig: Rig, who: str) -> None:
    ipc_rig.cuts = True
    sender, receiver, source, target = granted_pair(ipc_rig)
    sender.call("push_early", receiver.name, 1, source)
    (receiver if who == "receiver" else sender).call("disconnect", (sender if who == "receiver" else receiver).name)
    assert isinstance(receiver.call("wait", 1)[0], Failed)
    if who == "receiver":
        assert isinstance(sender.call("wait", 1)[0], PeerDisconnected)
    receiver.call("refill", target, 0)
    sender.call("store", LATE)
    assert receiver.call("old_memory_is_over") == [False]
    assert receiver.call("values", target) == {0}
    assert sender.call("pending_events") == []
    sender.call("end_stores")
    (failed,) = sender.call("wait", 1)
    assert (type(failed), failed.tag, failed.slot) == (Failed, 1, source)
    receiver.call("wait_for_old_memory")


def test_who_closes_while_stores_hang_is_told_all_the_same(ipc_rig: Rig) -> None:
    ipc_rig.cuts = True
    sender, receiver, source, _ = granted_pair(ipc_rig)
    sender.call("push_early", receiver.name, 1, source)
    sender.call("close")
    assert isinstance(sender.call("wait", 1)[0], Failed)
    assert isinstance(receiver.call("wait", 1)[0], Failed)


def test_the_longer_nothing_happens_the_longer_are_the_pauses() -> None:
    assert pause_s(1e-3, True) == 0
    assert 0 < pause_s(1e-3, False) == pause_s(3e-3, True) < 1e-4
    assert [pause_s(idle_s, True) for idle_s in (6e-3, 0.5, 60)] == [1e-3, 0.05, 0.1]
    assert 1e-4 < pause_s(0.0, True, is_relaxed=True) < 5e-4
    assert pause_s(0.5, True, is_relaxed=True) == 0.05


def test_a_thread_that_may_be_late_does_not_spin(monkeypatch: pytest.MonkeyPatch) -> None:
    staging = staging_for("ipc", 1, SLOT_BYTES, torch.device("cpu"))
    told = queue.SimpleQueue[bool]()

    def pause(idle_s: float, is_urgent: bool, is_relaxed: bool) -> float:
        told.put(is_relaxed)
        return 1e-3

    monkeypatch.setattr(thread, "pause_s", pause)
    monkeypatch.setattr(Links, "is_busy", True)
    transport = IpcTransport(staging, lambda: None)
    try:
        assert not told.get(timeout=10)
        transport.relax(True)
        while not told.get(timeout=10):
            pass
    finally:
        monkeypatch.undo()
        transport.close()


def test_what_is_not_granted_in_time_goes_the_other_way(ipc_rig: Rig) -> None:
    sender, receiver = ipc_rig.node("raw"), ipc_rig.node("raw")
    ipc_rig.link(sender, receiver)
    assert not sender.call("place", receiver.name, 1, STORED)
    source, target = sender.call("fill", OLD), receiver.call("fill", 0)
    sender.call("push", receiver.name, 1, source)
    receiver.call("post", sender.name, 1, target)
    assert isinstance(receiver.call("wait", 1)[0], Arrived)
    assert receiver.call("values", target) == {OLD}
    assert not sender.call("place", "nobody", 1, STORED)


@pytest.mark.parametrize("who", ["sender", "receiver"])
def test_memory_that_is_stored_to_serves_nobody_else_until_that_is_over(ipc_rig: Rig, who: str) -> None:
    ipc_rig.cuts = True
    sender, receiver, source, target = granted_pair(ipc_rig)
    if who == "sender":
        sender.call("disconnect", receiver.name)
        failed, lost = receiver.call("wait", 2)
        assert isinstance(lost, PeerDisconnected)
    else:
        receiver.call("disconnect", sender.name)
        (failed,) = receiver.call("wait", 1)
        assert isinstance(sender.call("wait", 1)[0], PeerDisconnected)
    assert isinstance(failed, Failed)
    ipc_rig.link(sender, receiver)
    receiver.call("refill", target, 0)
    receiver.call("post", sender.name, 2, target)  # the same slot, with other memory
    assert receiver.call("old_memory_is_over") == [False]
    sender.call("store", LATE)
    assert receiver.call("values", target) == {0}

    sender.call("push", receiver.name, 1, source)
    (failed,) = sender.call("wait", 1)
    assert (type(failed), failed.tag, failed.slot) == (Failed, 1, source)
    receiver.call("wait_for_old_memory")
    while not sender.call("place", receiver.name, 2, STORED):
        pass
    sender.call("push", receiver.name, 2, source)
    assert isinstance(receiver.call("wait", 1)[0], Arrived)
    assert receiver.call("values", target) == {STORED}


def test_a_receiver_that_dies_leaves_its_memory_to_who_stores_there(ipc_rig: Rig) -> None:
    sender, receiver, source, _ = granted_pair(ipc_rig)
    receiver.kill()
    assert isinstance(sender.call("wait", 1)[0], PeerDisconnected)
    sender.call("store", LATE)
    sender.call("push", receiver.name, 1, source)
    assert isinstance(sender.call("wait", 1)[0], Failed)
    assert sender.call("values", source) == {OLD}


def test_a_sender_that_dies_while_it_stores_gives_the_memory_back(ipc_rig: Rig) -> None:
    sender, receiver, _, _ = granted_pair(ipc_rig)
    sender.kill()
    assert [type(event) for event in receiver.call("wait", 2)] == [Failed, PeerDisconnected]
    receiver.call("wait_for_old_memory")


def test_a_sender_that_closes_while_it_stores_ends_it_with_failed(ipc_rig: Rig) -> None:
    ipc_rig.cuts = True
    sender, receiver, source, _ = granted_pair(ipc_rig)
    sender.call("close")
    sender.call("push", receiver.name, 1, source)
    assert isinstance(sender.call("wait", 1)[0], Failed)
    assert isinstance(receiver.call("wait", 1)[0], Failed)
