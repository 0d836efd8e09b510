"""Where a peer's ranks take bytes: over the transport that this node speaks, or nowhere."""

from __future__ import annotations

import dataclasses

import pytest

from baton.errors import TransferError
from baton.handoff_messages import Hello
from baton.layout import KvSlice
from baton.node_info import Route, TransportEndpoint
from node.handoffs.stream import routes_to
from tests.node.scripted import LAYOUT

HEADS = (KvSlice(0, 2, 0, 1), KvSlice(0, 2, 1, 2))
LAYERS = (KvSlice(0, 1, 0, 2), KvSlice(1, 2, 0, 2))


def hello(*endpoints: tuple[int, str], ranks: tuple[KvSlice, ...] = ()) -> Hello:
    offered = tuple(TransportEndpoint(rank, name, f"{name} {rank}".encode()) for rank, name in endpoints)
    return Hello(incarnation="i", node_id="n", layout=dataclasses.replace(LAYOUT, ranks=ranks), endpoints=offered)


def test_the_address_is_that_of_our_transport() -> None:
    assert routes_to(hello((0, "ipc")), hello((0, "ucx"), (1, "ipc"), (0, "ipc"))) == [Route(0, 0, b"ipc 0")]


def test_ranks_are_connected_that_hold_some_of_the_same() -> None:
    one, two = hello((0, "ipc")), hello((0, "ipc"), (1, "ipc"), ranks=HEADS)
    assert routes_to(one, two) == [Route(0, 0, b"ipc 0"), Route(0, 1, b"ipc 1")]
    assert routes_to(two, one) == [Route(0, 0, b"ipc 0"), Route(1, 0, b"ipc 0")]
    assert routes_to(two, two) == [Route(0, 0, b"ipc 0"), Route(1, 1, b"ipc 1")]
    assert len(routes_to(two, hello((0, "ipc"), (1, "ipc"), ranks=LAYERS))) == 4


def test_a_peer_that_speaks_another_is_refused_by_name() -> None:
    with pytest.raises(TransferError, match="ipc"):
        routes_to(hello((0, "ipc")), hello((0, "ucx")))


def test_a_peer_of_whose_ranks_one_has_no_address_is_refused_by_name() -> None:
    with pytest.raises(TransferError, match=r"ipc of rank 1 is not offered by n \(ipc of rank 0\)"):
        routes_to(hello((0, "ipc")), hello((0, "ipc"), ranks=HEADS))
