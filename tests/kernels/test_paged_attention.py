"""The paged attention reference against plain softmax in float64, over batches with every kind of sequence in them."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor

from baton_kernels.paged_attention import reference
from tests.kernels.attention_case import BATCHES
from tests.kernels.attention_case import Case as AnyCase

torch.set_num_threads(1)

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
Case = functools.partial(AnyCase, tails=0.0)  # as the pool promises


def check(
    case: AnyCase, *, window: int | None = None, softcap: float | None = None, sinks: Tensor | None = None
) -> None:
    for _ in range(2):  # the second layer uses the first one's plan
        out = reference.paged_attention(
            case.query, case.key_cache, case.value_cache, case.batch, 0.3, window, softcap, sinks
        )
        expected = case.expected(0.3, window, softcap, sinks).float()
        torch.testing.assert_close(out, expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(8, 2, 32), (4, 4, 16), (6, 1, 8)])
@pytest.mark.parametrize("kind", BATCHES)
def test_plain(kind: str, heads: int, kv_heads: int, dim: int, device: str) -> None:
    check(Case(BATCHES[kind], heads, kv_heads, dim, device, block_size=16))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(8, 2, 32), (6, 1, 8)])
def test_quantized_cache(heads: int, kv_heads: int, dim: int, device: str) -> None:
    case = Case(BATCHES["mixed"], heads, kv_heads, dim, device, block_size=16, quantized=True)
    check(case)


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


def test_blocks_behind_a_window_are_not_read() -> None:
    """The null block, which is in their place, holds NaN here."""
    case = Case(BATCHES["mixed"], 8, 2, 32, "cpu", block_size=8)
    for (num_new, context), row in zip(case.lens, case.batch.rows.tolist(), strict=True):
        case.batch.block_tables[row, : max(0, context - num_new + 1 - 20) // 8] = 0
    check(case, window=20)


def test_a_transposed_query_and_one_token_blocks() -> None:
    case = Case(BATCHES["mixed"], 8, 2, 32, "cpu", block_size=1)
    case.query = case.query.transpose(0, 1).contiguous().transpose(0, 1)
    check(case)


def test_padding_of_a_graph_is_in_no_tile() -> None:
    case = Case([(1, 20), (1, 0), (1, 3)], 4, 2, 8, "cpu", block_size=4)
    out = reference.paged_attention(case.query, case.key_cache, case.value_cache, case.batch, 0.3, None, None, None)
    expected = case.expected(0.3).float()
    torch.testing.assert_close(out[[0, 2]], expected[[0, 2]], atol=2e-5, rtol=2e-5)


def test_tiles_bound_what_is_gathered_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "CPU_TILE_BYTES", 40 * 2 * 16 * 32 * 4)  # 40 blocks
    lens = [(1, 16 * n) for n in (20, 3, 50, 20, 4, 20)] + [(2, 64)]
    case = Case(lens, 8, 2, 32, "cpu", block_size=16)
    check(case)
    (plan,) = case.batch.plans.values()
    assert [tile.pieces.shape[::2] for tile in plan.tiles] == [(1, 4), (1, 50), (2, 20), (2, 20), (1, 3)]
