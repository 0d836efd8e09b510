"""Events for clients, of which some are held back until the decode node goes on (`--first-token decode`)."""

from __future__ import annotations

from router.requests.actions import Outbox
from router.requests.request_state import Attempt, RequestState, SampleEvent, SampleState


class HeldEvents:
    """The way of samples' events to their clients. `holds`: whether what a prefill node samples waits for the decode
    node."""

    def __init__(self, outbox: Outbox, holds: bool) -> None:
        self._outbox = outbox
        self._holds = holds

    def tell(self, state: RequestState, attempt: Attempt, sample: SampleState, event: SampleEvent, now: float) -> None:
        """Emit the event, or hold it back until the decode node goes on. A sample that ended waits for nothing."""
        sample.held.append(event)
        if sample.ended or not (self._holds and attempt.awaits_decode):
            self.release(state, sample, now)

    def release(self, state: RequestState, sample: SampleState, now: float) -> None:
        if not sample.held:
            return
        if not state.client_has_token:
            state.note_first_token(sample, self._holds, now)
        for event in sample.held:
            self._outbox.to_client(state.request.request_id, event)
        sample.held.clear()
