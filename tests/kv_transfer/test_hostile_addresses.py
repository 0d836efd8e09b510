"""What a peer claims of itself, of its memory and of a part is checked before it is believed."""

from __future__ import annotations

import json
import os
import socket
import struct
from dataclasses import asdict
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.errors import TransferError
from kv_transfer import staging_for
from kv_transfer.parts import PartHeader
from kv_transfer.transports.carriers.completion_flags import CompletionFlags, HostFlagWriter
from kv_transfer.transports.carriers.ipc import IpcCarrier
from kv_transfer.transports.host_memory import REGION_BYTES, HostMemory
from kv_transfer.transports.pair.address import _MAGIC, PairAddress, _checksum
from kv_transfer.transports.ucx.address import pack_address, unpack_address

SLOT_BYTES = 4096
RUNS = settings(max_examples=150, deadline=None, derandomize=True)
SLOTS = staging_for("ipc", 2, SLOT_BYTES, "cpu")
HERE = IpcCarrier(SLOTS)
FIELDS = asdict(PairAddress("a" * 32, "ipc", "1", "boot", ("127.0.0.1",), 4711, "00"))
plain = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9) | st.just("127.0.0.1")
anything: st.SearchStrategy[Any] = plain | st.lists(plain, max_size=3) | st.just({}) | st.just([["::1"]])


def sealed(data: bytes) -> bytes:
    """As anybody can."""
    return _MAGIC + _checksum(data) + data


@RUNS
@given(st.dictionaries(st.sampled_from(sorted(FIELDS)), anything, min_size=1))
def test_an_address_that_makes_no_sense_is_refused_though_its_checksum_is_right(changed: dict[str, Any]) -> None:
    address = sealed(json.dumps(FIELDS | changed).encode())
    try:
        made = PairAddress.unpack(address, "peer")
    except TransferError:
        return
    assert PairAddress.unpack(made.pack(), "peer") == made
    assert 0 < made.port <= 65535
    made.reachable_from(made)
    bytes.fromhex(made.memory)
    for host in made.hosts:
        socket.getaddrinfo(host, made.port, flags=socket.AI_NUMERICHOST)


@pytest.mark.parametrize(
    "changed",
    [
        {"hosts": ["node-7.example"]},
        {"hosts": ["fe80::1%eth0"]},
        {"hosts": ["127.0.0.1"] * 1000},
        {"hosts": "127.0.0.1"},
        {"port": 70_000},
        {"port": 0},
        {"port": True},
        {"memory": "0"},
        {"id": "a"},
        {"more": 1},
        {"version": 2},
    ],
)
def test_what_an_address_must_say(changed: dict[str, Any]) -> None:
    with pytest.raises(TransferError, match="the address of peer makes no sense"):
        PairAddress.unpack(sealed(json.dumps(FIELDS | changed).encode()), "peer")


@RUNS
@given(st.binary(max_size=200) | st.just(b"[" * 50_000))
def test_garbage_is_no_address_of_any_kind(data: bytes) -> None:
    for address in (data, sealed(data)):
        with pytest.raises(TransferError):
            PairAddress.unpack(address, "peer")
    with pytest.raises(TransferError):
        unpack_address((1, 21, 0), "machine", data, "peer")
    with pytest.raises(TransferError):
        unpack_address((1, 21, 0), "machine", pack_address((1, 20, 0), "machine", data), "peer")


@RUNS
@given(st.binary(max_size=2 * REGION_BYTES + 32))
def test_garbage_names_no_memory(data: bytes) -> None:
    way = HERE.sending("peer", HERE.memory, print)
    with pytest.raises(TransferError):
        way.reach(data, 64, 1)
    with pytest.raises(TransferError):
        way.send(torch.zeros(64, dtype=torch.uint8), 64, data)
    with pytest.raises(TransferError):
        HostMemory().open(data)
    way.close()


@RUNS
@given(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1))
def test_only_what_is_mapped_is_stored_to(offset: int, flag: int, num_bytes: int) -> None:
    way = HERE.sending("peer", HERE.memory, print)
    place = struct.pack("<QQ", offset, flag) + HERE.memory[16:]
    try:
        target = way.reach(place, num_bytes, 7)
    except TransferError:
        assert offset + num_bytes > 2 * SLOT_BYTES or flag * 8 >= 4096
    else:
        target.signal(None)
        assert len(target.memory) == num_bytes <= 2 * SLOT_BYTES - offset
    way.close()


def test_memory_whose_length_may_change_is_not_mapped(tmp_path: Any) -> None:
    """To write behind its end would end the process."""
    flags = CompletionFlags()
    pid, *_, size = struct.unpack("<iiQQQ", flags.region)
    with (tmp_path / "file").open("w+b") as file:
        file.truncate(size)
        stat = os.fstat(file.fileno())
        with pytest.raises(TransferError, match="cannot be mapped"):
            HostFlagWriter(struct.pack("<iiQQQ", pid, file.fileno(), stat.st_dev, stat.st_ino, size))


@RUNS
@given(st.binary(max_size=128))
def test_garbage_is_no_header(data: bytes) -> None:
    with pytest.raises(TransferError):
        PartHeader.parse(data)
