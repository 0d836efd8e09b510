"""Where a peer takes bytes: over the transport that this node speaks, or nowhere."""

from __future__ import annotations

import pytest

from baton.errors import TransferError
from baton.messages import Hello, TransportEndpoint
from engine.node.handoff_stream import address_for
from tests.node.scripted import LAYOUT


def hello(*endpoints: tuple[int, str]) -> Hello:
    offered = tuple(TransportEndpoint(rank, name, f"{name} {rank}".encode()) for rank, name in endpoints)
    return Hello(incarnation="i", node_id="n", layout=LAYOUT, endpoints=offered)


def test_the_address_is_that_of_our_transport() -> None:
    assert address_for(hello((0, "ipc")), hello((0, "ucx"), (1, "ipc"), (0, "ipc"))) == b"ipc 0"


def test_a_peer_that_speaks_another_is_refused_by_name() -> None:
    with pytest.raises(TransferError, match="ipc"):
        address_for(hello((0, "ipc")), hello((0, "ucx")))
