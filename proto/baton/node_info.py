"""How a node describes itself to routers and to other nodes. `wire` converts it to protobuf and back."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NamedTuple

from baton import PROTOCOL_VERSION
from baton.layout import KvLayout
from baton.sampling import DEFAULT_MAX_LOGPROBS
from baton.structured_output.constraint import StructuredBackend

MAX_MODEL_ALIASES = 64
MAX_MODEL_CHARS = 256
"""Of a model's name: requests may have no longer one."""


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
    """A pair of ranks, one of this node and one of a peer, and the address where the peer's receives KV bytes."""

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
    """A node's description, with all that a router needs, since it has no model folder of its own. `max_logprobs`: how
    many of the most likely tokens a request may ask for, per token."""

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
    structured_outputs_backend: StructuredBackend = StructuredBackend.GUIDANCE
    metrics_address: str = ""
    model_aliases: tuple[str, ...] = ()
    max_logprobs: int = DEFAULT_MAX_LOGPROBS
