"""Attention of a long chunk by cuDNN, over contiguous keys and values.

On an H200 (32 query and 8 KV heads of 128, bf16) cuDNN computes causal squares of 4096 and 8192 at 517 and 612 TFLOP/s
and rectangles of 1024 x 8192 at 650 to 690; our Triton kernel over blocks reaches 330 to 400. But cuDNN builds a plan
for each new shape, which takes 40 to 80 ms, and a second for the first of a kind. So only a few shapes are used:

            keys   0 ............. wide | .. front .. | the chunk
    rows of the   |  rectangles of      |  one causal square: `front` padding rows before the chunk's,
    chunk         |  1024 x 16384 ..   |  and some after, round its size to a multiple of 2048

The parts are merged by their log-sum-exp. `warm_up` builds the plans before they are needed. torch keeps them per
thread (aten/src/ATen/native/cudnn/MHA.cpp), so it must be called on the thread that will compute.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from baton_kernels.paged_attention.batch import PagedBatch
from baton_kernels.paged_attention.gather import gather
from baton_kernels.paged_attention.merge import merge_pair


@dataclass(frozen=True, slots=True)
class Shapes:
    """The shapes that plans are built for. Sizes of squares are multiples of `square`, which is the last of `widths`.

    Rectangles have `rows` rows, or `square` rows for chunks of up to `few` tokens: fewer launches, each of which costs
    the host 50 us or more, for 5% of the GPU's time.
    """

    square: int
    rows: int
    few: int
    widths: tuple[int, ...]

    def rows_of(self, num_tokens: int) -> int:
        return self.square if self.rows < num_tokens <= self.few else self.rows


SHAPES = Shapes(square=2048, rows=1024, few=4096, widths=(16384, 8192, 4096, 2048))
BATCHES = (4, 2)
"""How many equal squares one launch may take: four of 2048 take 264 us together and 325 one by one."""
MIN_LENGTH = 1024
MIN_SCORES = 2**23  # below, as for a first chunk of 2000 or one of 1024 after 7168, Triton is as fast


def can_do(query: Tensor, sliding_window: int | None, softcap: float | None, sinks: Tensor | None) -> bool:
    plain = sliding_window is None and softcap is None and sinks is None
    head_dim = query.shape[2]
    return plain and query.dtype != torch.float32 and head_dim % 8 == 0 and head_dim <= 128


def pays(query_len: int, context_len: int) -> bool:
    """Whether cuDNN is faster for such a chunk."""
    if query_len == context_len and query_len % SHAPES.square == 0:
        return True  # one square and nothing to copy: 2048 tokens take 80 us, against 105 in Triton
    return query_len >= MIN_LENGTH and query_len * (context_len - query_len // 2) >= MIN_SCORES


def are_squares(query_len: int, context_len: int) -> bool:
    """Whether several consecutive chunks of this shape can be one launch of `squares_attention`."""
    return query_len == context_len == SHAPES.square


def squares_attention(query: Tensor, key: Tensor, value: Tensor, num_squares: int, scale: float) -> Tensor:
    """Attend `num_squares` consecutive first chunks of equal length. `are_fused` must hold."""
    query, key, value = (x.unflatten(0, (num_squares, -1)).transpose(1, 2) for x in (query, key, value))  # type: ignore[no-untyped-call]
    out, _ = _launch(query, key, value, scale, is_causal=True)
    return out.transpose(1, 2).flatten(0, 1)


def contiguous_attention(
    query: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    key_cache: Tensor,
    value_cache: Tensor,
    batch: PagedBatch,
    seq: int,
    scale: float,
    shapes: Shapes = SHAPES,
) -> Tensor:
    """Attend all new tokens of sequence `seq`, given their query, key and value; see `paged_attention`."""
    num_tokens = query.shape[0]
    before = batch.host_context_lens[seq] - num_tokens
    front = before % shapes.square
    wide = before - front
    if front or num_tokens % shapes.square or key is None or value is None or not are_fused(query, key, value):
        query, key, value = _padded(query, key_cache, value_cache, batch, seq, wide, shapes)
    size = key.shape[0]
    out, lse = _attend(query[:size], key, value, scale, is_causal=True)
    rows = shapes.rows_of(num_tokens)
    for start, width in _rectangles(wide, shapes):
        keys = query.new_empty((width, 2, *key.shape[1:]))
        key, value = keys[:, 0], keys[:, 1]
        gather(key_cache, value_cache, batch, seq, start, width, key, value)
        for first in range(0, num_tokens, rows):
            part, part_lse = _attend(query[front + first : front + first + rows], key, value, scale, is_causal=False)
            merge_pair(out, lse, part, part_lse, front + first, min(rows, num_tokens - first))
    return out[front : front + num_tokens]


def warm_up(
    num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device, max_tokens: int
) -> None:
    """Build the plans for chunks of up to `max_tokens` whose query, key and value are views of one projection's output.

    Takes a few seconds. Call it on the thread that will compute.
    """
    largest = _round_up(max_tokens + SHAPES.square - 1, SHAPES.square)
    fused = torch.zeros((largest, num_heads + 2 * num_kv_heads, head_dim), dtype=dtype, device=device)
    query, key, value = _thirds(fused, num_heads, num_kv_heads)
    if not can_do(query, None, None, None):
        return
    for size in range(SHAPES.square, largest + 1, SHAPES.square):
        _attend(query[:size], key[:size], value[:size], 1.0, is_causal=True)
    for num_squares in BATCHES:
        if (size := num_squares * SHAPES.square) <= min(largest, max_tokens):
            squares_attention(query[:size], key[:size], value[:size], num_squares, 1.0)
    for width in SHAPES.widths:
        keys = fused.new_zeros((width, 2, num_kv_heads, head_dim))
        for rows in (SHAPES.rows, SHAPES.square):
            _attend(query[:rows], keys[:, 0], keys[:, 1], 1.0, is_causal=False)


def _padded(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, batch: PagedBatch, seq: int, wide: int, shapes: Shapes
) -> tuple[Tensor, Tensor, Tensor]:
    """The square's query, key and value, laid out like a fused projection's output. The query is longer, as its last
    rectangle may end past the square. Its padding rows may hold anything; a NaN in the value's would spread."""
    num_tokens, num_heads, head_dim = query.shape
    num_kv_heads = key_cache.shape[1]
    num_keys = batch.host_context_lens[seq] - wide
    size = _round_up(num_keys, shapes.square)
    fused = query.new_empty((size + shapes.square, num_heads + 2 * num_kv_heads, head_dim))
    padded, key, value = _thirds(fused, num_heads, num_kv_heads)
    padded[num_keys - num_tokens : num_keys].copy_(query)
    gather(key_cache, value_cache, batch, seq, wide, num_keys, key[:size], value[:size])
    return padded, key[:size], value[:size]


def are_fused(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether they are views of one projection's output: to cuDNN, other strides are another shape."""
    head_dim = query.shape[2]
    strides = ((query.shape[1] + 2 * key.shape[1]) * head_dim, head_dim, 1)
    return query.stride() == key.stride() == value.stride() == strides


def _thirds(fused: Tensor, num_heads: int, num_kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Views of query, key and value in [num_tokens, num_heads + 2 * num_kv_heads, head_dim]."""
    return fused[:, :num_heads], fused[:, num_heads : num_heads + num_kv_heads], fused[:, num_heads + num_kv_heads :]


def _rectangles(wide: int, shapes: Shapes) -> list[tuple[int, int]]:
    """(first key, width) of each rectangle over keys [0, wide)."""
    rectangles, start = [], 0
    for width in shapes.widths:
        while start + width <= wide:
            rectangles.append((start, width))
            start += width
    return rectangles


def _attend(query: Tensor, key: Tensor, value: Tensor, scale: float, *, is_causal: bool) -> tuple[Tensor, Tensor]:
    """Output [num_rows, num_heads, head_dim], contiguous, and log-sum-exp [num_heads, num_rows], natural, fp32."""
    if not query.is_cuda:
        return _attend_reference(query, key, value, scale, is_causal)
    query, key, value = (x.transpose(0, 1)[None] for x in (query, key, value))
    out, lse = _launch(query, key, value, scale, is_causal=is_causal)
    return out[0].transpose(0, 1), lse[0, :, :, 0]


def _launch(query: Tensor, key: Tensor, value: Tensor, scale: float, *, is_causal: bool) -> tuple[Tensor, Tensor]:
    """All are [num_squares, heads, num_rows, head_dim]; the log-sum-exp is [num_squares, num_heads, num_rows, 1]."""
    out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        query, key, value, None, True, 0.0, is_causal, False, scale=scale
    )
    return out, lse


def _attend_reference(
    query: Tensor, key: Tensor, value: Tensor, scale: float, is_causal: bool
) -> tuple[Tensor, Tensor]:
    group = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(group, dim=1).float() for x in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query.float(), key) * scale
    if is_causal:
        scores = scores.masked_fill(scores.new_ones(scores.shape[1:], dtype=torch.bool).triu(1), float("-inf"))
    out = torch.einsum("hqk,khd->qhd", scores.softmax(-1), value)
    return out.to(query.dtype), scores.logsumexp(-1)


def _round_up(n: int, step: int) -> int:
    return -(-n // step) * step
