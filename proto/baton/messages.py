"""The messages that routers and nodes exchange in a session, as used by the state machines.

    both ways           Auth
    router -> node      Subscribe, Prefill, Abort, Migrate
    node -> router      Subscribed, Load, KvEvents,
                        Update(work, Started | PromptLogprobs | Tokens | SampleEnd | HandedOff | Adopted | Stayed | End)

What nodes exchange among themselves is in `baton.handoff_messages`, what a node says of itself in `baton.node_info`.

All are frozen and hold plain values; `wire` converts them to protobuf and back. `docs/protocol.md` follows a request
through these messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from baton import PROTOCOL_VERSION
from baton.block_hash import BlockHash
from baton.errors import BatonError
from baton.node_times import DecodeTimes, PromptTimes
from baton.prompt_logprobs import NUMBER_BYTES, PromptLogprobs
from baton.sampling import FinishReason, SamplingParams
from baton.top_tokens import TopTokens


class AttemptId(NamedTuple):
    """Identifies one attempt at a request. A higher attempt of the same (epoch, request) fences all lower ones.

    A tuple, since attempts are looked up for each token: to hash and to compare it takes no call of Python."""

    router_epoch: int
    request_id: str
    attempt: int

    @property
    def key(self) -> tuple[int, str]:
        """The part of the id that all attempts at the request share."""
        return self.router_epoch, self.request_id

    def __str__(self) -> str:
        return f"{self.request_id}#{self.attempt}"


@dataclass(frozen=True, slots=True)
class Sample:
    """One of a request's n answers: its index, and its output so far."""

    index: int
    output_tokens: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The chosen token's logprob, and the most likely tokens with theirs, best first."""

    logprob: float
    top: TopTokens = ()

    @property
    def num_bytes(self) -> int:
        return 2 * NUMBER_BYTES * (1 + len(self.top))


# ---- authentication ----


@dataclass(frozen=True, slots=True)
class Auth:
    """A step of the proof that an end knows the cluster secret (`cluster_secret`). Sent both ways before all else."""

    name: str = ""
    nonce: bytes = b""
    proof: bytes = b""


# ---- router -> node ----


@dataclass(frozen=True, slots=True)
class Subscribe:
    """First message of a session. A router draws a new epoch at every start."""

    router_epoch: int
    target_incarnation: str
    protocol_version: int = PROTOCOL_VERSION


class DecodeTarget(NamedTuple):
    address: str
    incarnation: str


@dataclass(frozen=True, slots=True)
class Prefill:
    """Compute the KV of the prompt and the output so far, sample each sample's next token, and hand off to `decode`.

    `prompt_tokens`: an array of 32-bit numbers where they were read from the wire. Without `decode` the receiver
    generates all tokens itself. There is more than one sample only while none has output.
    `deadline_s` counts from receipt. `priority`: requests with a lower one are served earlier, see `baton.priority`.
    `age_s`: time since the request came to the router.
    """

    attempt_id: AttemptId
    target_incarnation: str
    prompt_tokens: Sequence[int]
    samples: tuple[Sample, ...]
    sampling: SamplingParams
    deadline_s: float
    decode: DecodeTarget | None = None
    cache_salt: str = ""
    priority: int = 0
    age_s: float = 0.0

    @property
    def goes_on(self) -> bool:
        """Whether its client has a part of the answer."""
        return any(sample.output_tokens for sample in self.samples)


@dataclass(frozen=True, slots=True)
class Abort:
    """End the attempt and all lower ones, in any state; with `samples`, only those samples of this attempt.

    Idempotent. If the attempt is unknown, the node keeps a tombstone against messages still in flight: none arrives
    later than `deadline_s`, the attempt's deadline counted from receipt. 0: not stated.
    """

    attempt_id: AttemptId
    samples: tuple[int, ...] = ()
    deadline_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Migrate:
    """To the decode node that generates: hand the attempt over to `target`, and go on with it until that has it.

    `move` counts the moves that were asked for of this attempt, from 1. The answer is HandedOff or Stayed, unless the
    attempt ends before."""

    attempt_id: AttemptId
    move: int
    target: DecodeTarget


# ---- node -> router ----


@dataclass(frozen=True, slots=True)
class Subscribed:
    """Reply to Subscribe: the router may place work now."""

    incarnation: str
    protocol_version: int = PROTOCOL_VERSION


class Started(NamedTuple):
    """The first chunk of the prompt is scheduled."""

    num_cached_tokens: int
    queue_s: float


class Tokens(NamedTuple):
    """Output tokens `[first_index, first_index + len(token_ids))` of one sample. Like `Update` a tuple, because there
    is one for each token: a frozen dataclass takes three times as long to make."""

    sample: int
    first_index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()


class SampleEnd(NamedTuple):
    """The sample ended by itself, after the last token sent. `stop_token_id`: the token of `stop_token_ids` that ended
    it, if one did."""

    sample: int
    reason: FinishReason
    stop_token_id: int | None = None


@dataclass(frozen=True, slots=True)
class HandedOff:
    """The last message of a node that hands over: the decode node accepted the commit, and all parts have been sent.
    `prefill_s`: from the first chunk to the first token, 0 if the request moves between decode nodes. `gather_s`: from
    then, or from when it stopped, until the last part was in its slot, or began to be stored directly into the decode
    node's slot. `wire_s`: from then until it was sent. Earlier work counts as 0. `prompt`: None if the request
    moves."""

    prefill_s: float
    gather_s: float = 0.0
    wire_s: float = 0.0
    prompt: PromptTimes | None = field(default=None, compare=False)


class Adopted(NamedTuple):
    """The decode node's first message: it holds the KV, and the first step with the request is launched in this turn.
    On a GPU that step begins when the one before it ends, a few milliseconds later at most. If prompts fill the step up
    to --target-itl, the message comes when it begins.

    `transfer_s`: from receipt of the commit until the last byte is in place, i.e. the part of the transfer that was not
    overlapped with computing the prompt. `scatter_s`: the part of it after the last part's arrival (on a GPU the copy
    is then queued, and the step waits for it on the device). `commit_s`: the age of the prompt's last chunk when the
    commit left the prefill node. `step_wait_s`: from the last byte in place to the launch of that step.
    """

    transfer_s: float
    num_cached_tokens: int
    transfer_bytes: int
    commit_s: float = 0.0
    scatter_s: float = 0.0
    step_wait_s: float = 0.0

    @property
    def handoff_s(self) -> float:
        """From the end of the prompt's last chunk to the launch of the first step with the request, excluding the
        commit's time on the network: clocks are never compared across hosts."""
        return self.commit_s + self.transfer_s + self.step_wait_s


@dataclass(frozen=True, slots=True)
class Stayed:
    """The request does not move, or not now, and why: the node goes on with it. `move`: of the Migrate."""

    move: int
    error: BatonError


@dataclass(frozen=True, slots=True)
class End:
    """The node's last message about an attempt: all samples ended (`error` is None), or the attempt failed. `prompt`:
    if the node computed it and hands nothing over; `decode`: if the node generated."""

    error: BatonError | None = None
    prompt: PromptTimes | None = field(default=None, compare=False)
    decode: DecodeTimes | None = field(default=None, compare=False)


UpdateKind = Started | PromptLogprobs | Tokens | SampleEnd | HandedOff | Adopted | Stayed | End


class Update(NamedTuple):
    attempt_id: AttemptId
    kind: UpdateKind


@dataclass(frozen=True, slots=True)
class Load:
    """The load of a node, sent with every heartbeat. `draining`: it finishes its requests and takes no new ones.
    `num_waiting_tokens`: of prompts of which it has computed nothing yet, whichever router sent them.
    `target_itl_s`: the time that it lets a step with decodes take, if it computes prompts beside them; 0: no limit.
    `prompt_tokens_per_s`: how fast it would compute a prompt from its first token on, beside what it decodes now and
    within that time; 0: not known."""

    num_waiting: int = 0
    num_running: int = 0
    num_blocks_free: int = 0
    num_blocks_total: int = 0
    draining: bool = False
    num_waiting_tokens: int = 0
    target_itl_s: float = 0.0
    prompt_tokens_per_s: float = 0.0


@dataclass(frozen=True, slots=True)
class KvEvents:
    """Which full blocks the node's prefix cache has lost and gained since its last message to this router: `removed`
    applies before `stored`. Numbered from 0 in each session. `snapshot`: forget what earlier messages said; what the
    node holds begins with this message and goes on in those that follow."""

    sequence: int
    stored: tuple[BlockHash, ...] = ()
    removed: tuple[BlockHash, ...] = ()
    snapshot: bool = False
