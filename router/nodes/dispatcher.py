"""Runs the protocol's state machine: gives it events and the time, and carries out its actions.

    front ends --submit, stop, cancel-->  RouterCore  --Prefill, Abort-->  node links
    node links --up, said, lost------->               --RequestEvent---->  one sink per request

All on one asyncio thread. A sink is called at once, from within the call that caused the event.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from baton.errors import BatonError, NodeUnavailable
from baton.messages import Abort, AttemptId, KvEvents, Load, Migrate, Prefill, Update
from baton.node_info import NodeInfo
from router.request_metrics import RequestMetrics
from router.requests.actions import Emit, ToNode
from router.requests.core import STOPPED, RouterCore
from router.requests.request_state import RequestEnd, RequestEvent, RoutedRequest

log = logging.getLogger(__name__)


Sink = Callable[[RequestEvent], None]
"""Where a request's events go. Must not raise."""


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
