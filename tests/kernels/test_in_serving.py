"""What a serving node needs of the small kernels on a GPU: no wait for the device, nothing compiled after the first
calls, the same results from a replayed CUDA graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from baton_kernels.block_copy import copy_blocks, gather_blocks
from baton_kernels.gated_activation import gated_activation
from baton_kernels.kv_write import HeadNorm, kv_write, rope_kv_write
from baton_kernels.rms_norm import rms_norm
from baton_kernels.step_inputs import step_inputs, update_block_tables

pytestmark = pytest.mark.gpu

HEADS, KV_HEADS, DIM, BLOCK_SIZE = 8, 2, 64, 16
HIDDEN = HEADS * DIM


class Step:
    """The small kernels of a layer and a step, over static buffers for `num_tokens` tokens."""

    def __init__(self, num_tokens: int, offset: int = 0) -> None:
        self.n, device = num_tokens, "cuda"
        torch.manual_seed(num_tokens)
        ints = torch.zeros(3, num_tokens + offset, dtype=torch.int32, device=device)
        self.rows, self.positions, self.host = (row[offset:] for row in ints)
        self.rows.copy_(torch.arange(num_tokens))
        self.positions.random_(0, 4 * BLOCK_SIZE)
        self.host.fill_(-1)
        self.last = torch.randint(0, 1000, (num_tokens,), dtype=torch.int32, device=device)
        self.tables = torch.randperm(num_tokens * 4, device=device).to(torch.int32).view(num_tokens, 4) + 1
        self.pool = torch.zeros(
            num_tokens * 4 + 1, 2, 2, KV_HEADS, BLOCK_SIZE, DIM, dtype=torch.bfloat16, device=device
        )
        self.x, self.residual, self.fused, self.gate_up = (
            torch.randn(num_tokens, width, device=device).bfloat16()
            for width in (HIDDEN, HIDDEN, (HEADS + 2 * KV_HEADS) * DIM, 2 * 768)
        )
        self.weight = torch.randn(HIDDEN, device=device).bfloat16()
        self.cos, self.sin = torch.randn(2, num_tokens, DIM, device=device).bfloat16()

    def run(self) -> list[Tensor]:
        ids, slots = step_inputs(self.rows, self.positions, self.host, self.last, self.tables, BLOCK_SIZE)
        normed = rms_norm(self.x, self.weight, 1e-5, residual=self.residual)
        query, key, value = (
            t.unflatten(1, (-1, DIM)) for t in self.fused.split([HIDDEN, KV_HEADS * DIM, KV_HEADS * DIM], dim=1)
        )
        heads = rms_norm(query[None], self.weight[:DIM], 1e-5)
        norm = HeadNorm(self.weight[:DIM], self.weight[DIM : 2 * DIM], 1e-6, 0.0, round_once=False)
        rope_kv_write(query, key, value, self.cos, self.sin, self.pool[:, 0, 0], self.pool[:, 0, 1], slots, norm=norm)
        kv_write(key, value, self.pool[:, 1, 0], self.pool[:, 1, 1], slots)
        return [ids, slots, normed, heads, gated_activation(self.gate_up, "silu")]

    def state(self) -> list[Tensor]:
        return [self.residual, self.fused, self.pool]


@contextmanager
def no_sync() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@contextmanager
def compilations() -> Iterator[list[str]]:
    """The names of the kernels that are compiled meanwhile."""
    from triton import knobs

    names: list[str] = []

    def note(*, fn: object, **_: object) -> bool:
        names.append(str(getattr(fn, "name", fn)))
        return False

    before, knobs.runtime.jit_cache_hook = knobs.runtime.jit_cache_hook, note
    try:
        yield names
    finally:
        knobs.runtime.jit_cache_hook = before


def test_a_replayed_graph_computes_what_the_calls_do() -> None:
    warm = Step(5)
    warm.run()
    captured, eager = Step(5), Step(5)
    before = [t.clone() for t in captured.state()]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = captured.run()
    for t, was in zip(captured.state(), before, strict=True):
        t.copy_(was)
    for step in (captured, eager):  # new inputs in the same buffers
        step.positions.add_(1).remainder_(4 * BLOCK_SIZE)
        step.last.add_(1)
        step.x.mul_(0.5)
    graph.replay()
    for a, b in zip([*outputs, *captured.state()], [*eager.run(), *eager.state()], strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_nothing_waits_for_the_device() -> None:
    step = Step(5)
    staging = torch.empty((3, 64), dtype=torch.uint8, device="cuda")
    pool_bytes = torch.zeros((9, 64), dtype=torch.uint8, device="cuda")
    index = torch.arange(3, device="cuda")
    blocks = index.to(torch.int32)
    step.run()
    with no_sync():
        step.run()
        update_block_tables(step.tables, index, blocks)
        gather_blocks(pool_bytes, [1, 2, 3], staging)
        copy_blocks(pool_bytes, [(1, 5), (2, 6)])


def test_nothing_is_compiled_after_the_first_calls() -> None:
    pool_bytes = torch.zeros((40, 4096), dtype=torch.uint8, device="cuda")

    def others(n: int, offset: int) -> None:
        tables = torch.zeros((4, 100), dtype=torch.int32, device="cuda")
        update_block_tables(
            tables, torch.arange(n + offset, device="cuda")[offset:], tables.view(-1)[offset : n + offset]
        )
        copy_blocks(pool_bytes, [(i, i + 20) for i in range(n)])

    calls: list[Callable[[], object]] = [lambda: Step(2).run(), lambda: others(2, 0)]
    for call in calls:
        call()
    with compilations() as names:
        for n in (1, 3, 8, 16, 17):
            Step(n, offset=1).run()
            Step(n).run()
            others(n, 1)
            others(n, 0)
    assert names == []
