"""The prefill node's gRPC service."""

from __future__ import annotations

from collections.abc import AsyncIterator

import grpc

from baton.v1 import node_pb2, node_pb2_grpc
from node.handoffs.decode_links import DecodeLinks
from node.handoffs.stream import HandoffEnd
from node.sessions import Context, Sessions
from node.shell import NodeParts, RoleSide


class PrefillNode(node_pb2_grpc.PrefillNodeServicer):
    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions

    async def Session(self, requests: AsyncIterator[node_pb2.RouterMessage], context: Context) -> None:  # noqa: N802
        await self._sessions.serve(context)


def serve(server: grpc.aio.Server, sessions: Sessions, parts: NodeParts, ours: HandoffEnd) -> list[DecodeLinks]:
    """Register the service and return the streams to decode nodes."""
    node_pb2_grpc.add_PrefillNodeServicer_to_server(PrefillNode(sessions), server)  # type: ignore[no-untyped-call]
    return [DecodeLinks(ours)]


PREFILL_SIDE = RoleSide("baton.v1.PrefillNode", serve)
