"""The services that report on a node: its description, tokenizer, KV memory, health and reflection."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from http import HTTPStatus
from urllib.parse import unquote

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from baton import wire
from baton.audit import OK, KvAudit
from baton.errors import BatonError
from baton.node_info import NodeInfo
from baton.telemetry import AdminGate, Page
from baton.v1 import common_pb2, node_pb2, node_pb2_grpc
from node.auditor import Auditor
from node.sessions import Context

PIECE_BYTES = 1024 * 1024
_BLOCKS_PER_PIECE = 100


class NodeStatus(node_pb2_grpc.NodeStatusServicer):
    """`tokenizer` is the text of a tokenizer.json, whose digest is in `info`. `gate` controls access to audits. The
    transports' addresses are left out: they are sent in the Hello only."""

    def __init__(self, info: NodeInfo, tokenizer: bytes, auditor: Auditor, gate: AdminGate) -> None:
        endpoints = tuple(replace(endpoint, address=b"") for endpoint in info.endpoints)
        self._info = wire.write_node_info(replace(info, endpoints=endpoints))
        self._tokenizer = tokenizer
        self._auditor = auditor
        self._gate = gate

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
        metadata = {name: str(value) for name, value in context.invocation_metadata() or ()}
        if denied := self._gate.denies(_host(context.peer()), metadata.get("authorization")):
            await context.abort(grpc.StatusCode[denied.grpc_status], denied.reason)
        try:
            pieces = await asyncio.wrap_future(self._auditor.audit(_message_pieces))
        except BatonError as error:
            await context.abort(grpc.StatusCode[error.grpc_status], error.message)
        audit = node_pb2.KvAudit()
        for piece in pieces:
            audit.MergeFrom(piece)
        return audit


def admin_pages(auditor: Auditor) -> dict[str, Page]:
    """Pages for operators only, with a bounded cost to the engine."""

    async def integrity() -> tuple[HTTPStatus, str]:
        verdict = await asyncio.wrap_future(auditor.integrity())
        return (HTTPStatus.OK if verdict == OK else HTTPStatus.SERVICE_UNAVAILABLE), verdict

    async def debug_kv() -> tuple[HTTPStatus, str]:
        pieces = await asyncio.wrap_future(auditor.audit(KvAudit.json_pieces))
        return HTTPStatus.OK, "".join(pieces)

    return {"/integrity": integrity, "/debug/kv": debug_kv}


def _message_pieces(audit: KvAudit) -> Iterator[node_pb2.KvAudit]:
    """Messages that merge into the whole audit: converting thousands of blocks takes half a second."""
    yield wire.write_kv_audit(replace(audit, blocks=()))
    rest = replace(audit, holders=(), slots=())
    for first in range(0, len(audit.blocks), _BLOCKS_PER_PIECE):
        yield wire.write_kv_audit(replace(rest, blocks=audit.blocks[first : first + _BLOCKS_PER_PIECE]))


def _host(peer: str) -> str:
    """The address in gRPC's name of a peer (`ipv4:127.0.0.1:80`, `ipv6:%5B::1%5D:80`); empty if it has none."""
    kind, _, address = peer.partition(":")
    return unquote(address).rpartition(":")[0].strip("[]") if kind in ("ipv4", "ipv6") else ""


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
        """Report NOT_SERVING from now on, whatever else is set."""
        await self._servicer.enter_graceful_shutdown()
