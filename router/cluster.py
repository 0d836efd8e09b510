"""All nodes of a router, and whether requests can be answered."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from baton.address import HostPort
from baton.messages import NodeRole
from baton.trust import Trust
from router.dispatcher import Dispatcher
from router.models import Models
from router.nodes import NodeLink

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Readiness:
    """`why_not`: why no request would be answered. `degraded`: why requests are answered, but not as intended. Both are
    texts for people; None means that nothing is missing."""

    why_not: str | None
    degraded: str | None = None

    @property
    def ready(self) -> bool:
        return self.why_not is None

    @property
    def status(self) -> str:
        return self.why_not or (f"ready, degraded: {self.degraded}" if self.degraded else "ready")


class Cluster:
    """Links to all configured nodes. Whenever a node changes, watchers are told whether the router is ready."""

    def __init__(
        self,
        epoch: int,
        dispatcher: Dispatcher,
        models: Models,
        prefill: Sequence[HostPort],
        decode: Sequence[HostPort],
        trust: Trust,
    ) -> None:
        roles = [(address, NodeRole.PREFILL) for address in prefill] + [(a, NodeRole.DECODE) for a in decode]
        self.links = [
            NodeLink(address, role, epoch, dispatcher, models, self._changed, trust) for address, role in roles
        ]
        self._dispatcher = dispatcher
        self._tasks: list[asyncio.Task[None]] = []
        self._watchers: list[Callable[[Readiness], None]] = []
        self._said = ""
        self._draining = False
        self._was_ready = False

    def start(self) -> None:
        """Begin to connect to all nodes, in the background."""
        self._tasks = [asyncio.create_task(link.run(), name=f"node {link.address}") for link in self.links]
        self._changed()

    def watch(self, watcher: Callable[[Readiness], None]) -> None:
        self._watchers.append(watcher)
        watcher(self.readiness())

    def drain(self) -> None:
        """Report that the router is no longer ready, while running requests finish."""
        self._draining = True
        self._changed()

    async def close(self) -> None:
        """End all sessions. The nodes abort whatever they still have of this router."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def readiness(self) -> Readiness:
        """What is missing, with the problem of each node that is not in use."""
        if self._draining:
            return Readiness("the router is shutting down")
        if reason := self._dispatcher.why_not_ready():
            return Readiness(self._with_problems(reason))
        degraded = self._dispatcher.why_degraded()
        return Readiness(None, self._with_problems(degraded) if degraded else None)

    def _with_problems(self, reason: str) -> str:
        problems = [f"{link.role.value} node {link.address}: {link.problem}" for link in self.links if link.problem]
        return f"{reason} ({'; '.join(problems)})" if problems else reason

    def num_nodes_by_state(self) -> dict[tuple[str, str], int]:
        """Configured nodes by (role, "up" or "down")."""
        states = Counter((link.role.value, "down" if link.problem else "up") for link in self.links)
        return {(role.value, state): states[role.value, state] for role in NodeRole for state in ("up", "down")}

    def _changed(self) -> None:
        readiness = self.readiness()
        if readiness.status not in ("ready", self._said):
            level = logging.WARNING if self._was_ready and not self._draining else logging.INFO
            log.log(level, "%s%s", "" if readiness.ready else "not ready: ", readiness.status)
        self._was_ready = self._was_ready or readiness.ready
        self._said = readiness.status
        for watcher in self._watchers:
            watcher(readiness)
