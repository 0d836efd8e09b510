"""The requests that have not ended, each of which ends here, once."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from baton.deadlines import Deadlines
from baton.errors import BatonError
from baton.telemetry.timeline import Timeline
from router.actions import Outbox
from router.attempts import Attempts
from router.held_events import HeldEvents
from router.life import RequestLife


class LiveRequests:
    """By request id, in the order in which they came; with the deadline of each."""

    def __init__(self, attempts: Attempts, held: HeldEvents, outbox: Outbox) -> None:
        self._attempts = attempts
        self._held = held
        self._outbox = outbox
        self._live: dict[str, RequestLife] = {}
        self._deadlines: Deadlines[str] = Deadlines()

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._live

    def __iter__(self) -> Iterator[RequestLife]:
        """Of those that are live now; they may end meanwhile."""
        return iter(list(self._live.values()))

    def get(self, request_id: str) -> RequestLife | None:
        return self._live.get(request_id)

    def add(self, life: RequestLife) -> None:
        self._live[life.request.request_id] = life
        self._deadlines.set(life.request.request_id, life.deadline)

    # ---- time ----

    def next_deadline(self) -> float | None:
        return self._deadlines.next()

    def overdue(self, now: float) -> list[RequestLife]:
        """Those whose deadlines have passed, which the caller ends."""
        return [self._live[request_id] for request_id in self._deadlines.due(now)]

    def timelines(self, number: int, now: float) -> list[Timeline]:
        """Of so many live requests, the newest first."""
        newest = itertools.islice(reversed(self._live.values()), number)
        return [life.timeline(None, now, is_live=True) for life in newest]

    def timelines_of(self, client_id: str, now: float) -> list[Timeline]:
        """Of the live requests of a client's request, or of one of them, by its own id."""
        found = [life for name, life in self._live.items() if client_id in (name, name.rpartition(".")[0])]
        return [life.timeline(None, now, is_live=True) for life in found]

    # ---- ends ----

    def end_if_done(self, life: RequestLife, now: float) -> None:
        """End the request if nothing of it runs or waits any more."""
        if not life.attempts and not life.unplaced:
            self.end(life, None, now)

    def end(self, life: RequestLife, error: BatonError | None, now: float) -> None:
        """End the request, and all that runs or waits of it, after its client got everything accepted so far. `error`
        None: every sample ended by itself."""
        for attempt in list(life.attempts.values()):
            self._attempts.abort(attempt)
            self._attempts.retire(life, attempt, now)
        for task in list(life.unplaced):
            self._attempts.stop_waiting(task)
        self._deadlines.discard(life.request.request_id)
        if self._live.pop(life.request.request_id, None):
            for sample in life.samples:
                self._held.release(life, sample, now)
            self._outbox.to_client(life.request.request_id, life.end(error, now))
