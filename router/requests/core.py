"""The router's half of the protocol, as a state machine: events and the time go in, actions come out.

It has no sockets and no clock: the front ends and the node streams carry messages to and from it, and tests race it in
every order. It keeps these rules: tokens and ends count only from the current attempt; a gap in a sample's indexes
fails the attempt; if an attempt is lost, the next one is a Prefill of prompt and output so far; a request that no node
can take at the moment waits for one; each request ends exactly once, after its client got everything accepted so far.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from random import Random

from baton.errors import InvalidRequest, NodeUnavailable, RequestCancelled
from baton.incarnation import failure_domain
from baton.messages import KvEvents, Load, Update
from baton.node_info import NodeInfo, NodeRole
from baton.telemetry.pools import PoolState
from router.placement.pool import Pool
from router.placement.prefix_index import PrefixIndex
from router.placement.routed_node import pool_state
from router.policies import Policy
from router.requests.actions import Action, Outbox
from router.requests.attempts import Attempts
from router.requests.live_requests import LiveRequests
from router.requests.migrations import Migrations
from router.requests.rebalancing import Rebalancing
from router.requests.recovery import Recovery
from router.requests.request_state import AttemptState, FirstToken, RequestState, RoutedRequest, SampleState, Unplaced
from router.requests.retry_budget import RetryBudget
from router.requests.updates import Updates
from router.requests.waiting import WaitingRoom

STOPPED = "the server was stopped before the request had finished"


class RouterCore:
    """All live requests of one router, as their clients see them; `attempts` has them as the nodes do.

    `epoch` identifies this run of the router; `with_prefill`: it has prefill nodes, now or later; `first_token`:
    whether what these sample is told at once, or when the decode node goes on with it; `max_waiting`: how many
    requests, or single samples of them, may wait for a node; `policy`: which nodes get what, by default the least
    loaded; `draw`: what it draws from; `migrate_above`: see Rebalancing; `max_waiting_tokens`: see WaitingRoom.
    """

    def __init__(
        self,
        epoch: int,
        with_prefill: bool = True,
        first_token: FirstToken = "prefill",
        max_waiting: int = 1024,
        policy: Policy | None = None,
        draw: Random | None = None,
        migrate_above: float | None = None,
        max_waiting_tokens: int = 0,
    ) -> None:
        self.pool = Pool(with_prefill, policy, draw)
        self.prefix_index = PrefixIndex()
        self._retries = RetryBudget()
        outbox = Outbox(holds=first_token == "decode")
        self.actions: deque[Action] = outbox.actions
        """All that are still to be carried out, in order: who does so removes them from the left."""
        self._waiting = WaitingRoom(max_waiting, max_waiting_tokens)
        self._attempts = Attempts(epoch, self.pool, self.prefix_index, outbox, self._waiting)
        self.requests = LiveRequests(self._attempts, self._waiting, outbox)
        self._migrations = Migrations(self.pool, self._attempts, outbox)
        self._rebalancing = Rebalancing(self.pool, self._attempts, self._migrations, migrate_above)
        self._recovery = Recovery(self._attempts, self._waiting, self.requests, self._retries)
        updates = Updates(self.pool, self._attempts, self.requests, self._migrations, self._recovery, outbox)
        self.update: Callable[[str, Update, float], None] = updates.take
        """Take one update of a node, by its incarnation: see `Updates.take`."""
        self.kv_flows = updates.kv_flows
        self.next_deadline: Callable[[], float | None] = self.requests.next_deadline
        """When `tick` is to be called; None: no request is live."""

    # ---- from nodes ----

    def node_up(self, info: NodeInfo, now: float) -> None:
        """A node is subscribed: work may be placed there, beginning with requests that wait for a node."""
        self.pool.add(info, now)
        self.prefix_index.add(info.incarnation, info.num_blocks)
        self._recovery.node_up(info.incarnation, now)
        self._place_waiting(now)

    def _place_waiting(self, now: float) -> None:
        for state, gone in self._attempts.place_waiting(now):
            self.requests.end(state, gone, now)

    def node_lost(self, incarnation: str, reason: str, now: float) -> None:
        """The node's stream ended or went silent. Attempts that depended on the node are lost."""
        node = self.pool.get(incarnation)
        if node is None:
            return
        if node.takes_work:  # else it was to end, which is nobody's fault
            self.pool.failed(incarnation, reason, now)
        self.pool.remove(incarnation)
        self.prefix_index.forget(incarnation)
        self._migrations.node_lost(incarnation)
        self._rebalancing.forget(incarnation)
        domain = failure_domain(incarnation)
        doomed = {info.incarnation for info in self.pool.infos() if failure_domain(info.incarnation) == domain}
        self._recovery.node_lost(node, reason, now, doomed)

    def node_load(self, incarnation: str, load: Load, now: float) -> None:
        self.pool.update_load(incarnation, load, now)
        if self._waiting:
            self._place_waiting(now)
        self._empty_if_leaving(incarnation, now)
        self._rebalancing.loaded(incarnation, now)

    def drain_node(self, incarnation: str, drains: bool, now: float) -> None:
        """Place nothing more on the node, or place work there again. What it has goes on, if it can on other nodes."""
        if node := self.pool.get(incarnation):
            node.drains = drains
            self._place_waiting(now)
            self._empty_if_leaving(incarnation, now)

    def _empty_if_leaving(self, incarnation: str, now: float) -> None:
        node = self.pool.get(incarnation)
        if node is not None and not node.takes_work:
            self._migrations.empty(incarnation, now)

    def is_on(self, incarnation: str) -> bool:
        """Whether a request still needs that node."""
        return self._attempts.is_on(incarnation)

    def node_blocks(self, incarnation: str, events: KvEvents) -> None:
        """Raises InvalidRequest if events are missing before these: the node's session must end."""
        self.prefix_index.apply(incarnation, events)

    def num_placements(self) -> dict[str, int]:
        """By what was decided, since the start: `Placement.kind`, or that an attempt waited for a node."""
        return dict(self._attempts.num_placements)

    def num_migrations(self) -> dict[str, int]:
        """By outcome, since the start: see Migrations."""
        return dict(self._migrations.num_by_outcome)

    def states(self) -> list[AttemptState]:
        """The states of all live work."""
        return self._attempts.states()

    def num_requests_by_state(self) -> dict[str, int]:
        """Live attempts by state, including states that have none."""
        states = Counter(self.states())
        return {state.value: states[state] for state in AttemptState}

    def pool_states(self) -> dict[str, PoolState]:
        """The nodes of each role, as of what they said last. What waits here waits for room on decode nodes."""
        num_waiting = {NodeRole.DECODE: len(self._waiting)}
        return {role.value: pool_state(self.pool.role(role), num_waiting.get(role, 0)) for role in NodeRole}

    # ---- from clients ----

    def submit(self, request: RoutedRequest, now: float, received: float | None = None) -> None:
        """Place a new request, or have it wait for a node. Its deadline and its age count from when it was `received`,
        before its body was read and tokenized; None: now. Raises InvalidRequest; Overloaded; NodeUnavailable when the
        present nodes do not fit together, or when too many requests wait already."""
        if request.request_id in self.requests:
            raise InvalidRequest(f"request id {request.request_id} is in use", "request_id")
        samples = [SampleState(i) for i in range(request.n)]
        arrived = now if received is None else received
        state = RequestState(request, arrived, arrived + request.deadline_s, samples)
        state.record.submitted_at_s = now - arrived
        placement = self._attempts.choose(state, samples, now)
        self._attempts.place_or_wait(Unplaced(state, samples, request.request_id, 0), placement, now)
        self.requests.add(state)
        self._retries.request(now)

    def stop_sample(self, request_id: str, sample: int, now: float) -> None:
        """A stop string ended the sample: tokens after it are neither delivered nor counted."""
        state = self.requests.get(request_id)
        if state is None or state.samples[sample].ended:
            return
        state.samples[sample].ended = True
        state.samples[sample].early.clear()
        state.samples[sample].held.clear()
        for attempt in list(state.attempts.values()):
            if state.samples[sample] in attempt.samples:
                if attempt.unfinished:
                    self._attempts.abort(attempt, (sample,))
                else:
                    self._attempts.abort(attempt)
                    self._attempts.retire(state, attempt, now)
        for waiting in [w for w in state.unplaced if all(s.ended for s in w.samples)]:
            self._waiting.remove(waiting)
        self.requests.end_if_done(state, now)

    def cancel(self, request_id: str, now: float) -> None:
        """The client went away."""
        if state := self.requests.get(request_id):
            self.requests.end(state, RequestCancelled("the client went away"), now)

    def stop(self, now: float) -> None:
        """End all live requests: the router stops."""
        for state in self.requests:
            self.requests.end(state, NodeUnavailable(STOPPED), now)

    # ---- time ----

    def tick(self, now: float) -> None:
        for state in self.requests.overdue(now):
            if error := self._recovery.given_up(state):
                self.requests.end(state, error, now)
            elif state.deadline <= now:
                self.requests.end(state, state.overdue(self.pool.why_not_ready(state.version)), now)
            else:  # what waited for a node to come back has ended by itself
                self.requests.end_by(state, state.deadline)
