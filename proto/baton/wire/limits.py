"""Limits of messages: global ones, and those of a message's reader."""

from __future__ import annotations

from dataclasses import dataclass

from baton.layout import num_blocks_for
from baton.node_info import NodeInfo

MAX_TOKEN_IDS = 2**31
"""Token ids are below this: the engine stores them as int32."""
MAX_SAMPLES = 1024
"""Per request; sample indexes are below this. The router's front ends allow 128."""
MAX_MOVES = 2**20
"""Moves of one attempt between decode nodes are numbered below this."""
MAX_LEASES = 2**39
MAX_PARTS = 2**23
"""Lease serials and part numbers are below these: together they form the tag of a part on the data plane."""
MAX_SECONDS = 1e6
"""Longer durations are capped to this, 11 days: far below the longest timeout that a thread can wait for."""
MAX_KV_EVENTS = 1024
"""Block hashes in one KvEvents."""
MAX_NAME_CHARS = 512
MAX_ERROR_CHARS = 2048
"""Longer texts are truncated."""
MAX_ENDPOINTS = 64
MAX_ADDRESS_BYTES = 64 * 1024
MAX_TEMPLATE_CHARS = 1024 * 1024
MAX_SPECIAL_TOKENS = 256


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of a message's reader: for a node those of its engine, for a router those of the node it reads from.

    `max_seconds` caps the deadlines of requests. `block_size` 0: not known. `num_pairs`: pairs of a rank here and a
    rank of the peer that exchange KV. `max_logprobs`: of the likely tokens in one place. The defaults are the global
    limits.
    """

    vocab_size: int = MAX_TOKEN_IDS
    max_model_len: int = MAX_TOKEN_IDS
    max_seconds: float = MAX_SECONDS
    block_size: int = 0
    num_layers: int = 1
    num_pairs: int = 1
    max_logprobs: int = MAX_TOKEN_IDS

    @classmethod
    def of(cls, info: NodeInfo, max_seconds: float = MAX_SECONDS) -> Limits:
        """The limits of a node, which also apply to its own messages."""
        layout = info.layout
        longest = min(max_seconds, MAX_SECONDS)
        num_entries = len(layout.layers_of_groups)
        return cls(
            info.vocab_size,
            info.max_model_len,
            longest,
            layout.block_size,
            layout.num_layers * num_entries,
            max_logprobs=info.max_logprobs,
        )

    @property
    def max_parts(self) -> int:
        """Upper bound for one request: one part for each block, layer and pair of ranks."""
        if not self.block_size:
            return MAX_PARTS
        num_blocks = num_blocks_for(self.max_model_len, self.block_size)
        return min(MAX_PARTS, num_blocks * self.num_layers * self.num_pairs)


ANY = Limits()
