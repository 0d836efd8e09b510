"""What stands for gRPC streams between the nodes and the router of one process: what passes, what is dropped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from baton.handoff_messages import CommitReply, Hello, Release, Reserve
from baton.messages import AttemptId, DecodeTarget, End, KvEvents, Load, Update
from baton.node_info import NodeRole, TransportEndpoint
from baton_llm.local.handoff_link import HandoffLink
from baton_llm.local.router_link import RouterLink
from node.events import (
    BlocksChanged,
    BlocksHeld,
    ClosePeer,
    CloseSession,
    Event,
    FromPeer,
    Output,
    PeerClosed,
    PeerOpened,
    SessionLost,
    SessionOpened,
    ToDecode,
    ToPrefill,
)
from node.loop import Turn
from router.placement.prefix_index import PrefixIndex
from tests.router.rig import info

ATTEMPT = AttemptId(7, "r", 0)
RESERVE = Reserve(ATTEMPT, "d", 16, (), 1, 60.0, 64)
RELEASE = Release(ATTEMPT)
REPLY = CommitReply(1, ATTEMPT)
TARGET = DecodeTarget("here", "d")


class FakeNode:
    """Of a LocalNode what links use; events are numbered as a NodeLoop does."""

    def __init__(self, name: str, role: NodeRole, part_blocks: int = 4) -> None:
        self.info = info(name, role)
        endpoints = (TransportEndpoint(0, "memory", name.encode()),)
        self.hello = Hello(name, name, self.info.layout, endpoints, part_blocks=part_blocks)
        self.events: list[Event] = []
        self.connections: list[str] = []
        self.transport = self

    def post(self, event: Event) -> int:
        self.events.append(event)
        return len(self.events)

    def connect(self, peer: str, routes: Any, timeout_s: float) -> None:
        assert [route.address for route in routes] == [peer.encode()]
        self.connections.append(peer)

    def disconnect(self, peer: str) -> None:
        self.connections.remove(peer)


def turn(*outputs: Output, handled: int) -> Turn:
    return Turn(list(outputs), handled, Load(), False, None)


@pytest.fixture
def nodes() -> tuple[FakeNode, FakeNode]:
    return FakeNode("p", NodeRole.PREFILL), FakeNode("d", NodeRole.DECODE, part_blocks=2)


@pytest.fixture
def link(nodes) -> HandoffLink:
    return HandoffLink(*nodes)


def test_a_reserve_opens_and_both_hear_of_it_first(nodes, link):
    prefill, decode = nodes
    link.deliver_prefill(turn(ToDecode(TARGET, RELEASE), handled=0))
    assert decode.events == []  # there is nothing to release
    link.deliver_prefill(turn(ToDecode(TARGET, RESERVE), ToDecode(TARGET, RELEASE), handled=0))
    assert prefill.events == [PeerOpened("d", 2, decode.info.layout, "d")]
    opened = PeerOpened("p", 2, prefill.info.layout, "p")
    assert decode.events == [opened, FromPeer("p", RESERVE), FromPeer("p", RELEASE)]
    assert (prefill.connections, decode.connections) == (["d"], ["p"])
    link.deliver_decode(turn(ToPrefill("p", REPLY), handled=1))
    assert prefill.events[1:] == [FromPeer("d", REPLY)]


def test_a_role_that_closes_it_has_both_told(nodes, link):
    prefill, decode = nodes
    link.deliver_prefill(turn(ToDecode(TARGET, RESERVE), handled=0))
    link.deliver_decode(turn(ClosePeer("p", "a part is lost"), ToPrefill("p", REPLY), handled=1))
    assert prefill.events[1:] == [PeerClosed("d", "a part is lost")]
    assert decode.events[2:] == [PeerClosed("p", "a part is lost")]
    assert (prefill.connections, decode.connections) == ([], [])
    link.deliver_decode(turn(ClosePeer("p", "again"), handled=1))
    assert len(prefill.events) == 2


def test_what_a_role_said_before_it_heard_of_the_end_is_dropped(nodes, link):
    prefill, decode = nodes
    link.deliver_prefill(turn(ToDecode(TARGET, RESERVE), handled=0))
    link.deliver_prefill(turn(ClosePeer("d", "why"), handled=1))
    before = len(decode.events)
    link.deliver_prefill(turn(ToDecode(TARGET, RESERVE), handled=1))  # it has not handled its PeerClosed, number 2
    assert len(decode.events) == before
    link.deliver_prefill(turn(ToDecode(TARGET, RESERVE), handled=2))
    assert decode.events[before + 1 :] == [FromPeer("p", RESERVE)]
    link.deliver_decode(turn(ToPrefill("p", REPLY), handled=before))  # of the stream before
    link.deliver_decode(turn(ToPrefill("p", REPLY), handled=before + 1))
    assert prefill.events[2:] == [PeerOpened("d", 2, decode.info.layout, "d"), FromPeer("d", REPLY)]


# ---- the router's session ----


class FakeDispatcher:
    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.send: Callable[[Any], None] = lambda message: None

    def node_up(self, node: Any, send: Callable[[Any], None]) -> None:
        self.calls.append(("up", node.incarnation))
        self.send = send

    def node_lost(self, incarnation: str, reason: str) -> None:
        self.calls.append(("lost", incarnation, reason))

    def handle_node_message(self, incarnation: str, message: Any) -> None:
        if not isinstance(message, Load):
            self.calls.append(("said", incarnation, message))


def test_updates_and_work_pass_and_a_session_that_is_ended_begins_anew(nodes):
    prefill, dispatcher = nodes[0], FakeDispatcher()
    link = RouterLink(prefill, dispatcher, epoch=7)  # type: ignore[arg-type]
    link.open()
    assert prefill.events == [SessionOpened(7)]
    dispatcher.send("work")
    assert prefill.events[1:] == ["work"]
    update = Update(ATTEMPT, End())
    link.deliver(turn(update, handled=0))  # before the role knew the session
    link.deliver(turn(update, update, handled=1))
    link.deliver(turn(CloseSession(7, "too much"), handled=2))
    assert prefill.events[2:] == [SessionLost(7), SessionOpened(7)]
    link.deliver(turn(update, handled=3))  # of the session before
    assert dispatcher.calls == [("up", "p"), ("said", "p", (update, update)), ("lost", "p", "too much"), ("up", "p")]


def test_the_router_hears_of_the_prefix_cache_at_once_and_from_the_beginning_in_each_session(nodes):
    prefill, dispatcher = nodes[0], FakeDispatcher()
    link = RouterLink(prefill, dispatcher, epoch=7)  # type: ignore[arg-type]
    link.open()
    many = [number.to_bytes(32, "little") for number in range(50_000)]
    link.deliver(turn(BlocksHeld(7, many[:2]), BlocksChanged({many[0]: False}), handled=1))
    link.deliver(turn(BlocksChanged(dict.fromkeys(many, True)), handled=1))  # more than waits in a stream
    index = PrefixIndex()
    index.add("p", len(many))
    said = [call[2] for call in dispatcher.calls if call[0] == "said"]
    for events in said:
        index.apply("p", events)
    assert said[0] == KvEvents(0, (many[1],), (many[0],), snapshot=True)
    assert index.num_blocks("p") == len(many)
    link.deliver(turn(CloseSession(7, "too much"), handled=2))
    link.deliver(turn(BlocksHeld(7, many[:1]), handled=4))
    assert dispatcher.calls[-1][2] == KvEvents(0, (many[0],), snapshot=True)
