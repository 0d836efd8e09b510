"""What strangers send to the data plane's ports, and addresses that no peer has: each transport goes on as before.

UCX aborts the process over an address that was made wrong on purpose: only damage that its checksum tells comes here.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import socket
import struct
import threading
from collections import Counter
from collections.abc import Iterator
from random import Random
from typing import Any

import pytest

from baton.errors import TransferError
from kv_transfer import create, staging_for
from kv_transfer.staging import Staging
from kv_transfer.transport import Arrived, Sent
from kv_transfer.transports.memory import MemoryHub, MemoryTransport
from kv_transfer.transports.pair.address import PairAddress
from kv_transfer.transports.pair.channel import Kind
from kv_transfer.transports.pair.transport import PairTransport
from tests.fuzz.mutations import odd_json, wrong_bytes
from tests.kv_transfer.ordered import ordered_carrier
from tests.kv_transfer.rig_node import DEADLINE_S

NUM_CALLS = 200
NUM_ADDRESSES = 200
NUM_DAMAGED = 300
CONNECT_S = 0.02
HANG_UP_S = 0.01
"""For who called to be hung up on; one whose words were right so far is not, and hangs up himself."""
SLOT_BYTES = 64
HOSTS: tuple[object, ...] = ([], ["no address"], [1], "127.0.0.1", ["127.0.0.1"] * 300, ["::1%9"], [""])
KINDS = ("ordered", "ipc", "nixl")
AWAKE = threading.Event()
"""What all transports here wake."""


@contextlib.contextmanager
def pair(kind: str) -> Iterator[tuple[Any, Any]]:
    """Two transports of this process, not connected."""
    if kind == "nixl":
        pytest.importorskip("nixl_cu13", reason="the extra [nixl] is not installed")
    hub = MemoryHub(auto=True)

    def one(name: str) -> Any:
        match kind:
            case "memory":
                return MemoryTransport(hub, name, Staging(2, SLOT_BYTES, "cpu"), AWAKE.set)
            case "ordered":
                return PairTransport(Staging(2, SLOT_BYTES, "cpu"), AWAKE.set, ordered_carrier())
            case _:
                return create(kind, staging_for(kind, 2, SLOT_BYTES, "cpu"), AWAKE.set)

    ends = [one("a"), one("b")]
    try:
        yield ends[0], ends[1]
    finally:
        for end in ends:
            end.close()


def still_carries(a: Any, b: Any) -> None:
    """A message gets from a to b, as if nothing had been."""
    a.connect("b", b.info(), DEADLINE_S)
    b.connect("a", a.info(), DEADLINE_S)
    b.expect("a", 1, 0, SLOT_BYTES)
    a.push("b", 1, 1, SLOT_BYTES, b"header")
    assert isinstance(_event(a), Sent)
    arrived = _event(b)
    assert isinstance(arrived, Arrived)
    assert arrived.header == b"header"


def _event(end: Any) -> Any:
    AWAKE.clear()
    while not (events := end.poll()):
        assert AWAKE.wait(DEADLINE_S), "nothing happens"
        AWAKE.clear()
    return events[0]


def frame(random: Random, kind: int, payload: bytes) -> bytes:
    length = random.choice((len(payload), len(payload), len(payload), 0, 2**20, 2**32 - 1))
    return struct.pack("<IBQQ", length, kind, random.choice((0, 1, 2**63)), random.choice((0, 64, 2**64 - 1))) + payload


def said(random: Random, here: str) -> bytes:
    """By a stranger: frames that a peer might send, or anything."""
    if random.random() < 0.2:
        return random.randbytes(random.choice((1, 21, 4000)))
    words = [frame(random, Kind.HELLO, here.encode() + b"f" * 32)] if random.random() < 0.7 else []
    for _ in range(random.randint(1, 4)):
        note = random.choice((b"", b"{}", json.dumps(odd_json(random)).encode()[:4000], random.randbytes(40)))
        words.append(frame(random, random.choice((*Kind, 0, 255)), note))
    data = b"".join(words)
    return wrong_bytes(random, data) if random.random() < 0.3 else data


@pytest.mark.parametrize("kind", KINDS)
def test_strangers_at_the_port(kind: str) -> None:
    with pair(kind) as (a, b):
        here = PairAddress.unpack(b.info(), "b")
        heard = Counter[bool]()
        for number in range(NUM_CALLS):
            words = said(Random(f"{kind} {number}"), here.id)
            stranger = socket.create_connection(("127.0.0.1", here.port), timeout=DEADLINE_S)
            with stranger, contextlib.suppress(ConnectionError, TimeoutError):
                stranger.sendall(words)
                stranger.settimeout(HANG_UP_S)
                heard[bool(stranger.recv(4096))] += 1
        assert heard[False] > 20
        still_carries(a, b)


@pytest.mark.parametrize("kind", KINDS)
def test_addresses_that_no_peer_has(kind: str) -> None:
    """Whole, with a right checksum, and wrong inside."""
    with pair(kind) as (a, b):
        valid = json.loads(b.info()[20:])
        for number in range(NUM_ADDRESSES):
            address = _address(Random(f"{kind} {number}"), valid)
            with contextlib.suppress(TransferError):
                a.connect(f"peer-{number}", address, CONNECT_S)
            a.disconnect(f"peer-{number}")
        still_carries(a, b)


def _address(random: Random, valid: dict[str, Any]) -> bytes:
    fields = dict(valid)
    for _ in range(random.randint(1, 2)):
        name = random.choice(list(fields))
        match random.randrange(5):
            case 0:
                del fields[name]
            case 1:
                fields[name + "s"] = 1
            case 2:
                fields["hosts"] = random.choice(HOSTS)
            case 3:
                fields["port"] = random.choice((0, -1, 65536, 2**40, "80", 1.5, None))
            case _:
                fields[name] = odd_json(random)
    data = json.dumps(fields if random.random() < 0.95 else odd_json(random)).encode()
    data = data if random.random() < 0.95 else data[:-1]
    return b"BTNC" + hashlib.sha256(data).digest()[:16] + data


@pytest.mark.parametrize("kind", ["memory", *KINDS, "ucx"])
def test_damaged_addresses(kind: str) -> None:
    with pair(kind) as (a, b):
        for number in range(NUM_DAMAGED):
            random = Random(f"{kind} {number}")
            address = random.choice((wrong_bytes(random, b.info()), random.randbytes(random.choice((0, 4, 39, 300)))))
            if address == b.info():
                continue
            with pytest.raises(TransferError):
                a.connect(f"peer-{number}", address, CONNECT_S)
        still_carries(a, b)
