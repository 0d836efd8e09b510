"""The paged attention reference against plain softmax in float64, over batches with every kind of sequence in them."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from baton_kernels.kv_write import kv_write
from baton_kernels.paged_attention import PagedBatch, paged_attention, reference

torch.set_num_threads(1)

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
BATCHES = {  # (new tokens, context with them)
    "decodes": [(1, 1), (1, 16), (1, 17), (1, 300), (1, 31), (1, 299)],
    "prompts": [(5, 5), (16, 16), (33, 33), (300, 300)],
    "later chunks": [(7, 40), (16, 64), (270, 600), (2, 33)],
    "mixed": [(1, 65), (40, 40), (1, 7), (9, 100), (1, 128)],
}


class Case:
    """A batch with random KV in scattered blocks of a pool with two layers; everything unused is NaN, but for the
    slots after a sequence's end in its last block, which are zero as the pool promises."""

    def __init__(self, lens: list[tuple[int, int]], heads: int, kv_heads: int, dim: int, device: str, block_size: int):
        generator = torch.Generator().manual_seed(7)
        tables, next_block = [], 1
        total = sum(-(-context // block_size) for _, context in lens) + 1
        order = (torch.randperm(total - 1, generator=generator) + 1).tolist()
        for _, context in lens:
            width = -(-context // block_size)
            tables.append(order[next_block - 1 : next_block - 1 + width] + [0] * 3)
            next_block += width
        pool = torch.full((total, 2, 2, kv_heads, block_size, dim), float("nan"), device=device)
        self.key_cache, self.value_cache = pool[:, 1, 0], pool[:, 1, 1]
        self.keys = [torch.randn(c, kv_heads, dim, generator=generator).to(device) for _, c in lens]
        self.values = [torch.randn(c, kv_heads, dim, generator=generator).to(device) for _, c in lens]
        self.query = torch.randn(sum(n for n, _ in lens), heads, dim, generator=generator).to(device)
        for table, keys, values in zip(tables, self.keys, self.values, strict=True):
            blocks = table[: -(-len(keys) // block_size)]
            pool[blocks[-1], 1] = 0
            slots = torch.tensor([blocks[p // block_size] * block_size + p % block_size for p in range(len(keys))])
            kv_write(keys, values, self.key_cache, self.value_cache, slots.to(device))
        query_lens, contexts = [n for n, _ in lens], [c for _, c in lens]
        self.batch = PagedBatch.build(tables, query_lens, contexts, block_size, torch.device(device))
        self.lens = lens

    def expected(self, scale: float, window: int | None, softcap: float | None, sinks: Tensor | None) -> Tensor:
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
        return torch.cat(outs).float()


def check(case: Case, *, window: int | None = None, softcap: float | None = None, sinks: Tensor | None = None) -> None:
    for _ in range(2):  # the second layer uses the first one's plan
        out = paged_attention(
            case.query,
            case.key_cache,
            case.value_cache,
            case.batch,
            scale=0.3,
            sliding_window=window,
            softcap=softcap,
            sinks=sinks,
        )
        torch.testing.assert_close(out, case.expected(0.3, window, softcap, sinks), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(8, 2, 32), (4, 4, 16), (6, 1, 8)])
@pytest.mark.parametrize("kind", BATCHES)
def test_plain(kind: str, heads: int, kv_heads: int, dim: int, device: str) -> None:
    check(Case(BATCHES[kind], heads, kv_heads, dim, device, block_size=16))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", BATCHES)
def test_window_softcap_and_sinks(kind: str, device: str) -> None:
    case = Case(BATCHES[kind], 8, 2, 32, device, block_size=8)
    sinks = torch.linspace(-1, 1, 8, device=device)
    for window in (1, 20):
        check(case, window=window)
    check(case, softcap=2.0)
    check(case, sinks=sinks)
    check(case, window=33, softcap=5.0, sinks=sinks)


def test_a_transposed_query_and_one_token_blocks() -> None:
    case = Case(BATCHES["mixed"], 8, 2, 32, "cpu", block_size=1)
    case.query = case.query.transpose(0, 1).contiguous().transpose(0, 1)
    check(case)


def test_tiles_bound_what_is_gathered_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "CPU_TILE_BYTES", 40 * 2 * 16 * 32 * 4)  # 40 blocks
    lens = [(1, 16 * n) for n in (20, 3, 50, 20, 4, 20)] + [(2, 64)]
    case = Case(lens, 8, 2, 32, "cpu", block_size=16)
    check(case)
    (plan,) = case.batch.plans.values()
    assert [tile.pieces.shape[::2] for tile in plan.tiles] == [(1, 4), (1, 50), (2, 20), (2, 20), (1, 3)]
