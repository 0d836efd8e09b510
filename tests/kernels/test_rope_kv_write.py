"""rope_kv_write: the reference turns heads as transformers' models do, and the kernel writes what the reference does,
there and nowhere else."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from baton_kernels.fp8_kv import elements_of, head_bytes, quantize, scales_of
from baton_kernels.kv_write import kv_write, reference, rope_kv_write
from baton_kernels.kv_write.reference import HeadNorm

torch.set_num_threads(1)

PLACES = [
    pytest.param("cpu", torch.float32),
    pytest.param("cpu", torch.float16),
    pytest.param("cuda", torch.float32, marks=pytest.mark.gpu),
    pytest.param("cuda", torch.bfloat16, marks=pytest.mark.gpu),
]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 8e-3, torch.bfloat16: 6e-2}  # a few units of the values' last place


class Case:
    """A fused projection, and a pool of two layers of which the second is written; both NaN where nothing was put."""

    def __init__(
        self,
        num_tokens: int = 3,
        heads: int = 5,
        kv_heads: int = 2,
        dim: int = 64,
        rotary_dim: int | None = None,
        block_size: int = 4,
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
        *,
        quantized: bool = False,
    ) -> None:
        self.generator = torch.Generator().manual_seed(dim + num_tokens)
        width = (heads + 2 * kv_heads) * dim
        self.fused = self.random(num_tokens, width).to(dtype).to(device)
        q, k = heads * dim, (heads + kv_heads) * dim
        self.query = self.fused[:, :q].view(num_tokens, heads, dim)
        self.key = self.fused[:, q:k].view(num_tokens, kv_heads, dim)
        self.value = self.fused[:, k:].view(num_tokens, kv_heads, dim)
        num_blocks = 2 + num_tokens // block_size
        if quantized:
            pool = torch.full((num_blocks, 2, 2, kv_heads, head_bytes(block_size, dim)), 255, dtype=torch.uint8)
            self.pool = elements_of(pool.to(device), block_size, dim)
        else:
            dims = (num_blocks, 2, 2, kv_heads, block_size, dim)
            self.pool = torch.full(dims, float("nan"), dtype=dtype, device=device)
        slots = torch.randperm((num_blocks - 1) * block_size, generator=self.generator)[:num_tokens] + block_size
        self.slots = slots.to(device)
        angles = self.random(num_tokens, (rotary_dim or dim) // 2).to(device) * 3
        self.cos, self.sin = (torch.cat((t, t), dim=-1) for t in (angles.cos(), angles.sin()))
        weights = self.random(2, dim).to(dtype).to(device)
        self.norm = (weights[0], weights[1])

    def random(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator)

    def tensors(self) -> tuple[Tensor, ...]:
        """What both implementations take, in this order."""
        caches = self.pool[:, 1, 0], self.pool[:, 1, 1]
        return self.query, self.key, self.value, self.cos, self.sin, *caches, self.slots

    def written(self) -> tuple[Tensor, Tensor]:
        """Keys and values at the slots: [num_tokens, kv_heads, dim]."""
        blocks, offsets = self.slots // self.pool.shape[4], self.slots % self.pool.shape[4]
        return self.pool[blocks, 1, 0, :, offsets], self.pool[blocks, 1, 1, :, offsets]

    def check_quantized(self) -> None:
        """Assert that a quantized pool holds key and value, quantized, at the slots, and nothing was written elsewhere
        in the first layer."""
        blocks, offsets = self.slots // self.pool.shape[4], self.slots % self.pool.shape[4]
        for heads, cache in ((self.key, self.pool[:, 1, 0]), (self.value, self.pool[:, 1, 1])):
            elements, scales = quantize(heads)
            expected, found = elements.view(torch.uint8), cache.view(torch.uint8)[blocks, :, offsets]
            if not cache.is_cuda:  # Triton's interpreter rounds ties up, and loses the carry of a mantissa
                is_near = (found.int() - expected.int()).abs() <= 1
                found = torch.where(is_near | (expected & 7 == 0), expected, found)
            assert torch.equal(found, expected)
            assert torch.equal(scales_of(cache)[blocks, :, offsets], scales)
        assert bool((self.pool[:, 0].view(torch.uint8) == 255).all())


def modeling(family: str) -> ModuleType:
    return importlib.import_module(f"transformers.models.{family}.modeling_{family}")


def pairs(table: Tensor) -> Tensor:
    """The halves' values, each twice in a row."""
    return table[:, : table.shape[1] // 2].repeat_interleave(2, dim=-1)


@pytest.mark.parametrize("num_tokens", [1, 3])
@pytest.mark.parametrize("order", ["query key value", "key query value", "query value key", "apart"])
def test_the_reference_turns_slices_in_any_order(num_tokens: int, order: str) -> None:
    case, expected = Case(num_tokens), Case(num_tokens)
    names = ("query", "key", "value")
    heads = {name: getattr(case, name).clone() for name in names}
    if order != "apart":
        ordered = order.split()
        widths = [heads[name].shape[1] for name in ordered]
        slices = torch.cat([heads[name] for name in ordered], dim=1).split(widths, dim=1)
        heads = dict(zip(ordered, slices, strict=True))
    for name in names:
        setattr(expected, name, getattr(expected, name).clone())
        setattr(case, name, heads[name])
    rope_kv_write(*case.tensors())
    rope_kv_write(*expected.tensors())
    assert torch.equal(case.query, expected.query)
    for found, wanted in zip((case.key, *case.written()), (expected.key, *expected.written()), strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize(
    ("family", "rotary_dim", "interleaved"),
    [
        ("llama", 64, False),
        ("gpt_neox", 16, False),
        ("gpt_neox", 48, False),
        ("gpt_oss", 64, False),
        ("cohere", 64, True),
        ("glm", 32, True),
        ("ernie4_5", 64, True),
    ],
)
def test_reference_is_transformers(family: str, rotary_dim: int, interleaved: bool) -> None:
    case = Case(rotary_dim=rotary_dim)
    cos, sin = case.cos, case.sin
    if interleaved:
        case.cos, case.sin = pairs(cos), pairs(sin)
    if family == "cohere":
        cos, sin = case.cos, case.sin
    if family == "gpt_oss":
        cos, sin = cos[:, :32], sin[:, :32]
    turn = modeling(family).apply_rotary_pos_emb
    query, key = turn(case.query.transpose(0, 1)[None], case.key.transpose(0, 1)[None], cos[None], sin[None])
    rope_kv_write(*case.tensors(), interleaved=interleaved)
    torch.testing.assert_close(case.query, query[0].transpose(0, 1))
    torch.testing.assert_close(case.key, key[0].transpose(0, 1))
    keys, values = case.written()
    assert torch.equal(keys, case.key)
    assert torch.equal(values, case.value)


@pytest.mark.parametrize(("family", "name", "offset"), [("qwen3", "Qwen3", 0.0), ("gemma3", "Gemma3", 1.0)])
def test_reference_with_head_norms_is_transformers(family: str, name: str, offset: float) -> None:
    case = Case()
    norm = getattr(modeling(family), f"{name}RMSNorm")(64, eps=1e-5)
    heads = []
    with torch.no_grad():
        for x, weight in zip((case.query, case.key), case.norm, strict=True):
            norm.weight.data = weight
            heads.append(norm(x).transpose(0, 1)[None])
    query, key = modeling(family).apply_rotary_pos_emb(*heads, case.cos[None], case.sin[None])
    rope_kv_write(*case.tensors(), norm=HeadNorm(*case.norm, 1e-5, offset, round_once=offset != 0.0))
    torch.testing.assert_close(case.query, query[0].transpose(0, 1))
    torch.testing.assert_close(case.key, key[0].transpose(0, 1))
    assert torch.equal(case.written()[0], case.key)


def check_kernel(*, interleaved: bool, norm: tuple[float, bool] | None = None, half_tables: bool, **shape: Any) -> None:
    """Both ways from the same state: all of the fused buffer and all of the pool must agree."""
    from baton_kernels.kv_write import rope_kernel

    expected, case = Case(**shape), Case(**shape)
    both: Any = (expected, reference.rope_kv_write), (case, rope_kernel.rope_kv_write)
    for c, rope in both:
        if interleaved:
            c.cos, c.sin = pairs(c.cos), pairs(c.sin)
        if half_tables:
            c.cos, c.sin = c.cos.to(c.fused.dtype), c.sin.to(c.fused.dtype)
        rope(
            *c.tensors(), interleaved, None if norm is None else HeadNorm(c.norm[0], c.norm[1], 1e-5, norm[0], norm[1])
        )
    tolerance = TOLERANCE[case.fused.dtype]
    torch.testing.assert_close(case.fused, expected.fused, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(case.pool, expected.pool, atol=tolerance, rtol=tolerance, equal_nan=True)
    assert torch.equal(case.value, Case(**shape).value)
    keys, values = case.written()
    assert torch.equal(keys, case.key)
    assert torch.equal(values, case.value)


@pytest.mark.parametrize(("device", "dtype"), PLACES)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    ("dim", "rotary_dim"), [(16, 4), (64, 64), (80, 32), (80, 80), (96, 96), (128, 96), (256, 256)]
)
def test_kernel(dim: int, rotary_dim: int, interleaved: bool, device: str, dtype: torch.dtype) -> None:
    shape: dict[str, Any] = {"dim": dim, "rotary_dim": rotary_dim, "device": device, "dtype": dtype}
    if device == "cpu":
        shape |= {"num_tokens": 2, "heads": 3}  # the interpreter takes a millisecond for each head of a token
    check_kernel(interleaved=interleaved, half_tables=interleaved, **shape)
    for norm in ((0.0, False), (1.0, True)):
        check_kernel(interleaved=interleaved, half_tables=not interleaved, norm=norm, **shape)


@pytest.mark.parametrize(("device", "dtype"), PLACES)
@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (9, 3), (16, 16), (40, 8)])
@pytest.mark.parametrize("num_tokens", [0, 1, 6])
def test_kernel_over_heads_and_tokens(
    num_tokens: int, heads: int, kv_heads: int, device: str, dtype: torch.dtype
) -> None:
    shape: dict[str, Any] = {
        "num_tokens": num_tokens,
        "heads": heads,
        "kv_heads": kv_heads,
        "dim": 128,
        "block_size": 16,
    }
    check_kernel(interleaved=False, half_tables=False, norm=(0.0, False), device=device, dtype=dtype, **shape)


@pytest.mark.parametrize(("device", "dtype"), PLACES)
@pytest.mark.parametrize(("kv_heads", "dim", "block_size"), [(1, 64, 1), (3, 80, 4), (8, 128, 16)])
@pytest.mark.parametrize("layout", ["rows", "heads first", "columns"])
def test_kv_write_kernel(
    layout: str, kv_heads: int, dim: int, block_size: int, device: str, dtype: torch.dtype
) -> None:
    from baton_kernels.kv_write import kernel

    expected, case = (
        Case(num_tokens=5, kv_heads=kv_heads, dim=dim, block_size=block_size, device=device, dtype=dtype)
        for _ in range(2)
    )
    for c, write in ((expected, reference.kv_write), (case, kernel.kv_write)):
        if layout == "heads first":
            c.key, c.value = (t.transpose(0, 1).contiguous().transpose(0, 1) for t in (c.key, c.value))
        if layout == "columns":
            c.key = c.key.permute(2, 0, 1).contiguous().permute(1, 2, 0)
        write(c.key, c.value, *c.tensors()[5:])
    torch.testing.assert_close(case.pool, expected.pool, atol=0, rtol=0, equal_nan=True)


@pytest.mark.parametrize(("device", "dtype"), PLACES)
@pytest.mark.parametrize(("kv_heads", "dim", "block_size"), [(1, 64, 1), (3, 80, 4), (8, 128, 16)])
def test_kv_write_kernel_into_a_quantized_cache(
    kv_heads: int, dim: int, block_size: int, device: str, dtype: torch.dtype
) -> None:
    from baton_kernels.kv_write import kernel

    shape: dict[str, Any] = {"num_tokens": 5, "kv_heads": kv_heads, "dim": dim, "block_size": block_size}
    for write in (reference.kv_write, kernel.kv_write):
        case = Case(**shape, device=device, dtype=dtype, quantized=True)
        write(case.key, case.value, *case.tensors()[5:])
        case.check_quantized()


@pytest.mark.parametrize(("device", "dtype"), PLACES)
@pytest.mark.parametrize(("dim", "rotary_dim", "interleaved"), [(64, 64, False), (80, 32, True), (128, 96, False)])
def test_kernel_into_a_quantized_cache(
    dim: int, rotary_dim: int, interleaved: bool, device: str, dtype: torch.dtype
) -> None:
    """What it stores is what it leaves in the key, quantized."""
    from baton_kernels.kv_write import rope_kernel

    for with_norm in (False, True):
        case = Case(num_tokens=3, dim=dim, rotary_dim=rotary_dim, device=device, dtype=dtype, quantized=True)
        if interleaved:
            case.cos, case.sin = pairs(case.cos), pairs(case.sin)
        norm = HeadNorm(case.norm[0], case.norm[1], 1e-5, 0.0, round_once=False) if with_norm else None
        rope_kernel.rope_kv_write(*case.tensors(), interleaved, norm)  # type: ignore[arg-type,call-arg]
        case.check_quantized()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_padding_goes_to_the_null_block(device: str) -> None:
    case = Case(num_tokens=4, device=device)
    case.slots[1:] = 0
    for write in (lambda c: rope_kv_write(*c.tensors()), lambda c: kv_write(c.key, c.value, *c.tensors()[5:])):
        write(case)
        keys, values = case.written()
        assert torch.equal(keys[0], case.key[0])
        assert torch.equal(values[0], case.value[0])
        used = case.pool[:, 1].isfinite().flatten(1).any(dim=1).nonzero()[:, 0].tolist()
        assert used == [0, int(case.slots[0]) // 4]
        assert bool(case.pool[:, 0].isnan().all())


@pytest.mark.gpu
def test_kernel_at_the_sizes_of_serving() -> None:
    shape: dict[str, Any] = {
        "heads": 32,
        "kv_heads": 8,
        "dim": 128,
        "block_size": 16,
        "device": "cuda",
        "dtype": torch.bfloat16,
    }
    for num_tokens in (256, 8192):
        check_kernel(interleaved=False, half_tables=True, num_tokens=num_tokens, **shape)
        check_kernel(interleaved=False, half_tables=True, norm=(0.0, False), num_tokens=num_tokens, **shape)


def test_shapes_are_checked() -> None:
    case = Case(rotary_dim=32)
    query, key, value, cos, sin, *cache = case.tensors()
    with pytest.raises(AssertionError):
        rope_kv_write(query, key, value, cos, sin[:, :16], *cache)
    with pytest.raises(AssertionError):
        rope_kv_write(query, key, value, cos[:2], sin[:2], *cache)
    with pytest.raises(AssertionError):
        rope_kv_write(query, key, value, cos, sin, *cache, norm=HeadNorm(*case.norm, 1e-5, 1.0, round_once=False))
    short = HeadNorm(case.norm[0], case.norm[1][:32], 1e-5, 0.0, False)
    with pytest.raises(AssertionError):
        rope_kv_write(query, key, value, cos, sin, *cache, norm=short)
