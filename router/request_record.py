"""What the router notes of a live request, so that its end has a timeline: see `baton.telemetry.timeline`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from baton.errors import BatonError
from baton.messages import Adopted, End, HandedOff, Started
from baton.node_times import DecodeTimes, PromptTimes
from baton.telemetry.timeline import AttemptTimeline, Estimate, Timeline
from baton.telemetry.trace_context import TraceContext
from baton.v1 import common_pb2

MAX_ATTEMPTS = 16
"""Of one request that are remembered: the first ones. Requests with many samples can have more."""


@dataclass(frozen=True, slots=True)
class Preparation:
    """What a front end did with a request before it was placed: seconds since its receipt. `received_at`: the time of
    day of that."""

    received_at: float
    read_at_s: float
    tokenized_at_s: float
    trace: TraceContext | None = None


UNPREPARED = Preparation(0.0, 0.0, 0.0)
"""Of a request that is placed as it is received."""


@dataclass(slots=True)
class AttemptRecord:
    """The fields of AttemptTimeline, as far as they are known."""

    attempt: int
    samples: tuple[int, ...]
    prefill_node: str
    decode_node: str
    estimate: Estimate
    placed_at_s: float
    started_at_s: float | None = None
    handed_off_at_s: float | None = None
    adopted_at_s: float | None = None
    ended_at_s: float | None = None
    state: str = ""
    error: str = ""
    queue_s: float = 0.0
    num_cached_tokens: int = 0
    handed_off_message: HandedOff | None = None
    adopted_message: Adopted | None = None
    prompt: PromptTimes | None = None
    decode: DecodeTimes | None = None
    moves: list[tuple[str, float]] = field(default_factory=list)

    def started(self, message: Started, at_s: float) -> None:
        self.started_at_s = at_s
        self.queue_s, self.num_cached_tokens = message.queue_s, message.num_cached_tokens

    def handed_off(self, message: HandedOff, at_s: float) -> None:
        self.handed_off_at_s, self.handed_off_message = at_s, message
        self.prompt = message.prompt or self.prompt

    def adopted(self, message: Adopted, at_s: float) -> None:
        self.adopted_at_s, self.adopted_message = at_s, message

    def moved(self, node: str, at_s: float) -> None:
        self.moves.append((node, at_s))

    def ended(self, message: End) -> None:
        self.prompt = message.prompt or self.prompt
        self.decode = message.decode or self.decode
        if message.error is not None:
            self.error = message.error.message

    def failed(self, error: BatonError) -> None:
        self.error = self.error or error.message

    def timeline(self) -> AttemptTimeline:
        return AttemptTimeline(
            self.attempt,
            self.samples,
            self.prefill_node,
            self.decode_node,
            self.estimate,
            self.placed_at_s,
            self.started_at_s,
            self.handed_off_at_s,
            self.adopted_at_s,
            self.ended_at_s,
            self.state,
            self.error,
            self.queue_s,
            self.num_cached_tokens,
            self.handed_off_message,
            self.adopted_message,
            self.prompt,
            self.decode,
            tuple(self.moves),
        )


@dataclass(slots=True)
class RequestRecord:
    """Of one request. `first`, `first_waits_for_decode`: see Timeline."""

    preparation: Preparation
    submitted_at_s: float = 0.0
    attempts: list[AttemptRecord] = field(default_factory=list)
    num_attempts: int = 0
    first: AttemptRecord | None = None
    first_waits_for_decode: bool = False

    @property
    def last(self) -> AttemptRecord | None:
        return self.attempts[-1] if self.attempts else None

    def placed(
        self, attempt: int, samples: Sequence[int], nodes: tuple[str, str], estimate: Estimate, at_s: float
    ) -> AttemptRecord:
        """`nodes`: those that compute the prompt and generate; the same one if it does both. A request that is placed
        at once is so when it is submitted, although its time counts from its receipt."""
        record = AttemptRecord(attempt, tuple(samples), *nodes, estimate, max(at_s, self.submitted_at_s))
        self.num_attempts += 1
        if len(self.attempts) < MAX_ATTEMPTS:
            self.attempts.append(record)
        return record

    def timeline(
        self,
        request_id: str,
        model: str,
        num_prompt_tokens: int,
        num_output_tokens: int,
        num_samples: int,
        first_token_at_s: float,
        ended_at_s: float,
        error: BatonError | None,
        is_live: bool = False,
    ) -> Timeline:
        prepared = self.preparation
        first = next((i for i, attempt in enumerate(self.attempts) if attempt is self.first), None)
        return Timeline(
            request_id,
            model,
            prepared.received_at,
            prepared.read_at_s,
            prepared.tokenized_at_s,
            self.submitted_at_s,
            first_token_at_s,
            ended_at_s,
            num_prompt_tokens,
            num_output_tokens,
            num_samples,
            tuple(attempt.timeline() for attempt in self.attempts),
            first,
            self.num_attempts,
            error.message if error else "",
            common_pb2.ErrorCode.Name(error.code).removeprefix("ERROR_CODE_").lower() if error else "",
            prepared.trace,
            self.first_waits_for_decode,
            is_live,
        )
