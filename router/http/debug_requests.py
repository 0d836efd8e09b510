"""`/debug/requests`: the requests that run, and the last that have ended; `/debug/requests/{id}`: one timeline."""

from __future__ import annotations

import re
import time
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from baton.errors import InvalidRequest
from baton.telemetry.timeline_json import describe, summary
from baton.telemetry.timeline_ring import TimelineRing
from router.requests.live_requests import LiveRequests
from router.workers.siblings import Siblings

PATH = "/debug/requests"
DEFAULT_LIMIT = 50
MAX_LIMIT = 1000
MAX_FOUND = 64
"""Prompts of one request that are shown, and of further requests of the same id."""
_ID = re.compile("[!-~]{1,160}")


class DebugRequests:
    """`ended`: timelines; `live`: the requests of this process. `siblings` are asked for theirs."""

    def __init__(self, ended: TimelineRing, live: LiveRequests, siblings: Siblings) -> None:
        self._ended = ended
        self._live = live
        self._siblings = siblings
        siblings.answers.update(requests=self._newest, timelines=self._found)
        self.routes = APIRouter()
        self.routes.add_api_route(PATH, self.recent, methods=["GET", "HEAD"])
        self.routes.add_api_route(f"{PATH}/{{request_id:path}}", self.one, methods=["GET", "HEAD"])

    async def recent(self, request: Request) -> JSONResponse:
        """Those that run and the last that have ended, by their receipt, the newest first: `?limit=` of them."""
        limit = _limit(request.query_params.get("limit"))
        by_worker = await self._siblings.ask(f"requests {limit}")
        found = [one for of_worker in by_worker.values() for one in of_worker or ()]
        found.sort(key=lambda one: one["received_at"], reverse=True)
        return JSONResponse({"requests": found[:limit]})

    async def one(self, request_id: str) -> JSONResponse:
        """All prompts of the request, by the id that its client knows, or one by its own."""
        found: list[dict[str, Any]] = []
        if _ID.fullmatch(request_id):
            by_worker = await self._siblings.ask(f"timelines {request_id}")
            found = [one for of_worker in by_worker.values() for one in of_worker or ()]
        if not found:
            raise HTTPException(404, f"No request {request_id[:160]!r} is among those remembered.")
        return JSONResponse({"requests": found})

    def _newest(self, limit: str) -> list[dict[str, Any]]:
        live = self._live.timelines(int(limit), time.monotonic())
        return [summary(timeline) for timeline in (*live, *self._ended.newest(int(limit)))]

    def _found(self, request_id: str) -> list[dict[str, Any]]:
        live = self._live.timelines_of(request_id, time.monotonic())
        return [describe(timeline) for timeline in (*live, *self._ended.find(request_id))[:MAX_FOUND]]


def _limit(given: str | None) -> int:
    """Raises InvalidRequest."""
    if given is None:
        return DEFAULT_LIMIT
    if not given.isascii() or not given.isdecimal() or len(given) > 4 or not 1 <= int(given) <= MAX_LIMIT:
        raise InvalidRequest(f"limit must be a whole number from 1 to {MAX_LIMIT}, not {given[:32]!r}", "limit")
    return int(given)
