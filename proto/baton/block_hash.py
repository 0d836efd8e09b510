"""Hashes of full KV blocks: a chain over tokens, so that equal hashes mean equal KV.

hash(block) = sha256(hash(parent), the block's tokens), where the root hash contains the cache_salt. Everything before
the block is part of its hash, which makes a prefix cache sound (vLLM, `v1/core/kv_cache_utils.py`, uses such a chain).
"""

from __future__ import annotations

import array
import hashlib
import struct
import sys
from collections.abc import Sequence

BlockHash = bytes
HASH_BYTES = 32
_TOKEN_BYTES = 4


def root_hash(cache_salt: str = "") -> BlockHash:
    """The parent hash of a first block. Requests with different salts share no blocks."""
    return hashlib.sha256(b"baton.kv.v1\0" + cache_salt.encode()).digest()


def next_hash(parent: BlockHash, tokens: Sequence[int]) -> BlockHash:
    """The hash of the full block of `tokens` after `parent`."""
    return hashlib.sha256(parent + _pack(tokens)).digest()


def of_group(block_hash: BlockHash, group: int) -> BlockHash:
    """The name of the block with those tokens' KV in a group of the model's layers (`baton.kv_groups`)."""
    return block_hash + bytes((group,)) if group else block_hash


def is_of_first_group(name: BlockHash) -> bool:
    """Whether it is a block of group 0, whose name is the hash."""
    return len(name) == HASH_BYTES


def chain(tokens: Sequence[int], block_size: int, cache_salt: str = "") -> list[BlockHash]:
    """The hashes of all full blocks of `tokens`, in order."""
    hashes: list[BlockHash] = []
    parent, packed, size = root_hash(cache_salt), _pack(tokens), _TOKEN_BYTES * block_size
    for start in range(0, len(packed) - size + 1, size):
        parent = hashlib.sha256(parent + packed[start : start + size]).digest()
        hashes.append(parent)
    return hashes


def _pack(tokens: Sequence[int]) -> bytes:
    if isinstance(tokens, array.array) and tokens.typecode == "I" and sys.byteorder == "little":
        return tokens.tobytes()
    return struct.pack(f"<{len(tokens)}I", *tokens)
