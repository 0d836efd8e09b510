"""Writes new keys and values into their slots of the KV cache."""

from __future__ import annotations

from torch import Tensor

from baton_kernels.kv_write import reference


def kv_write(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None:
    """Write token t of key and value to slot `slot_mapping[t]`, which is `block * block_size + offset`.

    key, value: [num_tokens, num_kv_heads, head_dim], any strides.
    key_cache, value_cache: [num_blocks, num_kv_heads, block_size, head_dim], of the same dtype; changed in place.
    slot_mapping: [num_tokens], int64. No slot twice, but those of the null block 0.
    """
    assert key.shape == value.shape
    assert key.shape[1:] == (key_cache.shape[1], key_cache.shape[3])
    assert key_cache.shape == value_cache.shape
    assert slot_mapping.shape == key.shape[:1]
    reference.kv_write(key, value, key_cache, value_cache, slot_mapping)
