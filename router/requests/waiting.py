"""The router's waiting room: requests for which there is no node at the moment, or no room on a decode node."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass

from baton.errors import NodeUnavailable
from baton.priority import due_s
from baton.waiting_queue import WaitingQueue
from router.placement.rates import Mean
from router.requests.admission import Full, room_after_s
from router.requests.request_state import RequestState, Unplaced
from router.versions import ModelVersion


@dataclass(frozen=True, slots=True)
class _Wait:
    """`queue`: the version whose queue it is in, since a request's may change with another task of it."""

    queue: ModelVersion | None
    num_tokens: int
    since: float


class WaitingRoom:
    """A queue for each version, in the order in which requests are due. In each, at most `max_requests` wait for a
    node, and requests of at most `max_tokens` (of prompts and wanted answers; 0: no limit) for room on one, so that a
    model without nodes costs no other a request; but a request that was taken is never refused later. Keeps
    `RequestState.unplaced` up to date."""

    def __init__(self, max_requests: int, max_tokens: int) -> None:
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self._queues: dict[ModelVersion | None, WaitingQueue[Unplaced]] = {}  # none is empty
        self._waits: dict[Unplaced, _Wait | None] = {}  # none: in no queue
        self._serials = itertools.count()
        self._waited_s = Mean()
        self._num_tokens: Counter[ModelVersion | None] = Counter()  # of all that wait, by queue

    def __len__(self) -> int:
        return len(self._waits)

    def queues(self) -> list[list[Unplaced]]:
        """The tasks of each version, in order; first those of the version whose first one is due first."""
        ranked = sorted((queue.rank_of(next(iter(queue))), list(queue)) for queue in self._queues.values())
        return [tasks for _, tasks in ranked]

    def versions(self) -> list[ModelVersion]:
        """Those that requests wait for."""
        return [version for version in self._queues if version is not None]

    def of(self, version: ModelVersion) -> list[Unplaced]:
        """The tasks of that version, in order."""
        return list(self._queues[version])

    def follow(self, task: Unplaced, version: ModelVersion) -> None:
        """Have the task wait among those of that version, which it becomes one of."""
        wait = self._waits[task]
        assert wait is not None
        self.remove(task)
        task.request_state.version = version
        self._add(task, wait.since)

    def is_behind_others(self, task: Unplaced) -> bool:
        """Whether others of its version wait that come before it."""
        queue = self._queues.get(task.request_state.version)
        return queue is not None and queue.num_up_to(_due_s(task)) > 0

    def add_for_node(self, task: Unplaced, why: str, now: float) -> None:
        """Raises NodeUnavailable if too many wait already; its text says `why` there is no node."""
        num_waiting = len(self._queues.get(task.request_state.version, ()))
        if task.attempt == 0 and num_waiting >= self._max_requests:
            raise NodeUnavailable(f"{why}, and {self._max_requests} requests wait for one already")
        self._add(task, now)

    def add_for_room(self, task: Unplaced, now: float) -> None:
        """Raises Full if requests of too many tokens wait already. One that is alone always may."""
        limit, waiting, num_tokens = self._max_tokens, self._num_tokens[task.request_state.version], _num_tokens(task)
        if task.attempt == 0 and limit and waiting and waiting + num_tokens > limit:
            missing_share = (waiting + num_tokens - limit) / waiting
            message = f"requests of {waiting} of {limit} tokens wait for decode nodes (--max-waiting-tokens)"
            raise Full(message, room_after_s(missing_share, self._waited_s.value))
        self._add(task, now)

    def hold(self, task: Unplaced) -> None:
        """The task waits in no queue: only for its caller to remove it."""
        self._waits[task] = None
        task.request_state.unplaced.append(task)

    def held(self, state: RequestState) -> list[Unplaced]:
        """The tasks of the request that wait in no queue."""
        return [task for task in state.unplaced if self._waits[task] is None]

    def placed(self, task: Unplaced, now: float) -> None:
        """The task waits no longer: it has its nodes."""
        wait = self._waits[task]
        assert wait is not None
        self._waited_s.learn(now - wait.since)
        self.remove(task)

    def remove(self, task: Unplaced) -> None:
        """The task waits no longer."""
        task.request_state.unplaced.remove(task)
        wait = self._waits.pop(task)
        if wait is None:
            return
        self._queues[wait.queue].remove(task)
        self._num_tokens[wait.queue] -= wait.num_tokens
        if not self._queues[wait.queue]:
            del self._queues[wait.queue], self._num_tokens[wait.queue]

    def _add(self, task: Unplaced, now: float) -> None:
        wait = self._waits[task] = _Wait(task.request_state.version, _num_tokens(task), now)
        self._queues.setdefault(wait.queue, WaitingQueue(self._serials)).add(task, _due_s(task))
        self._num_tokens[wait.queue] += wait.num_tokens
        task.request_state.unplaced.append(task)


def _due_s(task: Unplaced) -> float:
    return due_s(task.request_state.request.priority, task.request_state.arrived)


def _num_tokens(task: Unplaced) -> int:
    """What it may need of a decode node's pool."""
    request = task.request_state.request
    return len(request.prompt_tokens) + len(task.samples) * request.sampling.max_tokens
