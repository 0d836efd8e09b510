"""Runs the protocol's state machine: gives it events and the time, and carries out its actions.

    front ends --submit, stop, cancel-->  RouterCore  --Prefill, Abort-->  node links
    node links --up, said, lost------->               --RequestEvent---->  one sink per request

All on one asyncio thread. A sink is called at once, from within the call that caused the event.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from baton.errors import BatonError, NodeUnavailable
from baton.messages import Abort, AttemptId, KvEvents, Load, Migrate, Prefill, Update
from baton.node_info import NodeInfo, NodeRole
from baton.telemetry.pools import PoolState
from baton.telemetry.timeline import Timeline
from router.placement.routed_node import pool_state
from router.request_metrics import RequestMetrics
from router.requests.actions import Emit, ToNode
from router.requests.core import STOPPED, RouterCore
from router.requests.kv_flows import KvFlow
from router.requests.request_state import AttemptState, RequestEnd, RequestEvent, RoutedRequest

log = logging.getLogger(__name__)


class Sink(Protocol):
    """Where a request's events go. Must not raise."""

    def __call__(self, event: RequestEvent, /) -> None: ...


@dataclass(frozen=True, slots=True)
class IndexedNode:
    node_id: str
    role: str
    incarnation: str
    num_blocks: int


@dataclass(frozen=True, slots=True)
class PrefixIndexState:
    """`num_blocks`: different ones, which one node or several hold."""

    num_blocks: int
    nodes: tuple[IndexedNode, ...]


class Dispatcher:
    def __init__(self, core: RouterCore, request_metrics: RequestMetrics) -> None:
        self._core = core
        self._actions = core.actions
        self._request_metrics = request_metrics
        self._sinks: dict[str, Sink] = {}
        self._links: dict[str, Callable[[Prefill | Abort | Migrate], None]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._armed_for = 0.0  # the deadline that it is set to
        self._carrying_out = False
        self.is_closed = False

    # ---- for the front ends ----

    def submit(self, request: RoutedRequest, sink: Sink, received: float) -> None:
        """Place a request that arrived at `received` (`time.monotonic`), when its deadline began to count.

        Its events go to `sink`, RequestEnd last. Raises BatonError, after `close` NodeUnavailable; then `sink` is not
        called.
        """
        now = time.monotonic()
        try:
            if self.is_closed:
                raise NodeUnavailable(STOPPED)
            self._core.submit(request, now, received)
        except BatonError as error:
            self._request_metrics.refused(error, request)
            raise
        self._sinks[request.request_id] = sink
        self._request_metrics.opened(request, received)
        self._carry_out(now)
        self._arm()

    def stop_sample(self, request_id: str, sample: int) -> None:
        now = time.monotonic()
        self._core.stop_sample(request_id, sample, now)
        self._carry_out(now)

    def cancel(self, request_id: str) -> None:
        """The client left. Its RequestEnd still comes, during this call; idempotent."""
        now = time.monotonic()
        self._core.cancel(request_id, now)
        self._carry_out(now)

    # ---- for the node links ----

    def node_up(self, info: NodeInfo, send: Callable[[Prefill | Abort | Migrate], None]) -> None:
        """`send` takes messages for the node, in order, without blocking."""
        self._links[info.incarnation] = send
        now = time.monotonic()
        self._core.node_up(info, now)
        self._carry_out(now)

    def node_lost(self, incarnation: str, reason: str) -> None:
        self._links.pop(incarnation, None)
        now = time.monotonic()
        self._core.node_lost(incarnation, reason, now)
        self._carry_out(now)
        self._arm()  # requests may wait for it to come back, until an earlier deadline

    def drain_node(self, incarnation: str, drains: bool) -> None:
        """See RouterCore.drain_node."""
        now = time.monotonic()
        self._core.drain_node(incarnation, drains, now)
        self._carry_out(now)

    def is_on(self, incarnation: str) -> bool:
        """Whether a request still needs that node."""
        return self._core.is_on(incarnation)

    def handle_node_message(self, incarnation: str, message: tuple[Update, ...] | Load | KvEvents) -> None:
        """Raises InvalidRequest for what cannot follow the node's earlier messages: its session must end."""
        if isinstance(message, Load):
            now = time.monotonic()
            self._core.node_load(incarnation, message, now)
            self._carry_out(now)
            return
        if isinstance(message, KvEvents):
            self._core.node_blocks(incarnation, message)
            return
        now = time.monotonic()
        take, actions = self._core.update, self._actions
        for update in message:
            take(incarnation, update, now)
            if actions:
                self._carry_out(now)  # one by one: a stop string is noticed before the tokens after it count

    # ---- state, for the other parts of the router ----

    def why_not_ready(self) -> str | None:
        return self._core.pool.why_not_ready()

    def why_degraded(self) -> str | None:
        return self._core.pool.why_degraded(time.monotonic())

    def expect_prefill(self, expected: bool) -> None:
        """Whether prefill nodes are meant to be there."""
        self._core.pool.with_prefill = expected

    def version_shares(self, name: str) -> dict[str, float]:
        """See Pool.shares."""
        return self._core.pool.shares(name)

    def load_of(self, incarnation: str) -> Load | None:
        """What the node said last; None: it is not in use."""
        node = self._core.pool.get(incarnation)
        return node.load if node else None

    def unused_pairs(self) -> list[tuple[NodeInfo, NodeInfo, str]]:
        """See Pool.unused_pairs."""
        return self._core.pool.unused_pairs(time.monotonic())

    def nodes_without_partner(self) -> dict[str, str]:
        """See Pool.without_partner."""
        return self._core.pool.without_partner()

    def avoided_nodes(self) -> dict[str, str]:
        """See Pool.avoided."""
        return self._core.pool.avoided(time.monotonic())

    def num_requests_by_state(self) -> dict[str, int]:
        """Live attempts by state, including states that have none."""
        states = Counter(state.value for state in self._core.states())
        return {state.value: states[state.value] for state in AttemptState}

    def num_placements(self) -> dict[str, int]:
        """See RouterCore.num_placements."""
        return self._core.num_placements()

    def num_migrations(self) -> dict[str, int]:
        """See RouterCore.num_migrations."""
        return self._core.num_migrations()

    def live_timelines(self, number: int) -> list[Timeline]:
        """See LiveRequests.timelines."""
        return self._core.requests.timelines(number, time.monotonic())

    def live_timelines_of(self, client_id: str) -> list[Timeline]:
        """See LiveRequests.timelines_of."""
        return self._core.requests.timelines_of(client_id, time.monotonic())

    def pools(self) -> dict[str, PoolState]:
        """The nodes of each role, as of what they said last. What waits here waits for room on decode nodes."""
        withheld = {NodeRole.DECODE: self.num_requests_by_state()[AttemptState.UNPLACED.value]}
        return {role.value: pool_state(self._core.pool.role(role), withheld.get(role, 0)) for role in NodeRole}

    def kv_flows(self) -> list[KvFlow]:
        """Bytes of KV from node to node, since the start."""
        return self._core.kv_flows.totals()

    def num_tokens_by_node(self) -> dict[str, int]:
        """What each node in use has computed of prompts and generated, for this process; by incarnation."""
        return self._core.pool.num_tokens()

    def num_seats(self) -> dict[str, int]:
        """Of each node in use, by incarnation: the requests that may run there at once."""
        return {info.incarnation: info.max_num_seqs for info in self._core.pool.infos()}

    def prefix_index(self) -> PrefixIndexState:
        """How much is known of the nodes' prefix caches: prefill nodes first, each role by the nodes' ids."""
        index = self._core.prefix_index
        nodes = sorted(self._core.pool.infos(), key=lambda n: (n.role is not NodeRole.PREFILL, n.node_id))
        known = tuple(
            IndexedNode(n.node_id, n.role.value, n.incarnation, index.num_blocks(n.incarnation)) for n in nodes
        )
        return PrefixIndexState(len(index), known)

    def close(self) -> None:
        """End all live requests, and take no more: their clients are told that the server was stopped."""
        self.is_closed = True
        now = time.monotonic()
        self._core.stop(now)
        self._carry_out(now)
        if self._timer:
            self._timer.cancel()
            self._timer = None

    def _carry_out(self, now: float) -> None:
        """Carry out all actions, and those that they cause: a sink may call back into `stop_sample` and `cancel`.
        `now`: when what caused them came, so that metrics and timelines tell the same times."""
        if self._carrying_out:
            return
        self._carrying_out = True
        actions = self._actions
        try:
            while actions:
                action = actions.popleft()
                if isinstance(action, ToNode):
                    self._send(action)
                else:
                    self._emit(action, now)
        finally:
            self._carrying_out = False

    def _send(self, action: ToNode) -> None:
        if isinstance(action.message, Prefill):
            if action.cause:
                self._request_metrics.retried(action.cause, action.message.attempt_id.request_id)
                _log_retry(action.message.attempt_id, action.cause)
        elif isinstance(action.message, Abort):
            self._arm()  # a request whose attempt has failed may have got an earlier deadline
        if send := self._links.get(action.incarnation):
            send(action.message)

    def _emit(self, emit: Emit, now: float) -> None:
        request_id, event = emit
        self._request_metrics.event(request_id, event, now)
        sink = self._sinks[request_id]
        if isinstance(event, RequestEnd):
            del self._sinks[request_id]
        sink(event)

    def _arm(self) -> None:
        """Set the only timer to the next deadline. It fires in vain for a request that has ended early."""
        deadline = self._core.next_deadline()
        if deadline is None or (self._timer is not None and self._armed_for <= deadline):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._armed_for = deadline
        self._timer = asyncio.get_running_loop().call_later(max(0.001, deadline - time.monotonic()), self._tick)

    def _tick(self) -> None:
        self._timer = None
        now = time.monotonic()
        self._core.tick(now)
        self._carry_out(now)
        self._arm()


def _log_retry(attempt_id: AttemptId, cause: str) -> None:
    log.warning(
        "tried again attempt=%d cause=%s", attempt_id.attempt, cause, extra={"request_id": attempt_id.request_id}
    )
