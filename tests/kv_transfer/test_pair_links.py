"""The connections of a transport, each of which ends: replaced, given up, reset, or left behind."""

from __future__ import annotations

import select
import socket
import struct
from concurrent.futures import Future
from dataclasses import replace

import pytest

from baton.errors import TransferError
from kv_transfer.staging import Staging
from kv_transfer.transport import Failed, PeerDisconnected
from kv_transfer.transports.pair import dialling
from kv_transfer.transports.pair.channel import Kind
from kv_transfer.transports.pair.transport import PairTransport
from tests.kv_transfer.peer_by_hand import SLOT_BYTES, Peer, connecting, hung_up, inbound, is_well, transport_of
from tests.kv_transfer.rig_node import DEADLINE_S

NUM_NOTES = 16
"""Of 1 MiB each: more than a socket takes while its peer reads nothing."""
RESET = struct.pack("ii", 1, 0)


def expect(transport: PairTransport, staging: Staging, tag: int) -> int:
    slot = staging.take()
    assert slot is not None
    staging.lend(slot)
    transport.expect("peer", tag, slot, SLOT_BYTES)
    return slot


def test_of_a_peer_that_is_not_known_yet_the_latest_call_counts() -> None:
    transport, staging = transport_of("ipc")
    peer = Peer(transport)
    first, second = peer.call(), peer.call()
    hung_up(peer, first)
    first.close()
    assert len(inbound(transport)) == 1
    peer.answer("peer")
    expect(transport, staging, 1)
    assert peer.hear(second).kind is Kind.GRANT
    peer.close()
    transport.close()


def test_who_calls_and_leaves_before_he_is_known_is_forgotten() -> None:
    transport, _ = transport_of("ipc")
    peer = Peer(transport)
    channel = peer.call()
    channel.hang_up()
    hung_up(peer, channel)
    assert inbound(transport) == []
    assert transport._pair._links._unclaimed == {}
    assert not transport._pair._links.is_busy
    peer.close()
    transport.close()


@pytest.mark.parametrize("granted", [False, True])
def test_a_peer_that_calls_anew_is_heard_on_its_new_connection(granted: bool) -> None:
    """Nobody knows what becomes of what was granted on the first."""
    transport, staging = transport_of("ipc")
    peer = Peer(transport)
    first, outward = peer.call(), peer.answer("peer")
    if granted:
        slot = expect(transport, staging, 1)
        assert peer.hear(first).kind is Kind.GRANT
    second = peer.call()
    hung_up(peer, first)
    first.send(Kind.BYE)
    first.close()
    if granted:
        assert [frame.kind for frame in peer.until_lost(outward)] == [Kind.BYE]
        reason = "the peer connected anew"
        assert transport.poll() == [Failed("peer", 1, slot, reason), PeerDisconnected("peer", reason)]
    else:
        expect(transport, staging, 1)
        assert peer.hear(second).kind is Kind.GRANT
        assert transport.poll() == []
    peer.close()
    transport.close()


def test_a_peer_that_left_before_it_calls_anew_is_granted_the_same_again() -> None:
    """Though its call is attended to first."""
    transport, staging = transport_of("ipc")
    peer = Peer(transport)
    first, _ = peer.call(), peer.answer("peer")
    expect(transport, staging, 1)
    assert peer.hear(first).kind is Kind.GRANT
    (end,) = inbound(transport)
    second = peer._keep(socket.create_connection(("127.0.0.1", peer.theirs.port), timeout=DEADLINE_S))
    second.send(Kind.HELLO, payload=(peer.theirs.id + peer.address.id).encode())
    assert peer.hear(second).kind is Kind.WELCOME

    def call_anew() -> None:
        (pending,) = transport._pair._ends.of(dialling.PendingPeer)
        first.send(Kind.BYE)
        first.close()
        second.send(Kind.OPEN)
        for channel, what in ((end.channel, select.POLLRDHUP), (pending.channel, select.POLLIN)):
            arrival = select.poll()
            arrival.register(channel, what)
            assert arrival.poll(DEADLINE_S * 1e3)
        transport._pair._links._attend(pending)

    transport._pair.call(call_anew)
    assert peer.hear(second).kind is Kind.GRANT
    assert transport.poll() == []
    peer.close()
    transport.close()


def test_a_peer_whose_memory_cannot_be_reached_hears_that_nothing_comes() -> None:
    """An end without a BYE is a death, and ends what the peer expects."""
    transport, _ = transport_of("ipc")
    peer = Peer(transport)
    peer.address = replace(peer.address, memory="00")
    done = connecting(transport, peer)
    channel = peer._keep(peer.listener.accept()[0])
    assert peer.hear(channel).kind is Kind.HELLO
    channel.send(Kind.WELCOME)
    assert [frame.kind for frame in peer.until_lost(channel)] == [Kind.OPEN, Kind.BYE]
    with pytest.raises(TransferError, match="peer cannot be reached"):
        done.result(DEADLINE_S)
    assert transport.poll() == []
    peer.close()
    transport.close()


def test_who_is_given_up_is_not_dialled_any_more() -> None:
    transport, _ = transport_of("ipc")
    peer = Peer(transport)
    done = connecting(transport, peer)
    channel = peer._keep(peer.listener.accept()[0])
    assert peer.hear(channel).kind is Kind.HELLO
    transport.disconnect("peer")
    with pytest.raises(TransferError, match="peer cannot be reached: disconnected"):
        done.result(DEADLINE_S)
    hung_up(peer, channel)
    assert transport.poll() == []
    peer.close()
    transport.close()


def test_of_all_addresses_that_answer_one_is_used_and_the_others_are_hung_up_on() -> None:
    transport, _ = transport_of("ipc")
    peer = Peer(transport)
    peer.address = replace(peer.address, hosts=("127.0.0.1",) * 2)
    done = connecting(transport, peer)
    one, other = (peer._keep(peer.listener.accept()[0]) for _ in range(2))
    for channel in (one, other):
        assert peer.hear(channel).kind is Kind.HELLO
    one.send(Kind.WELCOME)
    assert peer.hear(one).kind is Kind.OPEN
    hung_up(peer, other)
    done.result(DEADLINE_S)
    transport.disconnect("peer")
    assert peer.hear(one).kind is Kind.BYE
    peer.close()
    transport.close()


def test_an_address_that_refuses_leaves_the_others_to_answer() -> None:
    transport, _ = transport_of("ipc")
    peer = Peer(transport)
    peer.address = replace(peer.address, hosts=("127.0.0.1", "127.0.0.2"))
    done = connecting(transport, peer)  # its listener is at the first alone
    channel = peer._keep(peer.listener.accept()[0])
    assert peer.hear(channel).kind is Kind.HELLO
    channel.send(Kind.WELCOME)
    done.result(DEADLINE_S)
    peer.close()
    transport.close()


def test_a_name_belongs_to_one_address_at_a_time() -> None:
    transport, _ = transport_of("ipc")
    peer = Peer(transport)
    outward = peer.answer("peer")
    transport.connect("peer", peer.address.pack())
    with pytest.raises(TransferError, match="peer is connected at another address"):
        transport.connect("peer", replace(peer.address, id="f" * 32).pack())
    transport.disconnect("peer")
    assert peer.hear(outward).kind is Kind.BYE
    peer.close()
    transport.close()


def test_who_could_not_be_connected_is_not_told_as_disconnected() -> None:
    transport, staging = transport_of("ipc")
    peer = Peer(transport)
    inward = peer.call()
    done = connecting(transport, peer)
    channel = peer._keep(peer.listener.accept()[0])
    assert peer.hear(channel).kind is Kind.HELLO
    slot = expect(transport, staging, 1)
    assert peer.hear(inward).kind is Kind.GRANT
    inward.close()
    with pytest.raises(TransferError, match="peer cannot be reached: the peer is gone"):
        done.result(DEADLINE_S)
    hung_up(peer, channel)
    assert transport.poll() == [Failed("peer", 1, slot, "the peer is gone")]
    peer.close()
    transport.close()


def test_a_connection_that_was_reset_before_its_link_ended_is_closed() -> None:
    """Nobody hears of its end any more."""
    transport, staging = transport_of("ipc")
    peer = Peer(transport)
    inward, _ = peer.call(), peer.answer("peer")
    expect(transport, staging, 1)
    assert peer.hear(inward).kind is Kind.GRANT
    (end,) = inbound(transport)

    def reset_and_disconnect() -> None:
        inward.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        inward.close()
        arrival = select.poll()
        arrival.register(end.channel, 0)  # of POLLHUP and POLLERR it tells anyway
        assert arrival.poll(DEADLINE_S * 1e3)
        transport._pair._links.disconnect("peer")

    transport._pair.call(reset_and_disconnect)
    while inbound(transport):
        assert end.broke_at, "nothing ends it"
    peer.close()
    transport.close()


def test_strangers_that_say_nothing_give_way_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dialling, "_STRANGERS", 2)
    transport, _ = transport_of("ipc")
    peer = Peer(transport)
    strangers = [
        peer._keep(socket.create_connection(("127.0.0.1", peer.theirs.port), timeout=DEADLINE_S)) for _ in range(3)
    ]
    hung_up(peer, strangers[0])
    assert len(transport._pair._ends.of(dialling.PendingPeer)) == 2
    peer.call()
    hung_up(peer, strangers[1])
    peer.close()
    transport.close()


@pytest.mark.parametrize("who", [b"\xff" * 32, b"e" * 31, b"e" * 33])
def test_who_calls_without_a_name_is_hung_up_on(who: bytes) -> None:
    transport, _ = transport_of("ipc")
    peer = Peer(transport)
    channel = peer._keep(socket.create_connection(("127.0.0.1", peer.theirs.port), timeout=DEADLINE_S))
    channel.send(Kind.HELLO, payload=peer.theirs.id.encode() + who)
    hung_up(peer, channel)
    is_well(transport)
    peer.close()
    transport.close()


def test_who_answers_with_a_nonce_though_there_is_no_secret_is_not_connected() -> None:
    transport, _ = transport_of("ipc")
    peer = Peer(transport)
    done = connecting(transport, peer)
    channel = peer._keep(peer.listener.accept()[0])
    assert peer.hear(channel).kind is Kind.HELLO
    channel.send(Kind.WELCOME, payload=b"nonce")
    with pytest.raises(TransferError, match="another process listens there, or the cluster secret differs"):
        done.result(DEADLINE_S)
    hung_up(peer, channel)
    peer.close()
    transport.close()


def test_what_a_socket_does_not_take_at_once_follows() -> None:
    transport, _ = transport_of("ipc")
    peer = Peer(transport)
    channel, payload = peer.call(), bytes(1 << 20)
    while not (ends := inbound(transport)):
        pass  # it has not read OPEN yet
    (end,) = ends
    num_left = Future[int]()

    def send() -> None:
        for tag in range(NUM_NOTES):
            end.channel.send(Kind.NOTE, tag, payload=payload)
        num_left.set_result(len(end.channel._outbox))

    transport._pair.call(send)
    assert num_left.result(DEADLINE_S) > 0
    heard = list[int]()
    for frame in peer.until_lost(channel):
        heard.append(frame.tag)
        if len(heard) == NUM_NOTES:
            break
    assert heard == list(range(NUM_NOTES))
    peer.close()
    transport.close()


def test_what_follows_the_frame_that_ends_a_connection_is_not_handled() -> None:
    transport, _ = transport_of("ipc")
    peer = Peer(transport)
    channel = peer._keep(socket.create_connection(("127.0.0.1", peer.theirs.port), timeout=DEADLINE_S))
    channel.send(Kind.HELLO, more_follows=True)
    channel.send(Kind.HELLO)
    hung_up(peer, channel)
    peer.close()
    is_well(transport)
    transport.close()


def test_who_hangs_up_before_a_connection_is_open_is_forgotten() -> None:
    transport, _ = transport_of("ipc")
    peer = Peer(transport)
    stranger = peer._keep(socket.create_connection(("127.0.0.1", peer.theirs.port), timeout=DEADLINE_S))
    stranger.hang_up()
    hung_up(peer, stranger)
    done = connecting(transport, peer)
    dialled = peer._keep(peer.listener.accept()[0])
    assert peer.hear(dialled).kind is Kind.HELLO
    dialled.close()
    with pytest.raises(TransferError, match="none of its addresses answers"):
        done.result(DEADLINE_S)
    assert transport._pair._ends._ends == {}
    peer.close()
    transport.close()
