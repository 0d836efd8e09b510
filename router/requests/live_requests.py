"""The requests that have not ended, each of which ends here, once."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from baton.deadlines import Deadlines
from baton.errors import BatonError
from baton.telemetry.timeline import Timeline
from router.requests.actions import Outbox
from router.requests.attempts import Attempts
from router.requests.request_state import RequestState
from router.requests.waiting import WaitingRoom


class LiveRequests:
    """By request id, in the order in which they came; with the deadline of each."""

    def __init__(self, attempts: Attempts, waiting: WaitingRoom, outbox: Outbox) -> None:
        self._attempts = attempts
        self._waiting = waiting
        self._outbox = outbox
        self._live: dict[str, RequestState] = {}
        self._deadlines: Deadlines[str] = Deadlines()

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._live

    def __iter__(self) -> Iterator[RequestState]:
        """Of those that are live now; they may end meanwhile."""
        return iter(list(self._live.values()))

    def get(self, request_id: str) -> RequestState | None:
        return self._live.get(request_id)

    def add(self, state: RequestState) -> None:
        self._live[state.request.request_id] = state
        self._deadlines.set(state.request.request_id, state.deadline)

    # ---- time ----

    def next_deadline(self) -> float | None:
        return self._deadlines.next()

    def end_by(self, state: RequestState, when: float) -> None:
        """The request is overdue then, or at its own deadline if that is earlier."""
        self._deadlines.set(state.request.request_id, min(when, state.deadline))

    def overdue(self, now: float) -> list[RequestState]:
        """Those whose deadlines have passed, which the caller ends."""
        return [self._live[request_id] for request_id in self._deadlines.due(now)]

    def timelines(self, number: int, now: float) -> list[Timeline]:
        """Of so many live requests, the newest first."""
        newest = itertools.islice(reversed(self._live.values()), number)
        return [state.timeline(None, now, is_live=True) for state in newest]

    def timelines_of(self, client_id: str, now: float) -> list[Timeline]:
        """Of the live requests of a client's request, or of one of them, by its own id."""
        found = [state for name, state in self._live.items() if client_id in (name, name.rpartition(".")[0])]
        return [state.timeline(None, now, is_live=True) for state in found]

    # ---- ends ----

    def end_if_done(self, state: RequestState, now: float) -> None:
        """End the request if nothing of it runs or waits any more."""
        if not state.attempts and not state.unplaced:
            self.end(state, None, now)

    def end(self, state: RequestState, error: BatonError | None, now: float) -> None:
        """End the request, and all that runs or waits of it, after its client got everything accepted so far. `error`
        None: every sample ended by itself."""
        for attempt in list(state.attempts.values()):
            self._attempts.abort(attempt)
            self._attempts.retire(state, attempt, now)
        for task in list(state.unplaced):
            self._waiting.remove(task)
        self._deadlines.discard(state.request.request_id)
        if self._live.pop(state.request.request_id, None):
            for sample in state.samples:
                self._outbox.release(state, sample, now)
            self._outbox.to_client(state.request.request_id, state.end(error, now))
