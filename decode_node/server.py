"""The decode node's gRPC service."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace

import grpc

from baton.v1 import node_pb2, node_pb2_grpc
from decode_node.handoffs import HandoffServer
from node.events import Event, FromPeer, PeerClosed, PeerOpened, TargetEvent
from node.handoffs.decode_links import DecodeLinks
from node.handoffs.stream import HandoffEnd
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


def serve(
    server: grpc.aio.Server, sessions: Sessions, parts: NodeParts, ours: HandoffEnd
) -> tuple[HandoffServer, DecodeLinks]:
    """Register the service and return the streams that other nodes open, and those to the decode nodes that requests
    move to."""
    handoffs = HandoffServer(ours)
    node_pb2_grpc.add_DecodeNodeServicer_to_server(DecodeNode(sessions, handoffs), server)  # type: ignore[no-untyped-call]

    def post_of_target(event: Event) -> int:
        assert isinstance(event, PeerOpened | PeerClosed | FromPeer)
        return ours.post(TargetEvent(event))

    outward = parts.outward
    assert outward is not None
    hello = replace(ours.hello, endpoints=outward.endpoints)
    to_others = replace(ours, hello=hello, transport=outward.transport, post=post_of_target)
    return handoffs, DecodeLinks(to_others)


DECODE_SIDE = RoleSide("baton.v1.DecodeNode", serve)
