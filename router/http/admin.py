"""`/admin/nodes`: adds nodes to a router, and takes them away. Only with a key of its own (`--admin-api-key`)."""

from __future__ import annotations

import dataclasses
import logging
from typing import ClassVar, Literal

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field

from baton.address import HostPort
from baton.errors import InvalidRequest
from baton.node_info import NodeRole
from router.api_keys import ApiKeys
from router.discovery.source import Member
from router.http.access import authorization_of
from router.http.body import BodyReader
from router.nodes.cluster import Cluster
from router.nodes.links import NodeLink
from router.nodes.report import report_node, report_nodes

log = logging.getLogger(__name__)

PATH = "/admin/nodes"
_MAX_ADDRESS_CHARS = 512


class NoSuchNode(InvalidRequest):
    """No node of the router has that address or name, or there is no admin API."""

    http_status: ClassVar[int] = 404
    grpc_status: ClassVar[str] = "NOT_FOUND"


class NodeRequest(BaseModel):
    role: Literal["prefill", "decode"] = Field(description="what the node computes")
    address: str = Field(
        min_length=1, max_length=_MAX_ADDRESS_CHARS, description="HOST:PORT of the node's gRPC services"
    )


class AdminRoutes:
    """`keys`: of operators; None: every path is a 404. Changes last as long as the process."""

    def __init__(self, cluster: Cluster, bodies: BodyReader, keys: ApiKeys | None) -> None:
        self._cluster = cluster
        self._bodies = bodies
        self._keys = keys
        self.routes = APIRouter()
        self.routes.add_api_route(PATH, self.nodes, methods=["GET", "HEAD"])
        self.routes.add_api_route(PATH, self.add, methods=["POST"])
        self.routes.add_api_route(f"{PATH}/{{node}}", self.remove, methods=["DELETE"])
        self.routes.add_api_route(f"{PATH}/{{node}}/drain", self.drain, methods=["POST"])

    async def nodes(self, request: Request) -> JSONResponse:
        self._check(request)
        reports = report_nodes(self._cluster).nodes
        return JSONResponse({"nodes": [dataclasses.asdict(report) for report in reports]})

    async def add(self, request: Request) -> JSONResponse:
        """A node that is there already stays, and takes work again if it was drained."""
        self._check(request)
        body = await self._bodies.read(request, NodeRequest)
        try:
            address = HostPort.parse(body.address)
            self._cluster.membership.add(Member(NodeRole(body.role), address))
        except ValueError as error:
            raise InvalidRequest(f"address: {error}", "address") from None
        log.info("admin added node_address=%s role=%s", address, body.role)
        return self._shown(self._find(str(address)))

    async def remove(self, request: Request, node: str) -> JSONResponse:
        """At once: what the node has goes on elsewhere."""
        self._check(request)
        link = self._find(node)
        self._cluster.remove(link)
        log.info("admin removed node_address=%s", link.address)
        return self._shown(link)

    async def drain(self, request: Request, node: str) -> JSONResponse:
        """Nothing more is placed there; when it has finished what it has, it is removed."""
        self._check(request)
        link = self._find(node)
        self._cluster.exclude(link)
        log.info("admin drains node_address=%s", link.address)
        return self._shown(link)

    def _check(self, request: Request) -> None:
        """Raises NoSuchNode without an admin API, InvalidApiKey without a key of it."""
        if self._keys is None:
            raise NoSuchNode(f"{PATH} needs --admin-api-key, with which this router was not started.")
        self._keys.owner(authorization_of(request.scope))

    def _find(self, name: str) -> NodeLink:
        """Raises NoSuchNode, and InvalidRequest for an id of several nodes."""
        if (link := self._cluster.find(name)) is None:
            raise NoSuchNode(f"There is no node {name[:_MAX_ADDRESS_CHARS]!r}: it must be an address or a node's id.")
        return link

    def _shown(self, link: NodeLink) -> JSONResponse:
        return JSONResponse(dataclasses.asdict(report_node(link, self._cluster)))
