"""What a node tells whoever asks: its description, its tokenizer, its KV memory, health and reflection."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from baton import wire
from baton.audit import KvAudit
from baton.errors import BatonError
from baton.messages import NodeInfo
from baton.v1 import common_pb2, node_pb2, node_pb2_grpc
from engine.node.sessions import Context

PIECE_BYTES = 1024 * 1024


class NodeStatus(node_pb2_grpc.NodeStatusServicer):
    """`tokenizer` is the text of a tokenizer.json, whose digest `info` carries. `audit` raises a BatonError; None: it
    is not for whoever asks.

    Where the node takes KV bytes is said in its Hello alone.
    """

    def __init__(self, info: NodeInfo, tokenizer: bytes, audit: Callable[[], Awaitable[KvAudit]] | None) -> None:
        endpoints = tuple(dataclasses.replace(endpoint, address=b"") for endpoint in info.endpoints)
        self._info = wire.write_node_info(dataclasses.replace(info, endpoints=endpoints))
        self._tokenizer = tokenizer
        self._audit = audit

    async def Describe(self, request: node_pb2.DescribeRequest, context: Context) -> common_pb2.NodeInfo:  # noqa: N802
        return self._info

    async def GetTokenizer(  # noqa: N802
        self, request: node_pb2.GetTokenizerRequest, context: Context
    ) -> AsyncIterator[node_pb2.TokenizerChunk]:
        digest = self._info.tokenizer_digest
        if request.digest not in ("", digest):
            text = f"the tokenizer here has digest {digest}, not {request.digest}"
            await context.abort(grpc.StatusCode.NOT_FOUND, text)
        for start in range(0, len(self._tokenizer), PIECE_BYTES):
            yield node_pb2.TokenizerChunk(digest=digest, data=self._tokenizer[start : start + PIECE_BYTES])

    async def AuditKv(self, request: node_pb2.AuditKvRequest, context: Context) -> node_pb2.KvAudit:  # noqa: N802
        if self._audit is None:
            text = "this node has a cluster secret, and shows its memory at /debug/kv of its metrics port only"
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, text)
        try:
            audit = await self._audit()
        except BatonError as error:
            await context.abort(grpc.StatusCode[error.grpc_status], error.message)
        return await asyncio.to_thread(wire.write_kv_audit, audit)  # many blocks take some tenths of a second


class Health:
    """grpc.health.v1 for the whole server ("") and for each service by name."""

    def __init__(self, server: grpc.aio.Server, services: list[str]) -> None:
        self._servicer = health.aio.HealthServicer()  # type: ignore[attr-defined] # stubs without aio
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)
        self._names = ["", *services]
        reflection.enable_server_reflection([*services, health.SERVICE_NAME, reflection.SERVICE_NAME], server)

    async def serving(self) -> None:
        await asyncio.gather(*(self._servicer.set(n, health_pb2.HealthCheckResponse.SERVING) for n in self._names))

    async def stopping(self) -> None:
        """From now on NOT_SERVING, whatever else is set."""
        await self._servicer.enter_graceful_shutdown()
