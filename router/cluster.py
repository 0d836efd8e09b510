"""All nodes of a router, and whether requests can be answered."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Sequence

from baton.address import HostPort
from baton.messages import NodeRole
from router.dispatcher import Dispatcher
from router.models import Models
from router.nodes import NodeLink

log = logging.getLogger(__name__)


class Cluster:
    """Links to all configured nodes. Watchers are told with each change of a node whether the router is ready."""

    def __init__(
        self,
        epoch: int,
        dispatcher: Dispatcher,
        models: Models,
        prefill: Sequence[HostPort],
        decode: Sequence[HostPort],
    ) -> None:
        roles = [(address, NodeRole.PREFILL) for address in prefill] + [(a, NodeRole.DECODE) for a in decode]
        self.links = [NodeLink(address, role, epoch, dispatcher, models, self._changed) for address, role in roles]
        self._dispatcher = dispatcher
        self._tasks: list[asyncio.Task[None]] = []
        self._watchers: list[Callable[[bool], None]] = []
        self._said: str | None = ""
        self._draining = False
        self._was_ready = False

    def start(self) -> None:
        """Begin to connect to all nodes, in the background."""
        self._tasks = [asyncio.create_task(link.run(), name=f"node {link.address}") for link in self.links]
        self._changed()

    def watch(self, watcher: Callable[[bool], None]) -> None:
        self._watchers.append(watcher)
        watcher(self.why_not_ready() is None)

    def drain(self) -> None:
        """No longer ready, while what runs is finished."""
        self._draining = True
        self._changed()

    async def close(self) -> None:
        """End all sessions. The nodes abort what they still have of this router."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def why_not_ready(self) -> str | None:
        """For a person: what is missing, and what is wrong with each node that is not in use. None: ready."""
        if self._draining:
            return "the router is shutting down"
        reason = self._dispatcher.why_not_ready()
        if reason is None:
            return None
        problems = [f"{link.role.value} node {link.address}: {link.problem}" for link in self.links if link.problem]
        return f"{reason} ({'; '.join(problems)})" if problems else reason

    def num_nodes_by_state(self) -> dict[tuple[str, str], int]:
        """Configured nodes by (role, "up" or "down")."""
        states = Counter((link.role.value, "down" if link.problem else "up") for link in self.links)
        return {(role.value, state): states[role.value, state] for role in NodeRole for state in ("up", "down")}

    def _changed(self) -> None:
        reason = self.why_not_ready()
        if reason and reason != self._said:
            level = logging.WARNING if self._was_ready and not self._draining else logging.INFO
            log.log(level, "not ready: %s", reason)
        self._was_ready = self._was_ready or reason is None
        self._said = reason
        for watcher in self._watchers:
            watcher(reason is None)
