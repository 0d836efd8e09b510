"""The routes that report the router's state."""

from __future__ import annotations

import dataclasses

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from prometheus_client import CollectorRegistry

import baton
from baton.errors import NodeUnavailable
from baton.telemetry import RouterMetrics, metrics_page
from router.http.console.snapshot import Snapshot
from router.http.debug_requests import DebugRequests
from router.http.errors import response_to
from router.nodes.cluster import Cluster
from router.nodes.report import num_nodes_by_state, report_nodes, report_prefix_index
from router.requests.admission import Admission
from router.requests.core import RouterCore
from router.workers.metrics import AllWorkersMetrics, plain_metrics
from router.workers.siblings import Siblings


class StatusRoutes:
    """As one of several workers, /load and /metrics speak for all, with the help of `siblings`. `requests`: the pages
    of their timelines. `snapshot`: what the console reads."""

    def __init__(
        self,
        cluster: Cluster,
        core: RouterCore,
        metrics: RouterMetrics,
        registry: CollectorRegistry,
        admission: Admission,
        siblings: Siblings,
        requests: DebugRequests,
        snapshot: Snapshot,
    ) -> None:
        self._cluster = cluster
        self._core = core
        self._metrics = metrics
        self._registry = registry
        self.siblings = siblings
        siblings.answers["load"] = lambda: admission.num_requests
        siblings.answers["metrics"] = lambda: plain_metrics(self._current())
        self.routes = APIRouter()
        self.routes.include_router(requests.routes)
        self.routes.include_router(snapshot.routes)
        self.routes.add_api_route("/health", self.health, methods=["GET", "HEAD"])
        self.routes.add_api_route("/ping", self.health, methods=["GET", "HEAD", "POST"])
        self.routes.add_api_route("/load", self.load, methods=["GET", "HEAD"])
        self.routes.add_api_route("/ready", self.ready, methods=["GET", "HEAD"])
        self.routes.add_api_route("/health_generate", self.ready, methods=["GET", "HEAD"])  # SGLang's name
        self.routes.add_api_route("/metrics", self.metrics, methods=["GET", "HEAD"])
        self.routes.add_api_route("/debug/prefix_index", self.prefix_index, methods=["GET", "HEAD"])
        self.routes.add_api_route("/debug/nodes", self.nodes, methods=["GET", "HEAD"])
        self.routes.add_api_route("/version", self.version, methods=["GET", "HEAD"])

    async def health(self) -> JSONResponse:
        """The process is alive."""
        return JSONResponse({"status": "ok"})

    async def load(self) -> JSONResponse:
        """The prompts in flight, of both front ends: what --max-num-requests bounds."""
        by_worker = await self.siblings.ask("load")
        return JSONResponse({"server_load": sum(count or 0 for count in by_worker.values())})

    async def prefix_index(self) -> JSONResponse:
        """How many KV blocks of each node's prefix cache the router knows of."""
        return JSONResponse(dataclasses.asdict(report_prefix_index(self._core)))

    async def nodes(self) -> JSONResponse:
        """Every node, in use or not, and which of them are not paired."""
        return JSONResponse(dataclasses.asdict(report_nodes(self._cluster)))

    async def ready(self, request: Request) -> JSONResponse:
        """200 if requests are answered, even if degraded; else 503 with the reason."""
        readiness = self._cluster.readiness()
        if readiness.why_not:
            return response_to(NodeUnavailable(readiness.why_not), request.scope)
        return JSONResponse({"status": readiness.status})

    async def metrics(self, request: Request) -> Response:
        registry = self._current()
        if self.siblings.place is not None:
            registry = AllWorkersMetrics(await self.siblings.ask("metrics"))
        page, kind = metrics_page(registry, request.headers.get("accept"))
        return Response(page, headers={"Content-Type": kind})

    def _current(self) -> CollectorRegistry:
        """This process's registry, with gauges of this moment."""
        self._metrics.set_requests(self._core.num_requests_by_state())
        for (role, state), count in num_nodes_by_state(self._cluster).items():
            self._metrics.nodes.labels(role, state).set(count)
        self._metrics.set_placements(self._core.pool.policy_name, self._core.num_placements())
        self._metrics.pools.set(self._core.pool_states())
        self._metrics.set_migrations(self._core.num_migrations())
        indexed = report_prefix_index(self._core).nodes
        self._metrics.set_prefix_index({node.node_id: node.num_blocks for node in indexed})
        return self._registry

    async def version(self) -> JSONResponse:
        return JSONResponse({"version": baton.__version__})
