"""Writes new keys and values into their slots of the KV cache, optionally with rotary embedding and per-head norms."""

from __future__ import annotations

from torch import Tensor

from baton_kernels.fp8_kv import head_bytes, is_quantized
from baton_kernels.kv_write import reference
from baton_kernels.kv_write.reference import HeadNorm

__all__ = ["HeadNorm", "kv_write", "rope_kv_write"]


def kv_write(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None:
    """Write token t of key and value to slot `slot_mapping[t]`, which is `block * block_size + offset`.

    key, value: [num_tokens, num_kv_heads, head_dim], any strides.
    key_cache, value_cache: [num_blocks, num_kv_heads, block_size, head_dim], of the same dtype and strides; changed in
        place. Of the dtype of key and value, or quantized (see `baton_kernels.fp8_kv`).
    slot_mapping: [num_tokens], int64, contiguous. Slots are unique, except those of the null block 0.
    """
    _check(key, value, key_cache, value_cache, slot_mapping)
    if key.is_cuda:
        from baton_kernels.kv_write import kernel

        kernel.kv_write(key, value, key_cache, value_cache, slot_mapping)
    else:
        reference.kv_write(key, value, key_cache, value_cache, slot_mapping)


def rope_kv_write(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor,
    sin: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    interleaved: bool = False,
    norm: HeadNorm | None = None,
) -> None:
    """Rotate query and key in place, after an RMS norm of each head if `norm` is given, then do the same as `kv_write`.

    query: [num_tokens, num_heads, head_dim]; key, value: [num_tokens, num_kv_heads, head_dim]; any strides but a
        contiguous last dimension, so slices of one fused projection work.
    cos, sin: [num_tokens, rotary_dim], the last dimension contiguous, any floating dtype. `cos[t, i]` belongs to
        element i of a head; elements from rotary_dim on pass through. Element i rotates with `i + rotary_dim / 2`, or,
        if `interleaved` (GPT-J, Cohere), 2i with 2i + 1; both have the same cos and sin, of which a kernel reads one.
        Of transformers' tables, those of GLM, Helium and ERNIE 4.5 need `cos[:, : rotary_dim //
        2].repeat_interleave(2, -1)` and `interleaved`, those of gpt-oss need `cat((cos, cos), -1)`; the others fit.

    The rotation is computed in fp32 from cos and sin as given, and rounded once; transformers also rounds each of the
    two products to the model's dtype.
    """
    _check(key, value, key_cache, value_cache, slot_mapping)
    num_tokens, _, head_dim = key.shape
    assert query.shape[0] == num_tokens
    assert query.shape[2] == head_dim
    assert query.stride(2) == key.stride(2) == value.stride(2) == 1
    assert cos.shape == sin.shape
    assert cos.shape[0] == num_tokens
    assert cos.shape[1] % 2 == 0
    assert cos.shape[1] <= head_dim
    assert cos.stride() == sin.stride()
    assert cos.stride(1) == 1
    if norm is not None:
        assert norm.q_weight.shape == norm.k_weight.shape == (head_dim,)
        assert norm.round_once or norm.weight_offset == 0.0
    if key.is_cuda:
        from baton_kernels.kv_write import rope_kernel

        rope_kernel.rope_kv_write(query, key, value, cos, sin, key_cache, value_cache, slot_mapping, interleaved, norm)
    else:
        reference.rope_kv_write(query, key, value, cos, sin, key_cache, value_cache, slot_mapping, interleaved, norm)


def _check(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None:
    assert key.shape == value.shape
    assert key.shape[1:] == (key_cache.shape[1], key_cache.shape[3])
    assert key_cache.shape == value_cache.shape
    assert key_cache.stride() == value_cache.stride()
    assert key_cache.stride(3) == 1
    if is_quantized(key_cache) and key_cache.shape[1] > 1:  # torch may give a single head any stride
        assert key_cache.stride(1) == head_bytes(*key_cache.shape[2:])
    assert slot_mapping.shape == key.shape[:1]
    assert slot_mapping.is_contiguous()
