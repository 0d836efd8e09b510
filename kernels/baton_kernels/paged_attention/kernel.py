"""paged_attention on a GPU: each sequence the way that is quickest for it."""

from __future__ import annotations

import torch
from torch import Tensor

from baton_kernels.paged_attention import contiguous
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
    long, runs = _ways(batch, contiguous.can_do(query, sliding_window, softcap, sinks))
    outs = []
    for seq, tokens in long:
        new_key, new_value = (None, None) if key is None or value is None else (key[tokens], value[tokens])
        caches = (key_cache, value_cache)
        outs.append(contiguous.contiguous_attention(query[tokens], new_key, new_value, *caches, batch, seq, scale))
    if len(outs) == len(batch.query_lens) == 1:
        return outs[0]
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    for (_, tokens), done in zip(long, outs, strict=True):
        out[tokens] = done
    rules = (scale, sliding_window, softcap, sinks)
    if batch.num_decodes:
        decode_attention(query, key_cache, value_cache, batch, out, *rules)
    for seqs in runs:
        prefill_attention(query, key_cache, value_cache, batch, seqs, out, *rules)
    return out


def _ways(batch: PagedBatch, can_be_contiguous: bool) -> tuple[list[tuple[int, slice]], list[range]]:
    """The long chunks, each a sequence and its tokens, and the runs of other chunks between them."""
    key = ("ways", can_be_contiguous)
    if key not in batch.plans:
        long, runs = [], []
        run = token = batch.num_decodes
        for seq in range(batch.num_decodes, len(batch.query_lens)):
            query_len = batch.query_lens[seq]
            known = can_be_contiguous and batch.host_context_lens
            if known and contiguous.pays(query_len, batch.host_context_lens[seq]):
                long.append((seq, slice(token, token + query_len)))
                runs.append(range(run, seq))
                run = seq + 1
            token += query_len
        runs.append(range(run, len(batch.query_lens)))
        batch.plans[key] = (long, [seqs for seqs in runs if seqs])
    ways: tuple[list[tuple[int, slice]], list[range]] = batch.plans[key]
    return ways
