"""The messages that routers, prefill nodes and decode nodes exchange, as the state machines see them.

    router -> node      Subscribe, Prefill, Abort
    node -> router      Subscribed, Update(work, Started | Tokens | SampleEnd | HandedOff | Adopted | End), Load
    prefill -> decode   Reserve, Commit, Release
    decode -> prefill   Grant, Credit, Refuse, CommitReply

All are frozen and hold plain values; `wire` turns them into protobuf and back. `docs/protocol.md` shows the life of a
request in these messages.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NamedTuple

from baton import PROTOCOL_VERSION
from baton.block_hash import BlockHash
from baton.errors import BatonError
from baton.layout import KvLayout
from baton.sampling import FinishReason, SamplingParams


@dataclass(frozen=True, slots=True, order=True)
class AttemptId:
    """Names one attempt at a request. A higher attempt of the same (epoch, request) fences all lower ones."""

    router_epoch: int
    request_id: str
    attempt: int

    @property
    def key(self) -> tuple[int, str]:
        """What all attempts at the request share."""
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
    top: tuple[tuple[int, float], ...] = ()


# ---- who speaks ----


@dataclass(frozen=True, slots=True)
class Auth:
    """A step of the proof that an end knows the cluster secret (`cluster_secret`). Both ends send it, first of all."""

    name: str = ""
    nonce: bytes = b""
    proof: bytes = b""


# ---- router -> node ----


@dataclass(frozen=True, slots=True)
class Subscribe:
    """First message of a session. An epoch is new at every start of a router."""

    router_epoch: int
    target_incarnation: str
    protocol_version: int = PROTOCOL_VERSION


@dataclass(frozen=True, slots=True)
class DecodeTarget:
    address: str
    incarnation: str


@dataclass(frozen=True, slots=True)
class Prefill:
    """Compute the KV of prompt + output so far, choose the next token of each sample, and hand off to `decode`.

    Without `decode` the receiver generates all tokens itself. More than one sample only while none has output.
    `deadline_s` counts from receipt.
    """

    attempt_id: AttemptId
    target_incarnation: str
    prompt_tokens: tuple[int, ...]
    samples: tuple[Sample, ...]
    sampling: SamplingParams
    deadline_s: float
    decode: DecodeTarget | None = None
    cache_salt: str = ""


@dataclass(frozen=True, slots=True)
class Abort:
    """End the attempt and all lower ones, in whatever state; with `samples`, only those samples of this attempt.

    Idempotent. If the attempt is unknown, it leaves a tombstone for messages still under way: none comes later than
    `deadline_s`, the time that the attempt was given, after receipt. 0: not stated.
    """

    attempt_id: AttemptId
    samples: tuple[int, ...] = ()
    deadline_s: float = 0.0


# ---- node -> router ----


@dataclass(frozen=True, slots=True)
class Subscribed:
    """Answer to Subscribe: work may be placed now."""

    incarnation: str
    protocol_version: int = PROTOCOL_VERSION


@dataclass(frozen=True, slots=True)
class Started:
    """The first chunk of the prompt is scheduled."""

    num_cached_tokens: int
    queue_s: float


@dataclass(frozen=True, slots=True)
class Tokens:
    """Output tokens `[first_index, first_index + len(token_ids))` of one sample."""

    sample: int
    first_index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class SampleEnd:
    """The sample ended by itself, after the last token sent. `stop_token_id`: the one of `stop_token_ids` that ended
    it."""

    sample: int
    reason: FinishReason
    stop_token_id: int | None = None


@dataclass(frozen=True, slots=True)
class HandedOff:
    """The prefill node's last message: the decode node took the commit, and all parts have left. `prefill_s`: from the
    first chunk to the first token. `gather_s`: from then until the last part was in its slot, or until storing it
    straight into the decode node's slot began. `wire_s`: from then until it had left. Earlier work counts as 0."""

    prefill_s: float
    gather_s: float = 0.0
    wire_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Adopted:
    """The decode node's first message: it holds the KV, and the first step with the request begins now.

    `transfer_s`: from the commit's receipt until the last byte is in place, which is the part of the transfer that
    computing the prompt did not hide. `scatter_s`: the end of that, after the last part's arrival (on a GPU the copy is
    queued by then, and the step waits for it there). `commit_s`: how old the prompt's last chunk was when the commit
    left the prefill node. `step_wait_s`: from the last byte in place to the beginning of that step.
    """

    transfer_s: float
    num_cached_tokens: int
    transfer_bytes: int
    commit_s: float = 0.0
    scatter_s: float = 0.0
    step_wait_s: float = 0.0

    @property
    def handoff_s(self) -> float:
        """From the end of the prompt's last chunk to the beginning of the first step with the request, without the
        commit's time on the network: no clock is compared across hosts."""
        return self.commit_s + self.transfer_s + self.step_wait_s


@dataclass(frozen=True, slots=True)
class End:
    """The node's last message about an attempt: all samples ended (`error` is None), or what went wrong."""

    error: BatonError | None = None


UpdateKind = Started | Tokens | SampleEnd | HandedOff | Adopted | End


@dataclass(frozen=True, slots=True)
class Update:
    attempt_id: AttemptId
    kind: UpdateKind


@dataclass(frozen=True, slots=True)
class Load:
    """The load of a node, sent with every heartbeat. `draining`: it finishes what it has and takes nothing new."""

    num_waiting: int = 0
    num_running: int = 0
    num_blocks_free: int = 0
    num_blocks_total: int = 0
    draining: bool = False


# ---- prefill -> decode ----


@dataclass(frozen=True, slots=True)
class Reserve:
    """Ask for room for `num_tokens` computed tokens and one step more, for `num_samples` forks.

    Waits in the decode node's queue until granted, refused, released, aborted, or `deadline_s` after receipt. The
    blocks from `grouped_from_block` on will travel by `layer_groups` groups of layers, those before as whole blocks.
    """

    attempt_id: AttemptId
    target_incarnation: str
    num_tokens: int
    block_hashes: tuple[BlockHash, ...]
    num_samples: int
    deadline_s: float
    max_total_tokens: int
    grouped_from_block: int = 0
    layer_groups: int = 1


@dataclass(frozen=True, slots=True)
class Commit:
    """Hand the request to the decode node. `samples` are the unfinished ones; their outputs have one length, and the
    last token has no KV yet. `age_s`: time since the prompt's last chunk was computed. Idempotent by lease."""

    lease: int
    attempt_id: AttemptId
    target_incarnation: str
    prompt_tokens: tuple[int, ...]
    samples: tuple[Sample, ...]
    sampling: SamplingParams
    deadline_s: float
    cache_salt: str = ""
    age_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Release:
    """The lease (0: the waiting Reserve of `attempt_id`) is not needed. Parts that were granted are still drained."""

    lease: int
    attempt_id: AttemptId


PrefillToDecode = Reserve | Commit | Release


# ---- decode -> prefill ----


@dataclass(frozen=True, slots=True)
class Grant:
    """Room is reserved. Of `ceil(num_tokens / block_size)` blocks the decode node already has the first
    `num_held_blocks`; the rest travels in `num_parts` parts, as `kv_transfer.parts.PartPlanner` plans them.
    `checksums`: each part must carry its checksums."""

    attempt_id: AttemptId
    lease: int
    num_held_blocks: int
    num_parts: int
    credits: int
    checksums: bool = False


@dataclass(frozen=True, slots=True)
class Credit:
    """Parts `[0, credits)` of the lease may be sent: their receives are posted. Never shrinks."""

    lease: int
    credits: int


@dataclass(frozen=True, slots=True)
class Refuse:
    attempt_id: AttemptId
    error: BatonError


@dataclass(frozen=True, slots=True)
class CommitReply:
    """`error` None: the request now belongs to the decode node, which will send Adopted once all parts are in."""

    lease: int
    attempt_id: AttemptId
    error: BatonError | None = None


DecodeToPrefill = Grant | Credit | Refuse | CommitReply


# ---- what a node says of itself ----


class NodeRole(enum.Enum):
    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class TransportEndpoint:
    """Where one rank receives KV bytes. `address` is opaque and carries its own checksum."""

    rank: int
    transport: str
    address: bytes


class Route(NamedTuple):
    """From a rank of this node to a rank of another, and where that one takes KV bytes."""

    rank: int
    peer_rank: int
    address: bytes


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """The values of generation_config.json that are used. None: the file does not set it."""

    eos_token_ids: tuple[int, ...] = ()
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_new_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class NodeInfo:
    """All that a router needs to know about a node, since the router has no model folder."""

    role: NodeRole
    incarnation: str
    node_id: str
    address: str
    served_model_name: str
    max_model_len: int
    max_num_seqs: int
    num_blocks: int
    layout: KvLayout
    endpoints: tuple[TransportEndpoint, ...]
    tokenizer_digest: str
    chat_template: str
    special_tokens: dict[str, str]
    generation_defaults: GenerationDefaults
    vocab_size: int
    protocol_version: int = PROTOCOL_VERSION
    version: str = ""


@dataclass(frozen=True, slots=True)
class Hello:
    """First message of a handoff stream, both ways. `part_blocks`: blocks that fit into a part; the smaller number of
    the two nodes counts. `error` refuses the peer."""

    incarnation: str
    node_id: str
    layout: KvLayout
    endpoints: tuple[TransportEndpoint, ...]
    target_incarnation: str = ""
    part_blocks: int = 0
    error: BatonError | None = None
    protocol_version: int = PROTOCOL_VERSION


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Sent in both directions on a handoff stream that has nothing else to carry."""
