"""What becomes of carriers and their operations as a transport starts and its connections end."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import pytest
import torch

from baton.errors import TransferError
from kv_transfer import staging_for
from kv_transfer.async_operation import RemoteSlot
from kv_transfer.staging import Staging
from kv_transfer.transport import Failed, PeerDisconnected
from kv_transfer.transports.carriers.ipc import IpcTransport
from kv_transfer.transports.pair.carrier import Sending
from kv_transfer.transports.pair.channel import Kind
from kv_transfer.transports.pair.transport import PairTransport
from tests.kv_transfer.ordered import ordered_carrier
from tests.kv_transfer.peer_by_hand import SLOT_BYTES, Peer, hung_up, inbound, is_well, transport_of
from tests.kv_transfer.rig_node import DEADLINE_S

T = TypeVar("T")


def test_a_carrier_that_cannot_start_leaves_no_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> None:
        raise TransferError("no device")

    staging = Staging(1, SLOT_BYTES, "cpu")
    carrier = ordered_carrier()
    monkeypatch.setattr(carrier, "start", fail)

    def descriptors() -> int:
        gc.collect()
        return len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - counts itself either way

    before = descriptors()
    with pytest.raises(TransferError, match="no device"):
        PairTransport(staging, lambda: None, carrier)
    assert descriptors() == before


def test_a_connection_that_is_over_is_closed_in_its_carrier_too(monkeypatch: pytest.MonkeyPatch) -> None:
    transport = IpcTransport(staging_for("ipc", 4, SLOT_BYTES, "cpu"), lambda: None)
    closed = list[str]()
    make_sending, make_receiving = transport._pair._carrier.sending, transport._pair._carrier.receiving

    def noting(end: T, name: str) -> T:
        monkeypatch.setattr(end, "close", lambda: closed.append(name))
        return end

    monkeypatch.setattr(transport._pair._carrier, "sending", lambda *args: noting(make_sending(*args), "sending"))
    monkeypatch.setattr(transport._pair._carrier, "receiving", lambda *args: noting(make_receiving(*args), "receiving"))
    peer = Peer(transport)
    inward, outward = peer.call(), peer.answer("peer")
    assert closed == []
    transport.disconnect("peer")
    assert [frame.kind for frame in peer.until_lost(outward)] == [Kind.BYE]
    hung_up(peer, inward)
    assert inbound(transport) == []
    assert sorted(closed) == ["receiving", "sending"]
    peer.close()
    transport.close()


class Operation:
    """Of a carrier, or of kernels that store."""

    def __init__(self, error: str = "", is_over: bool = False) -> None:
        self.error, self.is_over = error, is_over

    def query(self) -> bool:
        return self.is_over


def sending_by_hand(transport: PairTransport, monkeypatch: pytest.MonkeyPatch, **verbs: Callable[..., object]) -> None:
    """Have these methods instead of the carrier's own."""
    make = transport._pair._carrier.sending

    def sending(*args: Any) -> Sending:
        end = make(*args)
        for name, verb in verbs.items():
            monkeypatch.setattr(end, name, verb)
        return end

    monkeypatch.setattr(transport._pair._carrier, "sending", sending)


def test_an_operation_that_fails_ends_its_link_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    transport, staging = transport_of("ipc")
    failing = Operation("no route", is_over=True)
    sending_by_hand(transport, monkeypatch, reach=lambda *args: None, send=lambda *args: failing)
    peer = Peer(transport)
    outward = peer.answer("peer")
    slot = staging.take()
    assert slot is not None
    staging.lend(slot)
    transport.push("peer", 1, slot, SLOT_BYTES, b"header")
    outward.send(Kind.GRANT, 1, SLOT_BYTES)
    assert [frame.kind for frame in peer.until_lost(outward)] == [Kind.BEGIN, Kind.BYE]
    assert inbound(transport) == []
    assert transport.poll() == [Failed("peer", 1, slot, "no route"), PeerDisconnected("peer", "no route")]
    is_well(transport)
    peer.close()
    transport.close()


def test_a_message_whose_stores_outlive_its_link_fails_when_they_are_over(monkeypatch: pytest.MonkeyPatch) -> None:
    staging, woken = staging_for("ipc", 4, SLOT_BYTES, "cpu"), threading.Event()
    transport, storing = IpcTransport(staging, woken.set), Operation()
    there = RemoteSlot(torch.empty(SLOT_BYTES, dtype=torch.uint8))
    sending_by_hand(transport, monkeypatch, reach=lambda *args: there)
    peer = Peer(transport)
    outward = peer.answer("peer")
    outward.send(Kind.GRANT, 1, SLOT_BYTES)
    assert transport.acquire_remote_slot("peer", 1, SLOT_BYTES) is not None
    slot = staging.take()
    assert slot is not None
    staging.lend(slot)
    transport.push("peer", 1, slot, SLOT_BYTES, b"header", storing)
    assert peer.hear(outward).kind is Kind.BEGIN
    transport.disconnect("peer")
    assert peer.hear(outward).kind is Kind.BYE
    assert inbound(transport) == []
    assert transport.poll() == []
    storing.is_over = True
    assert woken.wait(DEADLINE_S)
    assert transport.poll() == [Failed("peer", 1, slot, "disconnected")]
    peer.close()
    transport.close()
