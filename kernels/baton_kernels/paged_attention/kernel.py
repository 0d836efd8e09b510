"""paged_attention on a GPU: picks the fastest implementation for each sequence."""

from __future__ import annotations

import torch
from torch import Tensor

from baton_kernels.paged_attention import contiguous
from baton_kernels.paged_attention.batch import PagedBatch
from baton_kernels.paged_attention.decode import decode_attention
from baton_kernels.paged_attention.prefill import prefill_attention
from baton_kernels.paged_attention.tile import scoring


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
    can_be_contiguous = contiguous.can_do(query, sliding_window, softcap, sinks)
    fused = key is not None and value is not None and contiguous.are_fused(query, key, value)
    long, runs = _ways(batch, can_be_contiguous, fused)
    outs = []
    for seqs, tokens in long:
        new_key, new_value = (None, None) if key is None or value is None else (key[tokens], value[tokens])
        if len(seqs) > 1:
            assert new_key is not None
            assert new_value is not None
            outs.append(contiguous.squares_attention(query[tokens], new_key, new_value, len(seqs), scale))
        else:
            outs.append(
                contiguous.contiguous_attention(
                    query[tokens], new_key, new_value, key_cache, value_cache, batch, seqs.start, scale
                )
            )
    if len(outs) == 1 and long[0][0] == range(len(batch.query_lens)):
        return outs[0]
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    for (_, tokens), done in zip(long, outs, strict=True):
        out[tokens] = done
    how = scoring(scale, sliding_window, softcap)
    if batch.num_decodes:
        decode_attention(query, key_cache, value_cache, batch, out, how, sinks)
    for seqs in runs:
        prefill_attention(query, key_cache, value_cache, batch, seqs, out, how, sinks)
    return out


def _ways(batch: PagedBatch, can_be_contiguous: bool, fused: bool) -> tuple[list[tuple[range, slice]], list[range]]:
    """The long chunks, each entry one sequence or several equal squares with their tokens, and the runs of other
    chunks between them."""
    key = ("ways", can_be_contiguous, fused)
    if key not in batch.plans:
        long, runs = list[tuple[range, slice]](), list[range]()
        run = token = batch.num_decodes
        for seq in range(batch.num_decodes, len(batch.query_lens)):
            query_len = batch.query_lens[seq]
            known = can_be_contiguous and batch.host_context_lens
            if known and contiguous.pays(query_len, batch.host_context_lens[seq]):
                long.append((range(seq, seq + 1), slice(token, token + query_len)))
                runs.append(range(run, seq))
                run = seq + 1
            token += query_len
        runs.append(range(run, len(batch.query_lens)))
        batch.plans[key] = (_together(batch, long) if fused else long, [seqs for seqs in runs if seqs])
    ways: tuple[list[tuple[range, slice]], list[range]] = batch.plans[key]
    return ways


def _together(batch: PagedBatch, long: list[tuple[range, slice]]) -> list[tuple[range, slice]]:
    """Merge consecutive equal squares into entries of as many as there is a plan for."""
    found, first = list[tuple[range, slice]](), 0
    while first < len(long):
        alike = first
        while alike < len(long) and long[alike][0].start - long[first][0].start == alike - first:
            seq = long[alike][0].start
            if not contiguous.are_squares(batch.query_lens[seq], batch.host_context_lens[seq]):
                break
            alike += 1
        count = next((n for n in contiguous.BATCHES if n <= alike - first), 1)
        (seqs, tokens), (last_seqs, last_tokens) = long[first], long[first + count - 1]
        found.append((range(seqs.start, last_seqs.stop), slice(tokens.start, last_tokens.stop)))
        first += count
    return found
