"""The routes that say how the router is."""

from __future__ import annotations

from fastapi import APIRouter
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

import baton
from baton.errors import NodeUnavailable
from baton.telemetry import RouterMetrics
from router.cluster import Cluster
from router.dispatcher import Dispatcher
from router.http.errors import response_to


class StatusRoutes:
    def __init__(
        self, cluster: Cluster, dispatcher: Dispatcher, metrics: RouterMetrics, registry: CollectorRegistry
    ) -> None:
        self._cluster = cluster
        self._dispatcher = dispatcher
        self._metrics = metrics
        self._registry = registry
        self.routes = APIRouter()
        self.routes.add_api_route("/health", self.health, methods=["GET", "HEAD"])
        self.routes.add_api_route("/ready", self.ready, methods=["GET", "HEAD"])
        self.routes.add_api_route("/metrics", self.metrics, methods=["GET"])
        self.routes.add_api_route("/version", self.version, methods=["GET", "HEAD"])

    async def health(self) -> JSONResponse:
        """The process lives."""
        return JSONResponse({"status": "ok"})

    async def ready(self) -> JSONResponse:
        """Requests can be answered; else why not."""
        reason = self._cluster.why_not_ready()
        return response_to(NodeUnavailable(reason)) if reason else JSONResponse({"status": "ready"})

    async def metrics(self) -> Response:
        self._metrics.set_requests(self._dispatcher.num_requests_by_state())
        for (role, state), count in self._cluster.num_nodes_by_state().items():
            self._metrics.nodes.labels(role, state).set(count)
        return Response(generate_latest(self._registry), media_type=CONTENT_TYPE_LATEST)

    async def version(self) -> JSONResponse:
        return JSONResponse({"version": baton.__version__})
