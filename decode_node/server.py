"""The decode node's gRPC service."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator

import grpc

from baton.handoff_messages import Hello
from baton.trust import Trust
from baton.v1 import node_pb2, node_pb2_grpc
from decode_node.handoffs import HandoffServer
from node.decode_links import DecodeLinks
from node.events import Event, FromPeer, OfTarget, PeerClosed, PeerOpened
from node.handoff_stream import Post
from node.loop import Turn
from node.sessions import Context, Sessions
from node.shell import NodeParts, RoleSide


class DecodeNode(node_pb2_grpc.DecodeNodeServicer):
    def __init__(self, sessions: Sessions, handoffs: HandoffServer) -> None:
        self._sessions = sessions
        self._handoffs = handoffs

    async def Session(self, requests: AsyncIterator[node_pb2.RouterMessage], context: Context) -> None:  # noqa: N802
        await self._sessions.serve(context)

    async def Handoff(self, requests: AsyncIterator[node_pb2.PrefillMessage], context: Context) -> None:  # noqa: N802
        await self._handoffs.serve(context)


class HandoffStreams:
    """The streams that other nodes opened, and those to decode nodes that requests move to."""

    def __init__(self, opened_here: HandoffServer, to_others: DecodeLinks) -> None:
        self._both = opened_here, to_others

    def deliver(self, turn: Turn) -> None:
        for streams in self._both:
            streams.deliver(turn)

    async def close(self) -> None:
        for streams in self._both:
            await streams.close()


def serve(
    server: grpc.aio.Server,
    sessions: Sessions,
    hello: Hello,
    parts: NodeParts,
    post: Post,
    trust: Trust,
    silence_s: float,
) -> HandoffStreams:
    """Register the service and return the streams from and to other nodes."""
    handoffs = HandoffServer(hello, parts.transport, post, trust, sessions.limits, silence_s)
    node_pb2_grpc.add_DecodeNodeServicer_to_server(DecodeNode(sessions, handoffs), server)  # type: ignore[no-untyped-call]

    def post_of_target(event: Event) -> int:
        assert isinstance(event, PeerOpened | PeerClosed | FromPeer)
        return post(OfTarget(event))

    assert parts.outward is not None
    to_others = dataclasses.replace(hello, endpoints=parts.outward.endpoints)
    links = DecodeLinks(to_others, parts.outward.transport, post_of_target, trust, sessions.limits, silence_s)
    return HandoffStreams(handoffs, links)


DECODE_SIDE = RoleSide("baton.v1.DecodeNode", serve)
