"""paged_attention on a GPU: each sequence the way that is quickest for it."""

from __future__ import annotations

import torch
from torch import Tensor

from baton_kernels.paged_attention.batch import PagedBatch
from baton_kernels.paged_attention.decode import decode_attention
from baton_kernels.paged_attention.prefill import prefill_attention


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    batch: PagedBatch,
    scale: float,
    sliding_window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    key: Tensor | None,
    value: Tensor | None,
) -> Tensor:
    if query.stride(2) != 1:
        query = query.contiguous()
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    if batch.num_decodes:
        decode_attention(query, key_cache, value_cache, batch, out, scale, sliding_window, softcap, sinks)
    if len(batch.query_lens) > batch.num_decodes:
        prefill_attention(query, key_cache, value_cache, batch, out, scale, sliding_window, softcap, sinks)
    return out
