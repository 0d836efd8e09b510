"""`/debug/console`: the fleet and the work of this moment, in one small answer."""

from __future__ import annotations

import dataclasses
import re
import time
from typing import Any

from fastapi import APIRouter
from fastapi.responses import JSONResponse

import baton
from baton.errors import NodeUnavailable
from baton.telemetry import RouterMetrics
from baton.telemetry.pools import bottleneck
from router.http.console.work import add_up, work_of
from router.nodes.cluster import Cluster
from router.nodes.report import report_nodes
from router.requests.core import RouterCore
from router.text.models import Models
from router.workers.siblings import Siblings

PATH = "/debug/console"


class Snapshot:
    """`has_admin`: there are keys with which operators may change the fleet. `siblings`: as in DebugRequests."""

    def __init__(
        self,
        cluster: Cluster,
        core: RouterCore,
        metrics: RouterMetrics,
        models: Models,
        has_admin: bool,
        siblings: Siblings,
    ) -> None:
        self._cluster = cluster
        self._core = core
        self._models = models
        self._has_admin = has_admin
        self._siblings = siblings
        siblings.answers["work"] = lambda: work_of(metrics, core)
        self.routes = APIRouter()
        self.routes.add_api_route(PATH, self.now, methods=["GET", "HEAD"])

    async def now(self) -> JSONResponse:
        """Nodes as this process sees them, which all do alike; the work is that of all processes."""
        by_worker = await self._siblings.ask("work")
        works = [work for work in by_worker.values() if work is not None]
        pools = self._core.pool_states()
        readiness = self._cluster.readiness()
        report = dataclasses.asdict(report_nodes(self._cluster))
        seats = {info.incarnation: info.max_num_seqs for info in self._core.pool.infos()}
        nodes = [{**node, "num_seats": seats.get(node["incarnation"])} for node in report.pop("nodes")]
        snapshot = {
            "version": baton.__version__,
            "at": round(time.time(), 3),
            "is_ready": readiness.ready,
            "status": readiness.status,
            "has_admin": self._has_admin,
            "models": self._model_names(),
            "bottleneck": bottleneck(pools["prefill"], pools["decode"]),
            "num_workers": len(by_worker),
            "num_workers_answered": len(works),
            "nodes": sorted(nodes, key=_order),
            **report,
            "work": add_up(works),
        }
        return JSONResponse(snapshot, headers={"cache-control": "no-store"})

    def _model_names(self) -> list[str]:
        try:
            return [model.name for model in self._models.served()]
        except NodeUnavailable:
            return []


def _order(node: dict[str, Any]) -> tuple[bool, list[tuple[int, str]]]:
    """Prefill nodes first, each role by name, in which node-10 comes after node-9."""
    parts = re.split("([0-9]{1,18})", node["node_id"] or node["address"])  # every other one is a number
    return node["role"] != "prefill", [(int(part), "") if i % 2 else (-1, part) for i, part in enumerate(parts)]
