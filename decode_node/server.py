"""The decode node's gRPC service."""

from __future__ import annotations

from collections.abc import AsyncIterator

import grpc

from baton.messages import Hello
from baton.trust import Trust
from baton.v1 import node_pb2, node_pb2_grpc
from decode_node.handoffs import HandoffServer
from node.handoff_stream import PeerTransport, Post
from node.sessions import Context, Sessions
from node.shell import RoleSide


class DecodeNode(node_pb2_grpc.DecodeNodeServicer):
    def __init__(self, sessions: Sessions, handoffs: HandoffServer) -> None:
        self._sessions = sessions
        self._handoffs = handoffs

    async def Session(self, requests: AsyncIterator[node_pb2.RouterMessage], context: Context) -> None:  # noqa: N802
        await self._sessions.serve(context)

    async def Handoff(self, requests: AsyncIterator[node_pb2.PrefillMessage], context: Context) -> None:  # noqa: N802
        await self._handoffs.serve(context)


def serve(
    server: grpc.aio.Server, sessions: Sessions, hello: Hello, transport: PeerTransport, post: Post, trust: Trust
) -> HandoffServer:
    """Register the service and return the streams from prefill nodes."""
    handoffs = HandoffServer(hello, transport, post, trust, sessions.limits)
    node_pb2_grpc.add_DecodeNodeServicer_to_server(DecodeNode(sessions, handoffs), server)  # type: ignore[no-untyped-call]
    return handoffs


DECODE_SIDE = RoleSide("baton.v1.DecodeNode", serve)
