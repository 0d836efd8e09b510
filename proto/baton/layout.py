"""The shape of KV blocks, as two nodes compare it before the first byte travels."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools

from baton.errors import LayoutMismatch


@dataclasses.dataclass(frozen=True, slots=True)
class KvLayout:
    """One block is `[num_layers, 2, heads held, block_size, head_dim]` of `dtype`, contiguous: `block_bytes` in all.

    `head_start:head_end` are the KV heads that this rank holds of `num_kv_heads`. K and V may differ in width; models
    whose layers differ state it through `block_bytes` and the fingerprint. `fingerprint` covers the model's
    configuration and weights: caches of two fine-tunes of one shape must never mix.
    """

    num_layers: int
    num_kv_heads: int
    head_dim_k: int
    head_dim_v: int
    block_size: int
    dtype: str
    head_start: int
    head_end: int
    block_bytes: int
    fingerprint: str

    def require_same(self, other: KvLayout, who: str) -> None:
        """Raise LayoutMismatch unless `other`, of the node `who`, equals this in every field; the text names the first
        difference as `field mine != theirs`."""
        for field in dataclasses.fields(self):
            mine, theirs = getattr(self, field.name), getattr(other, field.name)
            if mine != theirs:
                raise LayoutMismatch(f"{field.name} {mine} != {theirs} of {who}", field.name)

    def digest(self) -> bytes:
        """16 bytes that go into the header of every part."""
        return hashlib.sha256(repr(dataclasses.astuple(self)).encode()).digest()[:16]


def layer_groups_of(num_layers: int, num_groups: int) -> list[tuple[int, int]]:
    """`num_groups` runs of layers, [first, end) each, as equal as can be, larger ones first; no more than layers."""
    groups = max(1, min(num_groups, num_layers))
    size, larger = divmod(num_layers, groups)
    bounds = [index * size + min(index, larger) for index in range(groups + 1)]
    return list(itertools.pairwise(bounds))


def num_blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that hold `num_tokens` tokens."""
    return -(-num_tokens // block_size)
