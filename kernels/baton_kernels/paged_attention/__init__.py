"""Attention of a flattened batch of mixed prefill chunks and decodes, over keys and values in KV blocks."""

from __future__ import annotations

import torch
from torch import Tensor

from baton_kernels.fp8_kv import head_stride
from baton_kernels.paged_attention import reference
from baton_kernels.paged_attention.batch import PagedBatch

__all__ = ["PagedBatch", "paged_attention", "warm_up"]


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    batch: PagedBatch,
    *,
    scale: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    key: Tensor | None = None,
    value: Tensor | None = None,
) -> Tensor:
    """Causal attention of each sequence's new tokens over all of its tokens; returns [num_tokens, num_heads, head_dim].

    query: [num_tokens, num_heads, head_dim], any strides; `num_heads / num_kv_heads` consecutive heads share one KV
        head.
    key_cache, value_cache: [num_blocks, num_kv_heads, block_size, head_dim] views, each [num_kv_heads, block_size,
        head_dim] piece contiguous, or quantized (see `baton_kernels.fp8_kv`); they already hold the new tokens' KV.
    sliding_window: a token sees itself and the `sliding_window - 1` before it. softcap: scores become
    `softcap * tanh(score / softcap)`. sinks: [num_heads], a score per head that takes part in the softmax but has no
    value (gpt-oss).
    key, value: [num_tokens, num_kv_heads, head_dim], those of the new tokens (also in the cache, there possibly
        quantized), for kernels that are faster on contiguous memory.
    """
    num_kv_heads, _, head_dim = key_cache.shape[1:]
    assert query.shape[0] == batch.num_tokens
    assert query.shape[1] % num_kv_heads == 0
    assert query.shape[2] == head_dim
    assert key_cache.shape == value_cache.shape
    assert key_cache.stride() == value_cache.stride()
    assert key_cache.stride()[2:] == (head_dim, 1)
    assert num_kv_heads == 1 or key_cache.stride(1) == head_stride(key_cache)
    if query.is_cuda:
        from baton_kernels.paged_attention import kernel

        return kernel.paged_attention(
            query, key_cache, value_cache, batch, scale, sliding_window, softcap, sinks, key, value
        )
    return reference.paged_attention(query, key_cache, value_cache, batch, scale, sliding_window, softcap, sinks)


def warm_up(
    num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device, max_tokens: int
) -> None:
    """Build the plans that cuDNN needs for chunks of up to `max_tokens`. Call it on the thread that will compute."""
    if device.type == "cuda":
        from baton_kernels.paged_attention import contiguous

        contiguous.warm_up(num_heads, num_kv_heads, head_dim, dtype, device, max_tokens)
