"""What transports that agree over TCP are made of: addresses, frames, and messages in order."""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import sys
import threading
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._C._distributed_c10d import HashStore

from baton.errors import TransferError
from kv_transfer import create, staging_for
from kv_transfer.staging import Staging
from kv_transfer.transport import Arrived
from kv_transfer.transports.carriers.groups import Lane
from kv_transfer.transports.carriers.ipc import IpcTransport
from kv_transfer.transports.host import hosts_of
from kv_transfer.transports.pair.address import PairAddress
from kv_transfer.transports.pair.channel import Channel, Frame, Kind
from kv_transfer.transports.pair.transport import PairTransport
from tests.kv_transfer.ordered import ordered_carrier
from tests.kv_transfer.rig_node import DEADLINE_S

HERE = PairAddress("a" * 32, "nixl", "1.5", "boot", ("10.0.0.1", "127.0.0.1", "::1", "fd00::1"), 4711)


@given(st.data())
def test_an_address_survives_the_way_undamaged_only(data: st.DataObject) -> None:
    address = bytearray(HERE.pack())
    assert PairAddress.unpack(bytes(address), "peer") == HERE
    address[data.draw(st.integers(0, len(address) - 1))] ^= data.draw(st.integers(1, 255))
    with pytest.raises(TransferError, match="damaged"):
        PairAddress.unpack(bytes(address), "peer")


def test_only_what_speaks_the_same_is_taken() -> None:
    HERE.require_like(HERE, "peer")
    for other in (replace(HERE, kind="nccl"), replace(HERE, version="1.6")):
        with pytest.raises(TransferError, match=r"nixl 1\.5 != (nccl|nixl) 1\.[56] of peer"):
            other.require_like(HERE, "peer")


def test_loopback_is_tried_on_the_same_machine_alone() -> None:
    assert HERE.reachable_from(HERE)[:2] == ("127.0.0.1", "::1")
    assert HERE.reachable_from(replace(HERE, boot="other")) == ("10.0.0.1", "fd00::1")


def test_a_machine_of_very_many_addresses_is_reached_at_some(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one with a bridge for each of its containers."""
    many = ("127.0.0.1", *(f"10.0.0.{number}" for number in range(1, 99)))
    monkeypatch.setattr("kv_transfer.transports.pair.transport.hosts_of", lambda _: many)
    staging = staging_for("ipc", 1, 64, "cpu")
    transport = IpcTransport(staging, lambda: None, host="0.0.0.0")
    assert PairAddress.unpack(transport.info(), "it").hosts == many[:64]
    transport.close()


def test_an_interface_has_its_own_addresses() -> None:
    assert "127.0.0.1" in hosts_of("lo")
    assert set(hosts_of("lo")) <= set(hosts_of(None))
    with pytest.raises(TransferError, match="nonesuch0"):
        hosts_of("nonesuch0")


frames = st.builds(
    Frame,
    kind=st.sampled_from(list(Kind)),
    tag=st.integers(0, (1 << 63) - 1),
    num_bytes=st.integers(0, (1 << 64) - 1),
    payload=st.binary(max_size=300),
)


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        return one, server.accept()[0]


@given(st.lists(frames, max_size=20), st.integers(1, 64))
def test_frames_come_whole_however_they_are_cut(sent: list[Frame], piece: int) -> None:
    (one, other), (relay, end) = tcp_pair(), tcp_pair()
    with one, other, relay, end:
        channel, heard = Channel(one), Channel(end)
        for frame in sent:
            channel.send(frame.kind, frame.tag, frame.num_bytes, frame.payload)
        channel.close()
        got: list[Frame] = []
        while data := other.recv(piece):
            relay.sendall(data)
            got += heard.receive()
        relay.close()
        arrivals = select.poll()
        arrivals.register(end, select.POLLIN)
        while not heard.lost:
            assert arrivals.poll(DEADLINE_S * 1e3)
            got += heard.receive()
        assert got == sent


@pytest.mark.parametrize(("num_bytes", "is_heard"), [(1 << 20, True), ((1 << 20) + 1, False)])
def test_a_frame_of_more_than_a_mebibyte_ends_the_connection_before_it_is_there(num_bytes: int, is_heard: bool) -> None:
    one, end = tcp_pair()
    with one, end:
        one.sendall(struct.pack("<IBQQ", num_bytes, Kind.NOTE, 1, 0))
        heard, arrivals = Channel(end), select.poll()
        arrivals.register(end, select.POLLIN)
        assert arrivals.poll(DEADLINE_S * 1e3)
        assert heard.receive() == []
        assert heard.lost != is_heard


@pytest.mark.parametrize("garbage", [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 4, b"\xff" * 64, b""])
def test_strangers_are_hung_up_on(garbage: bytes) -> None:
    transport = PairTransport(Staging(1, 64, "cpu"), lambda: None, ordered_carrier())
    port = PairAddress.unpack(transport.info(), "it").port
    with socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S) as stranger:
        if garbage:
            stranger.sendall(garbage)
        else:
            transport.close()
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(1) == b""
    transport.close()


@pytest.mark.parametrize("kind", ["ordered", "ipc"])
@pytest.mark.parametrize("note", [b"nonsense", b"7", b"[1, 2, 3]"])
def test_who_sends_notes_that_make_no_sense_loses_his_connection_alone(kind: str, note: bytes) -> None:
    if kind == "ipc":
        transport: PairTransport = IpcTransport(staging_for("ipc", 1, 64, "cpu"), lambda: None)
    else:
        transport = PairTransport(Staging(1, 64, "cpu"), lambda: None, ordered_carrier())
    here = PairAddress.unpack(transport.info(), "it")
    for _ in range(2):  # and whoever comes next is heard
        caller = Channel(socket.create_connection(("127.0.0.1", here.port), timeout=DEADLINE_S))
        arrivals, heard = select.poll(), list[Frame]()
        arrivals.register(caller, select.POLLIN)
        caller.send(Kind.HELLO, payload=here.id.encode() + b"c" * 32)
        while not heard:
            assert arrivals.poll(DEADLINE_S * 1e3)
            heard += caller.receive()
        assert [frame.kind for frame in heard] == [Kind.WELCOME]
        caller.send(Kind.OPEN)
        caller.send(Kind.NOTE, payload=note)
        while not caller.lost:
            assert arrivals.poll(DEADLINE_S * 1e3)
            caller.receive()
        caller.close()
    transport.close()


def test_who_called_is_heard_though_he_could_not_be_dialled_at_first() -> None:
    slots = [Staging(1, 64, "cpu") for _ in range(2)]
    arrived = threading.Event()
    receiver = PairTransport(slots[0], arrived.set, ordered_carrier())
    sender = PairTransport(slots[1], lambda: None, ordered_carrier())
    sender.connect("receiver", receiver.info())
    address = PairAddress.unpack(sender.info(), "sender")
    with pytest.raises(TransferError, match="none of its addresses answers"):
        receiver.connect("sender", replace(address, hosts=()).pack())
    receiver.connect("sender", sender.info())
    for staging in slots:
        staging.lend(staging.take() or 0)
    receiver.expect("sender", 1, 0, 64)
    sender.push("receiver", 1, 0, 64, b"header")
    assert arrived.wait(DEADLINE_S)
    assert receiver.poll() == [Arrived("sender", 1, 0, b"header")]
    for transport in (sender, receiver):
        transport.close()


class Script:
    """A group that notes what it is given, and ends it when told."""

    def __init__(self) -> None:
        self.begun: list[int] = []
        self.aborted = threading.Event()

    def send(self, memory: Tensor) -> Script:
        self.begun.append(int(memory[0]))
        return self

    receive = send

    def abort(self) -> None:
        self.aborted.set()

    error = ""

    def query(self) -> bool:
        return True


def message(value: int) -> Tensor:
    return torch.full((8,), value, dtype=torch.uint8)


def test_messages_wait_for_the_group_and_keep_their_order() -> None:
    group, may_join = Script(), threading.Event()

    def make(store: object, rank: int) -> Script:
        may_join.wait(DEADLINE_S)
        return group

    lane = Lane(make, lambda lane: None)
    early = [lane.submit(message(value)) for value in (3, 1, 2)]
    lane.join(HashStore, 0)
    assert not any(m.query() for m in early)
    may_join.set()
    lane.wait(DEADLINE_S)
    late = lane.submit(message(0))
    assert group.begun == [3, 1, 2, 0]
    assert all(m.query() and not m.error for m in [*early, late])
    lane.abort()
    lane.wait(DEADLINE_S)
    assert group.aborted.is_set()
    assert lane.submit(message(9)).error == "cut off"
    assert group.begun == [3, 1, 2, 0]


def test_a_group_that_is_joined_too_late_is_given_up() -> None:
    group, may_join = Script(), threading.Event()

    def make(store: object, rank: int) -> Script:
        may_join.wait(DEADLINE_S)
        return group

    lane = Lane(make, lambda lane: None)
    lane.join(HashStore, 1)
    cut = lane.submit(message(1))
    lane.abort()
    assert cut.query()
    assert cut.error == "cut off"
    may_join.set()
    lane.wait(DEADLINE_S)
    assert group.aborted.is_set()
    assert not group.begun


def test_a_group_that_cannot_be_joined_fails_its_messages() -> None:
    def make(store: object, rank: int) -> Script:
        raise RuntimeError("no peer")

    lane = Lane(make, lambda lane: None)
    waiting = lane.submit(message(1))
    lane.join(HashStore, 0)
    lane.wait(DEADLINE_S)
    lane.advance()
    assert waiting.query()
    assert waiting.error == "the group was not joined: no peer"


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("nixl_cu13", "nixl_cu12", "nixl"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(TransferError, match=r"pip install 'baton-serve\[nixl\]'"):
        create("nixl", Staging(1, 64, "cpu"), lambda: None)
    with pytest.raises(TransferError, match="NCCL moves bytes between GPUs"):
        create("nccl", Staging(1, 64, "cpu"), lambda: None)
