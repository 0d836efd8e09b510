"""The timeline of one request: what happened to it in the router and on its nodes, and the stages of its first token.

    router   received --receive--tokenize--place--> Prefill sent ........................> first token to the client
    node                                  (network)   queue--prefill--reserve   (network)

`*_at_s` are seconds since the router received the request, by the router's clock. Other `*_s` are durations, each by
the clock of the process that it happened in. The two kinds meet in one place: what a node reports of an attempt lies
between two moments that the router saw. What is left of that time is called `network`: messages under way, and waiting
to be read. So the stages add up to the time to first token, whatever the clocks of other machines say.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from baton.errors import BatonError
from baton.messages import Adopted, End, HandedOff, Started
from baton.node_times import DecodeTimes, PromptTimes
from baton.telemetry.trace_context import TraceContext

STAGES = (
    *("receive", "tokenize", "place", "wait_for_node", "retry"),
    *("queue", "prefill", "reserve", "transfer", "step_wait", "decode", "network"),
)
"""In order. receive: until the request is read and its prompt is known as text. tokenize: until it is token ids. place:
until the Prefill is sent. wait_for_node: while there was no node. retry: attempts that failed before the one that gave
the first token. queue, prefill: on the node that computes the prompt. reserve: its first token is there, and the decode
node has no room yet. The next three only if the client's first token comes from the decode node. transfer: of the KV,
as far as computing did not hide it. step_wait: until the decode node's next step. decode: of a beam search."""


class Estimate(NamedTuple):
    """Why an attempt was placed where it is: what `policy` expected of it. `kind`: pair or decode_alone. `alone_s`: the
    time to the first token that the decode node would have taken without a prefill node."""

    policy: str
    kind: str
    queue_s: float
    prefill_s: float
    handoff_s: float
    num_cached_tokens: int
    alone_s: float


@dataclass(slots=True)
class AttemptTimeline:
    """One attempt at some samples of a request, as far as it has come. Its `*_at_s` are when the router sent or got the
    message, None if it did not; a node's report is None if it did not come, since the attempt was over for the router
    before.

    `state`: that it was in at its end, see `AttemptState`. `moves`: the nodes that went on with it later, each with the
    moment when it said so."""

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
    handed_off: HandedOff | None = None
    adopted: Adopted | None = None
    prompt: PromptTimes | None = None
    decode: DecodeTimes | None = None
    moves: tuple[tuple[str, float], ...] = ()

    # ---- what the router notes as it hears of it ----

    def note_started(self, message: Started, at_s: float) -> None:
        self.started_at_s = at_s
        self.queue_s, self.num_cached_tokens = message.queue_s, message.num_cached_tokens

    def note_handed_off(self, message: HandedOff, at_s: float) -> None:
        self.handed_off_at_s, self.handed_off = at_s, message
        self.prompt = message.prompt or self.prompt

    def note_adopted(self, message: Adopted, at_s: float) -> None:
        self.adopted_at_s, self.adopted = at_s, message

    def note_moved(self, node: str, at_s: float) -> None:
        self.moves += ((node, at_s),)

    def note_reported(self, message: End) -> None:
        """By a node, as over."""
        self.prompt = message.prompt or self.prompt
        self.decode = message.decode or self.decode
        if message.error is not None:
            self.error = message.error.message

    def note_failed(self, error: BatonError) -> None:
        """`error` counts if no node has told of another one."""
        self.error = self.error or error.message

    # ---- what follows from it ----

    @property
    def prefill_s(self) -> float | None:
        """As the node reports it."""
        if self.prompt is not None:
            return self.prompt.prefill_s
        return self.handed_off.prefill_s if self.handed_off is not None else None

    @property
    def reserve_s(self) -> float:
        """How long the first token waited on the prefill node for room on the decode node."""
        if self.adopted is not None:
            return self.adopted.commit_s
        return max(0.0, self.prompt.granted_s - self.prompt.computed_s) if self.prompt is not None else 0.0


@dataclass(slots=True)
class Timeline:
    """Nobody changes it. (Frozen, one of so many fields takes eight times as long to make.)

    `request_id` is unique for ever, and begins with the id that the client knows. `received_at`: the only time of
    day, in seconds since 1970. `first_attempt`: index in `attempts` of the one that gave the first token; None: none
    did. `first_waits_for_decode`: it came no earlier than its decode node's Adopted, if there was one. `error`: empty
    if every sample ended by itself. `is_live`: it has not ended, and `ended_at_s` is now."""

    request_id: str
    model: str
    received_at: float
    read_at_s: float
    tokenized_at_s: float
    submitted_at_s: float
    first_token_at_s: float
    ended_at_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    num_samples: int
    attempts: tuple[AttemptTimeline, ...]
    first_attempt: int | None = None
    num_attempts: int = 0
    error: str = ""
    error_code: str = ""
    trace: TraceContext | None = None
    first_waits_for_decode: bool = False
    is_live: bool = False

    @property
    def client_id(self) -> str:
        """The id that the client knows: of all prompts of its request."""
        return self.request_id.rpartition(".")[0] or self.request_id

    @property
    def size_bytes(self) -> int:
        """What it takes in memory, about: a little more than it does."""
        text = sum(map(len, (self.request_id, self.model, self.error)))
        return 1_000 + 4 * text + sum(2_600 + 4 * len(a.error) + 48 * len(a.samples) for a in self.attempts)


def first_token_stages(timeline: Timeline) -> dict[str, float]:
    """Seconds of each stage of STAGES that the request had before its first token, in order. They add up to
    `first_token_at_s`; empty if there was none."""
    if timeline.first_attempt is None or not timeline.first_token_at_s:
        return {}
    first, attempt = timeline.attempts[0], timeline.attempts[timeline.first_attempt]
    stages = (
        ("receive", timeline.read_at_s),
        ("tokenize", timeline.tokenized_at_s - timeline.read_at_s),
        ("place", timeline.submitted_at_s - timeline.tokenized_at_s),
        ("wait_for_node", first.placed_at_s - timeline.submitted_at_s),
        ("retry", attempt.placed_at_s - first.placed_at_s),
        *_on_nodes(attempt, timeline.first_token_at_s, timeline.first_waits_for_decode),
    )
    return _fitted(stages, timeline.first_token_at_s)


Stage = tuple[str, float]


def _on_nodes(attempt: AttemptTimeline, first_token_at_s: float, waits_for_decode: bool) -> tuple[Stage, ...]:
    """What nodes report. A prefill of which there is no report is what the router saw of it."""
    prefill_s, adopted_at_s = attempt.prefill_s, attempt.adopted_at_s
    if prefill_s is None:
        began = attempt.started_at_s
        prefill_s = first_token_at_s - began if began is not None and first_token_at_s > began else 0.0
    stages = ("queue", attempt.queue_s), ("prefill", prefill_s), ("reserve", attempt.reserve_s)
    if waits_for_decode and attempt.adopted is not None and adopted_at_s is not None:
        adopted, decode_s = attempt.adopted, first_token_at_s - adopted_at_s
        return *stages, ("transfer", adopted.transfer_s), ("step_wait", adopted.step_wait_s), ("decode", decode_s)
    return stages


def _fitted(stages: Iterable[Stage], total_s: float) -> dict[str, float]:
    """Without those that took no time, and with what is left as `network`. A clock that runs fast on a node makes none
    of them negative."""
    left, fitted = total_s, {}
    for name, seconds in stages:
        if (taken := min(seconds, left)) > 0:
            fitted[name] = taken
            left -= taken
    fitted["network"] = left
    return fitted
