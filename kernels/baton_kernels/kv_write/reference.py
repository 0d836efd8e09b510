"""kv_write and rope_kv_write in plain torch."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from baton_kernels.fp8_kv import is_quantized, quantize, scales_of


class HeadNorm(NamedTuple):
    """RMS norm of each head of query and key; weights are [head_dim]. The other fields are those of `rms_norm`; an
    offset requires `round_once`."""

    q_weight: Tensor
    k_weight: Tensor
    eps: float
    weight_offset: float
    round_once: bool


def kv_write(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None:
    block_size = key_cache.shape[2]
    blocks, offsets = slot_mapping // block_size, slot_mapping % block_size
    for heads, cache in ((key, key_cache), (value, value_cache)):
        if is_quantized(cache):
            elements, scales = quantize(heads)
            cache.view(torch.uint8)[blocks, :, offsets] = elements.view(torch.uint8)
            scales_of(cache)[blocks, :, offsets] = scales
        else:
            cache[blocks, :, offsets] = heads


def rope_kv_write(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor,
    sin: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    interleaved: bool,
    norm: HeadNorm | None,
) -> None:
    if norm is not None:
        query.copy_(_normalised(query, norm.q_weight, norm))
        key.copy_(_normalised(key, norm.k_weight, norm))
    cos, sin = cos.float(), sin.float()
    for heads in _side_by_side(query, key):
        _rotate(heads, cos, sin, interleaved)
    kv_write(key, value, key_cache, value_cache, slot_mapping)


def _normalised(heads: Tensor, weight: Tensor, norm: HeadNorm) -> Tensor:
    x = heads.float()
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.eps)
    if norm.round_once:
        return x * (weight.float() + norm.weight_offset)
    return x.to(heads.dtype) * weight


def _side_by_side(query: Tensor, key: Tensor) -> list[Tensor]:
    """Query and key as one tensor if they are slices of one product, which takes half as many operations."""
    num_tokens, num_heads, head_dim = query.shape
    query_row, key_row = (x.stride()[1:] if num_tokens == 1 else x.stride() for x in (query, key))
    follows = key.storage_offset() == query.storage_offset() + num_heads * head_dim
    if query_row != key_row or query.stride(1) != head_dim or not follows:
        return [query, key]
    if query.untyped_storage().data_ptr() != key.untyped_storage().data_ptr():
        return [query, key]
    return [query.as_strided((num_tokens, num_heads + key.shape[1], head_dim), query.stride())]


def _rotate(heads: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> None:
    """heads: [num_tokens, num_heads, head_dim], changed in place. cos, sin: [num_tokens, rotary_dim], fp32."""
    rotary_dim = cos.shape[1]
    rotated = heads[..., :rotary_dim]
    x = rotated.float()
    if interleaved:
        turned = x.reshape(*x.shape[:-1], rotary_dim // 2, 2).flip(-1).flatten(-2)
        turned[..., ::2].neg_()
    else:
        turned = x.roll(rotary_dim // 2, -1)
        turned[..., : rotary_dim // 2].neg_()
    rotated.copy_((x * cos[:, None]).add_(turned.mul_(sin[:, None])))
