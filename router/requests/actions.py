"""The actions of the router's state machine, kept in order until its shell takes them."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from baton.messages import Abort, Migrate, Prefill
from router.requests.request_state import Attempt, RequestEvent, RequestState, SampleEvent, SampleState


class ToNode(NamedTuple):
    """`cause`: what this attempt follows; empty: it is the request's first, or no attempt."""

    incarnation: str
    message: Prefill | Abort | Migrate
    cause: str = ""


class Emit(NamedTuple):
    """For the client of `request_id`: `RequestEnd` comes exactly once, last."""

    request_id: str
    event: RequestEvent


Action = ToNode | Emit


class Outbox:
    """Collects actions for nodes and for clients, whoever of the state machine makes them. `actions`: those that are
    still to be carried out, the next one first; the shell removes them. `holds`: whether what a prefill node samples
    waits for the decode node (`--first-token decode`)."""

    def __init__(self, holds: bool) -> None:
        self.actions: deque[Action] = deque()
        self._holds = holds

    def to_node(self, incarnation: str, message: Prefill | Abort | Migrate, cause: str = "") -> None:
        self.actions.append(ToNode(incarnation, message, cause))

    def to_client(self, request_id: str, event: RequestEvent) -> None:
        self.actions.append(Emit(request_id, event))

    def tell(self, state: RequestState, attempt: Attempt, sample: SampleState, event: SampleEvent, now: float) -> None:
        """Emit the event, or hold it back until the decode node goes on. A sample that ended waits for nothing."""
        sample.held.append(event)
        if sample.ended or not (self._holds and attempt.awaits_decode):
            self.release(state, sample, now)

    def release(self, state: RequestState, sample: SampleState, now: float) -> None:
        """Emit what is held back."""
        if not sample.held:
            return
        if not state.client_has_token:
            state.note_first_token(sample, self._holds, now)
        for event in sample.held:
            self.to_client(state.request.request_id, event)
        sample.held.clear()
