"""Peers that send what they should not: their link ends, and nothing else. A transport that fails by itself says so."""

from __future__ import annotations

import contextlib
import random
import select
import socket
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from baton.errors import TransferError
from baton.rpc.cluster_secret import DATA, NONCE_BYTES, ClusterSecret, new_nonce
from kv_transfer import staging_for
from kv_transfer.parts import slot_bytes_for
from kv_transfer.receiver import KvReceiver
from kv_transfer.sender import KvSender
from kv_transfer.staging import Staging
from kv_transfer.transport import PeerDisconnected
from kv_transfer.transports.carriers.ipc import IpcCarrier, IpcTransport
from kv_transfer.transports.memory import MemoryHub, MemoryTransport
from kv_transfer.transports.pair import links
from kv_transfer.transports.pair.channel import Channel, Kind
from tests.kv_transfer.peer_by_hand import SLOT_BYTES, Peer, connecting, hung_up, inbound, is_well, transport_of
from tests.kv_transfer.rig_node import BLOCK_BYTES, DEADLINE_S, LAYOUT

SECRET = ClusterSecret(b"that of all nodes of a cluster")
HERE = IpcCarrier(staging_for("ipc", 2, SLOT_BYTES, "cpu"))


# ---- connections ----


@pytest.mark.parametrize("kind", ["ipc", "ordered"])
def test_whatever_a_peer_sends_ends_no_more_than_its_link(kind: str) -> None:
    rng = random.Random(3)
    transport, staging = transport_of(kind)
    places = [b"", HERE.memory, bytes(8), rng.randbytes(56), rng.randbytes(96)]
    notes = [b"", b"[", b"[" * 100_000, b"[1, 2]", b'["x", "y"]', b'[1, "p"]', b"7", rng.randbytes(40)]
    for turn in range(40):
        peer = Peer(transport)
        inward, outward = peer.call(), peer.answer(f"peer {turn}")
        slots = []
        for tag in range(2):
            if (slot := staging.take()) is not None:
                staging.lend(slot)
                transport.expect(f"peer {turn}", tag, slot, SLOT_BYTES)
                slots.append(slot)
        for _ in range(rng.randint(1, 12)):
            kind_, tag = rng.choice(list(Kind)), rng.choice([0, 1, 2, 2**64 - 1])
            num_bytes = rng.choice([0, 1, SLOT_BYTES, SLOT_BYTES + 1, 2**64 - 1])
            inward.send(kind_, tag, num_bytes, rng.choice([b"", bytes(64), rng.randbytes(300), *notes]))
            outward.send(rng.choice([Kind.GRANT, kind_]), tag, num_bytes, rng.choice(places))
        if turn % 2:
            with contextlib.suppress(OSError):
                inward.socket.send(rng.randbytes(50))
        transport.disconnect(f"peer {turn}")
        peer.close()
        seen: list[int] = []
        while len(seen) < len(slots):
            seen += [event.slot for event in transport.poll() if hasattr(event, "slot")]
        assert sorted(seen) == sorted(slots)  # once each
        for slot in slots:
            staging.reclaim(slot)
            staging.give_back(slot)
    staging.check_integrity()
    is_well(transport)
    transport.close()


@pytest.mark.parametrize(
    "said",
    [
        [(Kind.END, b"")],
        [(Kind.BEGIN, b"h"), (Kind.BEGIN, b"h")],
        [(Kind.BEGIN, bytes(200))],
        [(Kind.HELLO, b"")],
        [(Kind.GRANT, b"")],
    ],
)
def test_what_is_out_of_turn_ends_the_link_and_no_part_has_arrived(said: list[tuple[Kind, bytes]]) -> None:
    transport, staging = transport_of("ipc")
    peer = Peer(transport)
    inward, outward = peer.call(), peer.answer("peer")
    slot = staging.take()
    assert slot is not None
    staging.lend(slot)
    transport.expect("peer", 1, slot, SLOT_BYTES)
    assert peer.hear(inward).kind is Kind.GRANT
    for kind, payload in said:
        inward.send(kind, 1, 10, payload)
    list(peer.until_lost(inward))
    list(peer.until_lost(outward))
    assert [type(event).__name__ for event in transport.poll()] == ["Failed", "PeerDisconnected"]
    peer.close()
    is_well(transport)
    transport.close()


def test_who_was_granted_a_slot_is_waited_for() -> None:
    transport, staging = transport_of("ipc")
    peer = Peer(transport)
    inward, _ = peer.call(), peer.answer("peer")
    slot = staging.take()
    assert slot is not None
    staging.lend(slot)
    transport.expect("peer", 1, slot, SLOT_BYTES)
    assert peer.hear(inward).kind is Kind.GRANT
    transport.disconnect("peer")
    assert list(peer.until_lost(inward)) == []
    assert len(inbound(transport)) == 1
    inward.send(Kind.BYE)
    peer.close()
    transport.close()


def test_who_calls_and_is_not_known_in_time_is_forgotten_though_he_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "_UNCLAIMED", 2)
    transport, _ = transport_of("ipc")
    peers = [Peer(transport) for _ in range(5)]
    for number, peer in enumerate(peers):
        peer.address = replace(peer.theirs, id=f"{number:032x}")
        peer.call()
    for peer in peers[:3]:
        list(peer.until_lost(peer.channels[0]))
    assert [end.remote for end in inbound(transport)] == [peer.address.id for peer in peers[3:]]
    for peer in peers:
        peer.close()
    is_well(transport)
    transport.close()


def test_who_sends_without_end_does_not_keep_others_from_being_heard() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        channel = Channel(server.accept()[0])

    def flood() -> None:
        with contextlib.suppress(OSError):  # until it is hung up on
            while True:
                one.sendall(bytes(1 << 20))

    thread = threading.Thread(target=flood)
    thread.start()
    arrivals = select.poll()
    arrivals.register(channel, select.POLLIN)
    frame = b"\x00\x00\x08\x00\x06"  # half a MiB of a BEGIN that is not over yet
    channel._inbox += frame
    for _ in range(5):
        assert arrivals.poll(DEADLINE_S * 1e3)
        channel.receive()
        assert len(channel._inbox) <= 2 << 20
    channel.close()
    thread.join(DEADLINE_S)
    one.close()


# ---- the cluster secret ----


@pytest.mark.parametrize("kind", ["ipc", "ordered"])
def test_connections_are_opened_by_who_knows_the_secret(kind: str) -> None:
    transport, _ = transport_of(kind, SECRET)
    peer = Peer(transport, SECRET)
    peer.call()
    peer.answer("peer")
    assert transport._pair._links.is_open("peer")
    peer.close()
    transport.close()


@pytest.mark.parametrize("secret", [None, ClusterSecret(b"that of another cluster")])
def test_who_does_not_know_it_is_hung_up_on_and_told_nothing(secret: ClusterSecret | None) -> None:
    transport, _ = transport_of("ipc", SECRET)
    peer = Peer(transport, secret)
    channel = peer._keep(socket.create_connection(("127.0.0.1", peer.theirs.port), timeout=DEADLINE_S))
    nonce = new_nonce() if secret else b""
    channel.send(Kind.HELLO, payload=(peer.theirs.id + peer.address.id).encode() + nonce)
    if secret:
        welcome = peer.hear(channel)
        wrong = secret.proofs(DATA, peer.address.id, peer.theirs.id, nonce, welcome.payload)
        channel.send(Kind.OPEN, payload=wrong.caller)
    assert list(peer.until_lost(channel)) == []
    assert not transport._pair._links._unclaimed
    peer.close()
    transport.close()


def test_who_is_dialled_must_know_it_too() -> None:
    transport, _ = transport_of("ipc", SECRET)
    peer = Peer(transport)

    def impostor() -> None:
        channel = peer._keep(peer.listener.accept()[0])
        peer.hear(channel)
        channel.send(Kind.WELCOME, payload=bytes(NONCE_BYTES))
        said = peer.hear(channel)
        channel.send(Kind.PROOF, payload=said.payload)  # sent back

    thread = threading.Thread(target=impostor)
    thread.start()
    with pytest.raises(TransferError, match="or the cluster secret differs"):
        transport.connect("peer", peer.address.pack())
    thread.join(DEADLINE_S)
    peer.close()
    transport.close()


@pytest.mark.parametrize("secret", [None, SECRET], ids=["open", "secret"])
def test_a_call_is_answered_once(secret: ClusterSecret | None) -> None:
    """Or one who reads no answers has this process keep them, and may choose among nonces."""
    transport, _ = transport_of("ipc", secret)
    peer = Peer(transport, secret)
    channel = peer._keep(socket.create_connection(("127.0.0.1", peer.theirs.port), timeout=DEADLINE_S))
    hello = (peer.theirs.id + peer.address.id).encode() + (new_nonce() if secret else b"")
    channel.send(Kind.HELLO, payload=hello)
    assert peer.hear(channel).kind is Kind.WELCOME
    channel.send(Kind.HELLO, payload=hello)
    hung_up(peer, channel)
    assert transport._pair._ends._ends == {}
    peer.close()
    is_well(transport, secret)
    transport.close()


def test_who_is_dialled_is_asked_for_one_proof() -> None:
    """Or he has the secret's proofs of nonces that he chooses, as many as he likes."""
    transport, _ = transport_of("ipc", SECRET)
    peer = Peer(transport, SECRET)
    done = connecting(transport, peer)
    channel = peer._keep(peer.listener.accept()[0])
    assert peer.hear(channel).kind is Kind.HELLO
    channel.send(Kind.WELCOME, payload=new_nonce())
    assert peer.hear(channel).kind is Kind.OPEN
    channel.send(Kind.WELCOME, payload=new_nonce())
    with pytest.raises(TransferError, match="another process listens there, or the cluster secret differs"):
        done.result(DEADLINE_S)
    hung_up(peer, channel)
    peer.close()
    is_well(transport, SECRET)
    transport.close()


def test_a_second_welcome_ends_a_link_that_needs_no_proof() -> None:
    transport, _ = transport_of("ipc")
    peer = Peer(transport)
    outward = peer.answer("peer")
    outward.send(Kind.WELCOME)
    assert [frame.kind for frame in peer.until_lost(outward)] == [Kind.BYE]
    assert transport.poll() == [PeerDisconnected("peer", "the peer is gone")]
    peer.close()
    is_well(transport)
    transport.close()


# ---- a transport that fails ----


class _Broken(Exception):
    pass


@pytest.mark.parametrize("make", [KvSender, KvReceiver])
def test_a_transport_that_fails_is_told_to_who_polls_and_wakes_him(make: Callable[..., Any]) -> None:
    staging, woken = staging_for("ipc", 2, slot_bytes_for(2, BLOCK_BYTES), "cpu"), threading.Event()
    transport = IpcTransport(staging, woken.set)
    mover = make(transport, staging, torch.zeros(4, BLOCK_BYTES, dtype=torch.uint8), LAYOUT)
    mover.poll()

    def fail() -> None:
        raise _Broken("a bug of ours")

    transport._pair.call(fail)
    assert woken.wait(DEADLINE_S)
    with pytest.raises(RuntimeError, match="the transport failed: _Broken"):
        mover.poll()
    with pytest.raises(TransferError, match="the transport is closed"):
        transport.connect("peer", transport.info())
    transport.close()


def test_a_part_that_cannot_be_landed_is_told_to_who_polls_and_wakes_him(monkeypatch: pytest.MonkeyPatch) -> None:
    hub, woken = MemoryHub(), threading.Event()
    pool = torch.zeros(4, BLOCK_BYTES, dtype=torch.uint8)
    stagings = [Staging(2, slot_bytes_for(2, BLOCK_BYTES), "cpu") for _ in range(2)]
    theirs = MemoryTransport(hub, "sender", stagings[0], lambda: None)
    ours = MemoryTransport(hub, "receiver", stagings[1], woken.set)
    sender = KvSender(theirs, stagings[0], pool, LAYOUT)
    receiver = KvReceiver(ours, stagings[1], pool, LAYOUT)
    theirs.connect("receiver", ours.info())
    ours.connect("sender", theirs.info())

    def fail() -> None:
        raise _Broken("of the device")

    monkeypatch.setattr(receiver._copies, "scatter", lambda *where: fail)
    assert receiver.expect("sender", 1, 0, [1])
    assert sender.send("receiver", 1, 0, [1], checked=False)
    hub.deliver_all()
    assert woken.is_set()
    with pytest.raises(_Broken, match="of the device"):
        receiver.poll()
