"""A batch over random KV in scattered blocks, and what attention over it is, in float64."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from baton_kernels.fp8_kv import dequantize, elements_of, head_bytes, quantize
from baton_kernels.kv_write import kv_write
from baton_kernels.paged_attention import PagedBatch

BATCHES = {  # (new tokens, context with them)
    "decodes": [(1, 1), (1, 16), (1, 17), (1, 300), (1, 31), (1, 299)],
    "prompts": [(5, 5), (16, 16), (33, 33), (300, 300)],
    "later chunks": [(7, 40), (16, 64), (270, 600), (2, 33)],
    "mixed": [(1, 65), (40, 40), (1, 7), (9, 100), (1, 128)],
}


class Case:
    """Everything unused is NaN. `tails`: what is in the slots after a sequence's end in its last block. quantized: the
    pool has keys and values of 8 bits, and `keys` and `values` are what it can hold.

    The pool has two layers, the block tables more rows than sequences, in another order.
    """

    def __init__(
        self,
        lens: list[tuple[int, int]],
        heads: int,
        kv_heads: int,
        dim: int,
        device: str,
        block_size: int,
        dtype: torch.dtype = torch.float32,
        tails: float = math.nan,
        *,
        quantized: bool = False,
    ) -> None:
        generator = torch.Generator().manual_seed(7)
        widths = [-(-context // block_size) for _, context in lens]
        order = (torch.randperm(sum(widths), generator=generator) + 1).tolist()
        tables = [[order.pop() for _ in range(width)] + [0] * 3 for width in widths]
        num_blocks = sum(widths) + 1
        pool = torch.full((num_blocks, 2, 2, kv_heads, block_size, dim), math.nan, device=device, dtype=dtype)
        if quantized:
            pool = torch.full((num_blocks, 2, 2, kv_heads, head_bytes(block_size, dim)), 255, dtype=torch.uint8)
            pool = pool.to(device)
        stored = elements_of(pool, block_size, dim) if quantized else pool

        def random(num_tokens: int, num_heads: int) -> Tensor:
            return torch.randn(num_tokens, num_heads, dim, generator=generator).to(device, dtype)

        def cached(num_tokens: int) -> Tensor:
            heads = random(num_tokens, kv_heads)
            return dequantize(*quantize(heads), dtype) if quantized else heads

        self.key_cache, self.value_cache = stored[:, 1, 0], stored[:, 1, 1]
        self.keys = [cached(context) for _, context in lens]
        self.values = [cached(context) for _, context in lens]
        # The new tokens' query, key and value are views of one projection's output.
        fused = random(sum(n for n, _ in lens), heads + 2 * kv_heads)
        self.query = fused[:, :heads]
        self.key, self.value = fused[:, heads : heads + kv_heads], fused[:, heads + kv_heads :]
        first = 0
        for (n, context), table, keys, values in zip(lens, tables, self.keys, self.values, strict=True):
            if context:  # 0 pads a graph
                self.key[first : first + n], self.value[first : first + n] = keys[-n:], values[-n:]
                pool[table[-4], 1] = tails if not quantized else 255 if math.isnan(tails) else 0
            first += n
            slots = torch.tensor([table[p // block_size] * block_size + p % block_size for p in range(context)])
            kv_write(keys, values, self.key_cache, self.value_cache, slots.to(device, torch.int64))
        query_lens, contexts = [n for n, _ in lens], [c for _, c in lens]
        self.batch = PagedBatch.build(tables, query_lens, contexts, block_size, torch.device(device))
        self.lens, self._pool, self._tables = lens, pool, tables
        self._shuffle_rows(generator)

    def give_back(self, window: int) -> None:
        """Blocks that are no longer read, which block tables still name, are another sequence's, and full of NaNs."""
        block_size = self.batch.block_size
        for (n, context), table in zip(self.lens, self._tables, strict=True):
            num_unread = max(0, context - n + 1 - window) // block_size
            self._pool[table[:num_unread]] = 255 if self._pool.dtype == torch.uint8 else math.nan

    def _shuffle_rows(self, generator: torch.Generator) -> None:
        batch = self.batch
        rows = torch.randperm(len(self.lens) + 2, generator=generator)[: len(self.lens)].to(batch.device)
        tables = torch.zeros(len(self.lens) + 2, batch.block_tables.shape[1], dtype=torch.int32, device=batch.device)
        tables[rows] = batch.block_tables
        batch.block_tables, batch.rows = tables, rows.to(torch.int32)

    def expected(
        self,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """[num_tokens, heads, dim], float64, computed where the case is."""
        outs, first = [], 0
        for (n, context), keys, values in zip(self.lens, self.keys, self.values, strict=True):
            q = self.query[first : first + n].double()
            group = q.shape[1] // keys.shape[1]
            k, v = (x.double().repeat_interleave(group, dim=1) for x in (keys, values))
            scores = torch.einsum("qhd,khd->hqk", q, k) * scale
            if softcap:
                scores = softcap * torch.tanh(scores / softcap)
            distance = torch.arange(context - n, context)[:, None] - torch.arange(context)[None, :]
            seen = (distance >= 0) & (distance < (window or math.inf))
            weights = scores.masked_fill(~seen.to(scores.device), float("-inf")).exp()
            total = weights.sum(-1, keepdim=True)
            if sinks is not None:
                total += sinks.double().exp()[:, None, None]
            outs.append(torch.einsum("hqk,khd->qhd", weights / total, v))
            first += n
        return torch.cat(outs)
