"""All nodes of a router, and whether requests can be answered."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from baton.address import HostPort
from baton.errors import InvalidRequest
from baton.node_info import NodeRole
from router.discovery.membership import Membership
from router.discovery.source import Member
from router.nodes.links import NodeLink
from router.placement.pool import Pool
from router.text.models import Models

log = logging.getLogger(__name__)

NUM_TOLD = 8
"""Nodes whose problems are told one by one. While 128 of them start, each that connects is told of in a line."""


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


Connect = Callable[[Member, Callable[[], None]], NodeLink]
"""Makes a link to a node, which calls the other argument when its problem is another."""


@dataclass(slots=True)
class _Running:
    """A link and its task. `ending`: it was told to end at once."""

    link: NodeLink
    task: asyncio.Task[None]
    ending: bool = False
    _timer: asyncio.TimerHandle | None = None

    def cancel(self) -> None:
        self.ending = True
        self.task.cancel()

    def drain(self, timeout_s: float) -> None:
        self.link.drain()
        self._timer = asyncio.get_running_loop().call_later(timeout_s, self.cancel)

    def resume(self) -> None:
        self.stop_timer()
        self.link.resume()

    def stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()


class Cluster:
    """A link to each node that `membership` wants: never two to one address. Links begin and end as the wanted set
    changes, and whenever a node or the set does, watchers are told whether the router is ready.

    A node that is no longer wanted gets no more work, and finishes what it has for at most `drain_timeout_s`; then its
    session ends, and what is left goes on elsewhere. `pool`: the nodes in use, as placement knows them.
    """

    def __init__(
        self,
        connect: Connect,
        pool: Pool,
        models: Models,
        membership: Membership,
        drain_timeout_s: float,
    ) -> None:
        self.membership = membership
        self.pool = pool
        self._connect = connect
        self._models = models
        self._drain_timeout_s = drain_timeout_s
        self._running: dict[HostPort, _Running] = {}
        self._watchers: list[Callable[[Readiness], None]] = []
        self._said = ""
        self._draining = False
        self._closed = False
        self._was_ready = False

    @property
    def links(self) -> list[NodeLink]:
        return [running.link for running in self._running.values()]

    def start(self) -> None:
        """Begin to connect to all nodes, in the background."""
        self.membership.start(self._reconcile)
        self._reconcile()

    def watch(self, watcher: Callable[[Readiness], None]) -> None:
        self._watchers.append(watcher)
        watcher(self.readiness())

    def drain(self) -> None:
        """Report that the router is no longer ready, while running requests finish."""
        self._draining = True
        self._changed()

    async def close(self) -> None:
        """End all sessions. The nodes abort whatever they still have of this router."""
        self._closed = True
        await self.membership.close()
        running = list(self._running.values())
        for each in running:
            each.cancel()
        await asyncio.gather(*(each.task for each in running), return_exceptions=True)

    def find(self, name: str) -> NodeLink | None:
        """The link of that address, or to the node of that id or incarnation. Raises InvalidRequest for an id of
        several nodes, as of nodes on several machines that were given none."""
        if link := next((link for link in self.links if name == str(link.address)), None):
            return link
        named = [link for link in self.links if link.info and name in (link.info.node_id, link.info.incarnation)]
        if len(named) > 1:
            addresses = ", ".join(str(link.address) for link in named[:NUM_TOLD])
            why = f"{len(named)} nodes have the id {name!r}. Name one by its address: {addresses}"
            raise InvalidRequest(why, "node")
        return named[0] if named else None

    def remove(self, link: NodeLink) -> None:
        """End the links to the node at once, whatever wants it: its requests go on elsewhere."""
        for other in self._to_same_node(link):
            if other.info:
                # so that nothing more is placed there, and its loss is no request's fault
                other.drain("is removed, and what it has goes on elsewhere")
            self._running[other.address].cancel()
        self.exclude(link)

    def exclude(self, link: NodeLink) -> None:
        """Want the node no longer, at none of the addresses at which it was found."""
        self.membership.exclude(*(other.address for other in self._to_same_node(link)))

    def _to_same_node(self, link: NodeLink) -> list[NodeLink]:
        """This link, and those to other addresses of the node that was last there."""
        known = link.incarnation
        return [other for other in self.links if other is link or (known and other.incarnation == known)]

    # ---- links come and go ----

    def _reconcile(self) -> None:
        """The wanted set may have changed."""
        if self._closed:
            return
        wanted = self.membership.wanted()
        self.pool.with_prefill = any(node.member.role is NodeRole.PREFILL for node in wanted.values())
        for address, running in list(self._running.items()):
            node = wanted.get(address)
            if node is None or node.member.role is not running.link.role:
                self._retire(running)
                continue
            running.link.name = node.member.name  # another source may know the address by another one
            if running.link.draining and not running.ending:
                running.resume()
        for address, node in wanted.items():
            if address not in self._running:
                self._open(node.member)
        self._changed()

    def _open(self, member: Member) -> None:
        link = self._connect(member, self._changed)
        no_request = contextvars.Context()  # what the link logs is not of the one that added the node
        task = asyncio.create_task(link.run(), name=f"node {link.address}", context=no_request)
        self._running[member.address] = running = _Running(link, task)
        task.add_done_callback(lambda _: self._ended(running))

    def _retire(self, running: _Running) -> None:
        """Let it finish what it has, if it has a session; else end it."""
        if running.ending or running.link.draining:
            return
        if running.link.info is None:
            running.cancel()
        else:
            running.drain(self._drain_timeout_s)

    def _ended(self, running: _Running) -> None:
        running.stop_timer()
        address = running.link.address
        del self._running[address]
        log.info("node_address=%s role=%s removed", address, running.link.role.value)
        torn_down = running.task.cancelled() and not running.ending  # the loop ends, without `close`
        if not self._closed and not torn_down:
            if address not in self.membership.wanted():
                self._models.forget(str(address))
            self._reconcile()  # it may be wanted again, or in the other role

    # ---- for people ----

    def readiness(self) -> Readiness:
        """What is missing, with the problem of each node that is not in use."""
        if self._draining:
            return Readiness("the router is shutting down")
        sources = self.membership.problems()
        if reason := self.pool.why_not_ready():
            return Readiness(self._with_problems("; ".join([reason, *sources])))
        degraded = self.pool.why_degraded(time.monotonic())
        degraded = "; ".join(([degraded] if degraded else []) + sources)
        return Readiness(None, self._with_problems(degraded) if degraded else None)

    def _with_problems(self, reason: str) -> str:
        problems = [f"{link.role.value} node {link.address}: {link.problem}" for link in self.links if link.problem]
        if len(problems) > NUM_TOLD:
            problems[NUM_TOLD:] = [f"and {len(problems) - NUM_TOLD} more"]
        return f"{reason} ({'; '.join(problems)})" if problems else reason

    def _changed(self) -> None:
        readiness = self.readiness()
        if readiness.status not in ("ready", self._said):
            level = logging.WARNING if self._was_ready and not self._draining else logging.INFO
            log.log(level, "%s%s", "" if readiness.ready else "not ready: ", readiness.status)
        self._was_ready = self._was_ready or readiness.ready
        self._said = readiness.status
        for watcher in self._watchers:
            watcher(readiness)
