"""paged_attention in plain torch, fast enough to serve from a CPU.

On one core (32 decodes, contexts of 2,048, 2 KV heads of 32), gathering a whole batch's KV costs more in page faults
than its attention does, and going one sequence at a time adds overhead; tiles whose keys fit the L2 cache take 3.3 ms
per layer, against 17.6 for one tile of all. A chunk's queries are processed in runs of 256, each against the keys that
it may see, so that a causal prompt costs half of its square. Of a sliding window, blocks before the first key that any
of a sequence's queries sees are not gathered.

Contents of cached slots past a sequence's end are multiplied by a weight of zero, so they must be finite.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from baton_kernels.fp8_kv import dequantize, elements_of, head_stride, is_quantized
from baton_kernels.paged_attention.batch import PagedBatch

CPU_TILE_BYTES = 1 << 20  # of keys; the L2 cache of a server core
GPU_TILE_BYTES = 1 << 28
QUERY_RUN = 256

Tables = np.ndarray[Any, np.dtype[np.int32]]


@dataclass(slots=True)
class Tile:
    """Sequences of one query length whose keys are gathered together.

    tokens, positions: [num_seqs, query_len], the queries' rows in the batch, and their positions from the first key of
    their sequence that is gathered. pieces: [num_seqs, num_kv_heads, max_blocks], indexes of the cache's [block_size,
    head_dim] pieces with the keys. num_keys: the most of a sequence.
    """

    tokens: Tensor
    positions: Tensor
    pieces: Tensor
    num_keys: int
    masks: dict[tuple[int | None, int], Tensor | None] = field(default_factory=dict)

    def mask(self, sliding_window: int | None, first: int, end: int, num_keys: int) -> Tensor | None:
        """[num_seqs, 1, end - first, num_keys], fp32: 0 or -inf to add to the scores of queries [first, end).

        None when all queries see all keys.
        """
        key = (sliding_window, first)
        if key not in self.masks:
            distance = self.positions[:, first:end, None] - torch.arange(num_keys, device=self.positions.device)
            hidden = distance < 0
            if sliding_window is not None:
                hidden |= distance >= sliding_window
            mask = torch.zeros(hidden.shape, device=hidden.device).masked_fill_(hidden, float("-inf"))
            self.masks[key] = mask[:, None] if bool(hidden.any()) else None
        return self.masks[key]


@dataclass(frozen=True, slots=True)
class Plan:
    """A step's tiles, and buffers for the keys and values of one tile: [max_pieces, block_size * head_dim] each, or
    [max_pieces, bytes of a piece], if they are quantized. is_whole: one tile has all of the step's tokens, in order.

    New memory for each tile would cost more in page faults than the copy into it.
    """

    tiles: list[Tile]
    keys: Tensor
    values: Tensor
    is_whole: bool


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    batch: PagedBatch,
    scale: float,
    sliding_window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    plan = _plan(batch, key_cache, sliding_window)
    how = scale, sliding_window, softcap, sinks
    if plan.is_whole:
        (tile,) = plan.tiles
        queries = query.reshape(*tile.tokens.shape, *query.shape[1:])
        return _attend_tile(queries, key_cache, value_cache, plan, tile, *how).flatten(0, 1).contiguous()
    out = torch.zeros(query.shape, dtype=query.dtype, device=query.device)  # padding entries are in no tile
    for tile in plan.tiles:
        out[tile.tokens] = _attend_tile(query[tile.tokens], key_cache, value_cache, plan, tile, *how)
    return out


def _attend_tile(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    plan: Plan,
    tile: Tile,
    scale: float,
    sliding_window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """query: of the tile's tokens, [num_seqs, query_len, num_heads, head_dim]; the result too."""
    query_len = query.shape[1]
    key = _gather(key_cache, tile.pieces, plan.keys, query.dtype)
    value = _gather(value_cache, tile.pieces, plan.values, query.dtype)
    runs = []
    for first in range(0, query_len, QUERY_RUN):
        end = min(first + QUERY_RUN, query_len)
        num_keys = tile.num_keys - (query_len - end)
        mask = tile.mask(sliding_window, first, end, num_keys)
        mask = None if mask is None else mask.to(query.dtype)
        q = query[:, first:end].transpose(1, 2)
        attended = _attend(q, key[:, :, :num_keys], value[:, :, :num_keys], mask, scale, softcap, sinks)
        runs.append(attended.transpose(1, 2))
    return runs[0] if len(runs) == 1 else torch.cat(runs, 1)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """q [num_seqs, num_heads, query_len, head_dim], k and v [num_seqs, num_kv_heads, num_keys, head_dim] -> like q."""
    if softcap is not None or sinks is not None:
        return _attend_in_steps(q, k, v, mask, scale, softcap, sinks)
    if q.shape[2] > 1:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True)
    # One query each: a KV head's queries form the rows of one small matrix, so that KV is read once.
    grouped = q.reshape(q.shape[0], k.shape[1], -1, q.shape[3])
    return F.scaled_dot_product_attention(grouped, k, v, attn_mask=mask, scale=scale).reshape(q.shape)


def _attend_in_steps(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = (q @ k.transpose(2, 3)).float() * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        scores = scores + mask
    if sinks is not None:
        column = sinks.float().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, column], dim=-1)
    return scores.softmax(dim=-1)[..., : k.shape[2]].to(q.dtype) @ v


def _gather(cache: Tensor, pieces: Tensor, room: Tensor, dtype: torch.dtype) -> Tensor:
    """Keys or values in the order of their positions: [num_seqs, num_kv_heads, max_blocks * block_size, head_dim].

    Copies whole [block_size, head_dim] pieces, with their scales if they are quantized, as rows of the memory around
    the cache's view of one layer, into `room`, which the next tile overwrites.
    """
    block_size, head_dim = cache.shape[2:]
    row = head_stride(cache)
    num_rows = (cache.shape[0] - 1) * (cache.stride(0) // row) + cache.shape[1]
    quantized = is_quantized(cache)
    memory = cache.view(torch.uint8) if quantized else cache
    rows = memory.as_strided((num_rows, row), (row, 1))
    gathered = room[: pieces.numel()]
    torch.index_select(rows, 0, pieces.view(-1), out=gathered)
    if quantized:
        scales = gathered[:, block_size * head_dim :]
        gathered = dequantize(elements_of(gathered, block_size, head_dim), scales, dtype)
    return gathered.view(*pieces.shape[:2], -1, head_dim)


def _plan(batch: PagedBatch, cache: Tensor, window: int | None) -> Plan:
    """The step's tiles, made by the first layer and reused by all others of its shape and window."""
    key = ("tiles", cache.shape[1], cache.shape[3], cache.stride(0), cache.dtype, window)
    if key not in batch.plans:
        limit_bytes = CPU_TILE_BYTES if cache.device.type == "cpu" else GPU_TILE_BYTES
        block_bytes = cache[0].numel() * cache.element_size()
        tables, contexts = batch.block_tables[batch.rows].cpu().numpy(), batch.context_lens.tolist()
        spans = [_span(batch, i, context, window) for i, context in enumerate(contexts)]
        groups = _groups(batch, spans, max_blocks=limit_bytes // block_bytes)
        tiles = [_tile(batch, tables, contexts, spans, seqs, cache) for seqs in groups]
        most = max((tile.pieces.numel() for tile in tiles), default=0)
        dtype = torch.uint8 if is_quantized(cache) else cache.dtype
        room = torch.empty((2, most, head_stride(cache)), dtype=dtype, device=cache.device)
        is_whole = len(tiles) == 1 and tiles[0].tokens.flatten().tolist() == list(range(batch.num_tokens))
        batch.plans[key] = Plan(tiles, room[0], room[1], is_whole)
    plan: Plan = batch.plans[key]
    return plan


def _span(batch: PagedBatch, seq: int, context: int, window: int | None) -> range:
    """The columns of the sequence's block table with keys that its queries may see."""
    first = 0 if window is None else max(0, context - batch.query_lens[seq] + 1 - window) // batch.block_size
    return range(first, -(-context // batch.block_size))


def _groups(batch: PagedBatch, spans: list[range], max_blocks: int) -> list[list[int]]:
    """The sequences of each tile: one chunk, or decodes with keys in similarly many blocks, with at most `max_blocks`
    blocks in all after padding (or one decode)."""
    groups = [[i] for i, query_len in enumerate(batch.query_lens) if query_len > 1]
    decodes = [i for i, query_len in enumerate(batch.query_lens) if query_len == 1 and spans[i]]
    if decodes and len(decodes) * max(len(spans[i]) for i in decodes) <= max_blocks:
        return [*groups, decodes]  # in their order, which a tile of the whole step needs
    decodes.sort(key=lambda i: -len(spans[i]))
    while decodes:
        width = len(spans[decodes[0]])
        size = max(1, max_blocks // width)
        groups.append(decodes[:size])
        decodes = decodes[size:]
    return groups


def _tile(
    batch: PagedBatch, tables: Tables, contexts: list[int], spans: list[range], seqs: list[int], cache: Tensor
) -> Tile:
    query_len = batch.query_lens[seqs[0]]
    blocks = np.empty((len(seqs), max(len(spans[i]) for i in seqs)), dtype=np.int64)
    for own, i in zip(blocks, seqs, strict=True):
        own[: len(spans[i])] = tables[i, spans[i].start : spans[i].stop]
        own[len(spans[i]) :] = own[0]  # padding reads the sequence's own keys, masked
    steps = np.arange(query_len)
    first_tokens = np.cumsum([0, *batch.query_lens])[seqs]
    num_keys = [contexts[i] - spans[i].start * batch.block_size for i in seqs]
    first_positions = np.array(num_keys) - query_len
    row = head_stride(cache)
    indexes = (
        first_tokens[:, None] + steps,
        first_positions[:, None] + steps,
        blocks[:, None, :] * (cache.stride(0) // row) + np.arange(cache.shape[1])[None, :, None],
    )
    tokens, positions, pieces = (torch.from_numpy(x).to(cache.device) for x in indexes)
    return Tile(tokens, positions, pieces, max(num_keys))


def merge_pair(
    out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor, first_token: int = 0, num_tokens: int | None = None
) -> None:
    """As `merge.merge_pair`."""
    num_tokens = other.shape[0] if num_tokens is None else num_tokens
    out, lse = out[first_token : first_token + num_tokens], lse[:, first_token : first_token + num_tokens]
    other, other_lse = other[:num_tokens], other_lse[:, :num_tokens]
    total = torch.logaddexp(lse, other_lse)
    weight, other_weight = (torch.exp(x - total).T[:, :, None] for x in (lse, other_lse))
    out.copy_(out.float() * weight + other.float() * other_weight)
    lse.copy_(total)
