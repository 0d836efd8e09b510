"""The messages with which a prefill node hands a request over to a decode node, in a handoff stream.

    both ways           Auth, Hello, Heartbeat
    prefill -> decode   Reserve, Commit, Release
    decode -> prefill   Grant, Credit, Refuse, CommitReply, Landed

A decode node that hands a running request over to another one sends what a prefill node would. What these messages
share with those of a session, as how they name a request, is in `baton.messages`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from baton import PROTOCOL_VERSION
from baton.block_hash import BlockHash
from baton.errors import BatonError
from baton.layout import KvLayout
from baton.messages import AttemptId, Sample
from baton.node_info import TransportEndpoint
from baton.sampling import SamplingParams

# ---- both ways ----


@dataclass(frozen=True, slots=True)
class Hello:
    """First message of a handoff stream in both directions. `part_blocks`: how many blocks fit into a part; the smaller
    of the two nodes' numbers applies. `error` refuses the peer."""

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
    """Sent in both directions on an otherwise idle handoff stream."""


# ---- prefill -> decode ----


@dataclass(frozen=True, slots=True)
class Reserve:
    """Request room for `num_tokens` computed tokens and one more step, for `num_samples` forks.

    Waits in the decode node's queue until granted, refused, released, aborted, or `deadline_s` after receipt. Blocks
    from `grouped_from_block` on are sent in `layer_groups` groups of layers, those before as whole blocks.

    `age_s`: time since the request came to the router, see `baton.priority`. `goes_on`: its client has a part of the
    answer, so it is not refused because too many wait.

    `move`: that of the Migrate, if a decode node hands over a request that it goes on with. Then the last
    `num_spare_tokens` of the tokens are not computed yet, and the Commit may come before all of them are; their blocks
    are sent, whatever is in them, and have no hashes.
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
    priority: int = 0
    move: int = 0
    num_spare_tokens: int = 0
    age_s: float = 0.0
    goes_on: bool = False

    @property
    def num_least_tokens(self) -> int:
        """How many of the tokens will be computed for certain."""
        return self.num_tokens - self.num_spare_tokens


@dataclass(frozen=True, slots=True)
class Commit:
    """Hand the request to the decode node. `prompt_tokens`: as in Prefill. `samples` are the unfinished ones; their
    outputs are equally long, and the last token has no KV yet. `age_s`: time since the prompt's last chunk was
    computed. Idempotent by lease."""

    lease: int
    attempt_id: AttemptId
    target_incarnation: str
    prompt_tokens: Sequence[int]
    samples: tuple[Sample, ...]
    sampling: SamplingParams
    deadline_s: float
    cache_salt: str = ""
    age_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Release:
    """The lease, or the waiting Reserve, is no longer needed. Granted parts are still drained."""

    attempt_id: AttemptId


PrefillToDecode = Reserve | Commit | Release


# ---- decode -> prefill ----


@dataclass(frozen=True, slots=True)
class Grant:
    """Room is reserved. Of `ceil(num_tokens / block_size)` blocks the decode node already has the first
    `num_held_blocks`; the rest is sent in `num_parts` parts, as planned by `kv_transfer.parts.PartPlanner`.
    `checksums`: each part must carry checksums. `num_held_in_groups`: the same for each further KV group of the layout.
    What is behind the window of a group counts as held, since it is not needed."""

    attempt_id: AttemptId
    lease: int
    num_held_blocks: int
    num_parts: int
    credits: int
    checksums: bool = False
    num_held_in_groups: tuple[int, ...] = ()

    @property
    def held(self) -> tuple[int, ...]:
        """For each group, how many columns of the block table need not travel."""
        return self.num_held_blocks, *self.num_held_in_groups


@dataclass(frozen=True, slots=True)
class Credit:
    """Parts `[0, credits)` of the lease may be sent: their receives are posted. `credits` never decreases."""

    lease: int
    credits: int


@dataclass(frozen=True, slots=True)
class Refuse:
    attempt_id: AttemptId
    error: BatonError


@dataclass(frozen=True, slots=True)
class CommitReply:
    """`error` None: the decode node now owns the request, and will send Adopted once all parts have arrived."""

    lease: int
    attempt_id: AttemptId
    error: BatonError | None = None


@dataclass(frozen=True, slots=True)
class Landed:
    """All parts of a committed lease are here; sent for migrations only. Until then the node that the request leaves
    must not stop: parts that have left it may still be under way."""

    lease: int
    attempt_id: AttemptId


DecodeToPrefill = Grant | Credit | Refuse | CommitReply | Landed
