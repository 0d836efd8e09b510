"""What follows when an attempt is lost: a Prefill of prompt and output so far, or the end of the request."""

from __future__ import annotations

from collections.abc import Set

from baton.errors import BatonError, InternalError, InvalidRequest, NodeUnavailable, Overloaded, PeerLost
from baton.incarnation import failure_domain
from baton.rpc.streams import HEARTBEAT_S
from router.placement.placement import Placement
from router.placement.routed_node import Node
from router.requests.attempts import Attempts
from router.requests.live_requests import LiveRequests
from router.requests.request_state import Attempt, AttemptState, RequestState, SampleState, Unplaced
from router.requests.retry_budget import RetryBudget
from router.requests.waiting import WaitingRoom

MAX_ATTEMPTS = 4
MAX_LOST_NODES = 2
"""A request that lost this many nodes is more likely the cause than the victim, unless one of them comes back."""
RETURN_S = 2.0
"""How long it waits for that. A node whose link alone broke is there again within a few tenths of a second."""
_MISSED_S = 2 * HEARTBEAT_S
"""A node that has told no load for so long has fallen silent already, before it was given what comes now."""


class NodeLost(NodeUnavailable):
    """The router has lost a node that ran it."""


class Recovery:
    """Limits the attempts at a request, and by `retries` those at all requests together."""

    def __init__(self, attempts: Attempts, waiting: WaitingRoom, requests: LiveRequests, retries: RetryBudget) -> None:
        self._attempts = attempts
        self._waiting = waiting
        self._requests = requests
        self._retries = retries

    def node_lost(self, node: Node, reason: str, now: float, doomed: Set[str]) -> None:
        """Attempts that depended on the node are lost. `doomed`: nodes that end with it. The loss of a node that was to
        end is nobody's fault, nor is it that of attempts that came long after it told its last load."""
        incarnation, what = node.info.incarnation, f"{node.info.role.value} node {node.info.node_id}"
        stopped = not node.takes_work
        for state in self._requests:
            attempts = [attempt for attempt in state.attempts.values() if attempt.depends_on(incarnation, stopped)]
            placed = [state.deadline - attempt.deadline_s for attempt in attempts]  # when they were
            may_be_cause = any(placed_at <= node.loaded_at + _MISSED_S for placed_at in placed)
            if not stopped and (may_be_cause or incarnation in state.blamed):
                state.lost[incarnation] = f"{what}: {reason}"
            gone = NodeLost(f"{what} lost: {reason}")
            for attempt in attempts:
                if attempt.id in state.attempts:  # one failure can end all the request's work
                    self.fail(state, attempt, gone, now, {incarnation, *doomed})

    def fail(
        self,
        state: RequestState,
        attempt: Attempt,
        error: BatonError,
        now: float,
        suspects: set[str] | None = None,
        retry: bool = False,
    ) -> None:
        """The attempt is lost: fence it, and place what is unfinished again, or end the request with `error`. The loss
        of a node needs no share of the retry budget, nor does the refusal of one that stops: it may have hundreds of
        requests ahead of it."""
        attempt.record.note_failed(error)
        self._attempts.abort(attempt)
        self._attempts.retire(state, attempt, now)
        unfinished = attempt.unfinished
        for sample in attempt.samples:
            sample.early.clear()
        if not unfinished:
            self._requests.end_if_done(state, now)
            return
        state.avoid |= suspects or set()
        is_suspect = _is_suspect(state)
        if not (retry or error.retryable) or attempt.id.attempt + 1 >= MAX_ATTEMPTS:
            self._requests.end(state, _given_up(state) if is_suspect else error, now)
            return
        tasks = [_next_task(state, attempt, group, error) for group in _groups(unfinished)]
        is_refusal = isinstance(error, NodeUnavailable) and self._attempts.leaving(attempt)
        is_free = is_refusal or isinstance(error, NodeLost | PeerLost)
        if not (is_free or self._retries.take(now, len(tasks))):
            self._requests.end(
                state, type(error)(f"{error.message}; not tried again, since too many requests are"), now
            )
            return
        if is_suspect:
            for task in tasks:
                self._waiting.hold(task)
            self._requests.end_by(state, now + RETURN_S)
        else:
            self._place(state, tasks, now, attempt)

    def node_up(self, incarnation: str, now: float) -> None:
        """If the node had been lost, its link or its silence was the cause, and no request that it ran."""
        for state in self._requests:
            state.clear_blame(incarnation)
            tasks = self._waiting.held(state)
            if tasks and not _is_suspect(state):
                for task in tasks:
                    self._waiting.remove(task)
                self._requests.end_by(state, state.deadline)
                self._place(state, tasks, now)

    def given_up(self, state: RequestState) -> BatonError | None:
        """Why an overdue request ends that waited for a node to come back. None: it did not."""
        return _given_up(state) if self._waiting.held(state) else None

    def _place(self, state: RequestState, tasks: list[Unplaced], now: float, lost: Attempt | None = None) -> None:
        """Place them, or end the request with the error of the attempt before. If that one, `lost`, has just been told
        Overloaded, and no other node can be asked, this is the end, so that the client retries later."""
        error = tasks[0].error
        assert error is not None
        try:
            for task in tasks:
                placement = self._attempts.choose(state, task.samples, now)
                if lost and isinstance(error, Overloaded) and (placement is None or _is_full(state, lost, placement)):
                    raise error
                self._attempts.place_or_wait(task, placement, now)
        except (NodeUnavailable, Overloaded, InvalidRequest) as refused:
            self._requests.end(state, error if refused is error else tasks[0].refused(refused), now)


def _is_suspect(state: RequestState) -> bool:
    """Whether so many nodes were lost while they ran it that it may be the cause. A node that only its peer reports as
    lost counts as well, in addition to one that is known to be lost: the peer often notices first, and by the time the
    router does, the next node would have the request."""
    gone = {failure_domain(node) for node in state.lost.keys() | state.blamed}
    return bool(state.lost) and len(gone) >= MAX_LOST_NODES


def _given_up(state: RequestState) -> InternalError:
    return InternalError(f"given up, since nodes were lost that ran it: {'; '.join(state.lost.values())}")


def _groups(samples: list[SampleState]) -> list[list[SampleState]]:
    """Samples that one Prefill can carry: all together while none has output, else one each."""
    return [[sample] for sample in samples] if any(sample.tokens for sample in samples) else [samples]


def _next_task(state: RequestState, lost: Attempt, group: list[SampleState], error: BatonError) -> Unplaced:
    """What follows the attempt that is lost, for these samples of it."""
    cause = "node_lost" if isinstance(error, NodeLost) else "node_error"
    whole = len(group) == len(lost.samples)
    key = lost.id.request_id if whole else f"{lost.id.request_id}/{group[0].index}"
    return Unplaced(state, group, key, lost.id.attempt + 1, error, cause)


def _is_full(state: RequestState, lost: Attempt, placement: Placement) -> bool:
    """Whether the placement is on nodes that have refused the request for lack of room. A prefill node asks its decode
    node only once it has begun: before that, it has refused the request itself, and another one may have room."""
    asked = [placement.last] if lost.state is not AttemptState.QUEUED else [placement.prefill, placement.last]
    return all(node.info.incarnation in state.avoid for node in asked)
