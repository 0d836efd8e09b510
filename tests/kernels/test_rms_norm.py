"""rms_norm: the reference is bit for bit what transformers' modules give, and the kernel agrees with it."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor

from baton_kernels.quantized_linear import QuantizedRows
from baton_kernels.rms_norm import reference, rms_norm
from baton_kernels.unfinished import ChosenParts, Scales, finished, left_of, unfinished, viewed
from tests.kernels.poison import poisoned

torch.set_num_threads(1)

RULES = {"Llama": (0.0, False), "Gemma": (1.0, True), "Olmo2": (0.0, True)}
PLACES = [
    pytest.param("cpu", torch.float32),
    pytest.param("cpu", torch.float16),
    pytest.param("cuda", torch.float32, marks=pytest.mark.gpu),
    pytest.param("cuda", torch.bfloat16, marks=pytest.mark.gpu),
]


def rows(*shape: int, dtype: torch.dtype, device: str = "cpu", seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * 3).to(dtype).to(device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", RULES)
def test_reference_is_transformers(family: str, dtype: torch.dtype) -> None:
    modeling = importlib.import_module(f"transformers.models.{family.lower()}.modeling_{family.lower()}")
    module = getattr(modeling, f"{family}RMSNorm")(96, eps=1e-5).to(dtype)
    module.weight.data = rows(96, dtype=dtype, seed=1)
    weight_offset, round_once = RULES[family]
    x, residual = rows(2, 5, 96, dtype=dtype), rows(2, 5, 96, dtype=dtype, seed=2)
    total = residual + x
    kinds: dict[str, Any] = {"weight_offset": weight_offset, "round_once": round_once}
    with torch.no_grad():
        assert torch.equal(rms_norm(x, module.weight, 1e-5, **kinds), module(x))
        assert torch.equal(rms_norm(x, module.weight, 1e-5, residual=residual, **kinds), module(total))
    assert torch.equal(residual, total)


def run(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None, family: str) -> Tensor:
    from baton_kernels.rms_norm import kernel

    with poisoned():
        return kernel.rms_norm(x, weight, eps, residual, *RULES[family])


@pytest.mark.parametrize(("device", "dtype"), PLACES)
@pytest.mark.parametrize("family", RULES)
@pytest.mark.parametrize("n", [1, 64, 80, 128, 576, 4096, 5120])
def test_kernel(n: int, family: str, device: str, dtype: torch.dtype) -> None:
    weight = rows(n, dtype=dtype, device=device, seed=1)
    for shape in ((1, n), (3, n), (1, 2, n)):
        x, residual = rows(*shape, dtype=dtype, device=device), rows(*shape, dtype=dtype, device=device, seed=2)
        expected = reference.rms_norm(x, weight, 1e-5, None, *RULES[family])
        torch.testing.assert_close(run(x, weight, 1e-5, None, family), expected)
        total = residual.clone()
        expected = reference.rms_norm(x, weight, 1e-5, total, *RULES[family])
        torch.testing.assert_close(run(x, weight, 1e-5, residual, family), expected)
        assert torch.equal(residual, total)


@pytest.mark.parametrize(("device", "dtype"), PLACES)
@pytest.mark.parametrize("dim", [64, 96, 256])
def test_kernel_on_slices_of_a_fused_projection(dim: int, device: str, dtype: torch.dtype) -> None:
    num_tokens, heads = 11, 5
    fused = rows(num_tokens, (heads + 4) * dim, dtype=dtype, device=device)
    weight = rows(dim, dtype=dtype, device=device, seed=1)
    before = fused.clone()
    heads_view = fused[:, dim : (heads + 1) * dim].view(num_tokens, heads, dim)
    for x in (heads_view, heads_view[None], heads_view[:1], heads_view[:, 2], heads_view.transpose(0, 1)):
        out = run(x, weight, 1e-6, None, "Llama")
        assert out.is_contiguous()
        torch.testing.assert_close(out, reference.rms_norm(x, weight, 1e-6, None, 0.0, False))
        residual, total = (rows(*x.shape, dtype=dtype, device=device, seed=2) for _ in range(2))
        out = run(x, weight, 1e-6, residual, "Gemma")
        torch.testing.assert_close(out, reference.rms_norm(x, weight, 1e-6, total, 1.0, True))
        assert torch.equal(residual, total)
    assert torch.equal(fused, before)


@pytest.mark.parametrize(("device", "dtype"), PLACES)
def test_kernel_without_rows_and_with_zeros(device: str, dtype: torch.dtype) -> None:
    weight = rows(64, dtype=dtype, device=device)
    assert run(weight.new_empty(0, 64), weight, 1e-6, None, "Llama").shape == (0, 64)
    assert not run(weight.new_zeros(2, 64), weight, 1e-6, None, "Llama").any()


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 256, 8192])
def test_kernel_at_the_sizes_of_serving(num_rows: int) -> None:
    weight = rows(8192, dtype=torch.bfloat16, device="cuda", seed=1)
    x = rows(num_rows, 8192, dtype=torch.bfloat16, device="cuda")
    residual = rows(num_rows, 8192, dtype=torch.bfloat16, device="cuda", seed=2)
    expected = reference.rms_norm(x, weight, 1e-5, residual.clone(), 0.0, False)
    torch.testing.assert_close(rms_norm(x, weight, 1e-5, residual=residual), expected)


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("num_rows", [3, 200])
@pytest.mark.parametrize(("device", "dtype"), PLACES)
def test_scales_that_a_product_left(device: str, dtype: torch.dtype, num_rows: int, residual: bool) -> None:
    n = 96
    x = rows(1, num_rows, n, dtype=dtype, device=device)
    weight, after = (rows(*shape, dtype=dtype, device=device, seed=2) for shape in ((n,), x.shape))
    of_rows = rows(num_rows, 1, device=device, dtype=torch.float32, seed=3).abs() + 0.1
    scales = Scales(of_rows, torch.rand(n).to(device) + 0.1)
    total = x[0].float() * scales.rows * scales.columns
    if residual:
        total = (total + after[0].float()).to(dtype)
    expected = reference.rms_norm(total.to(dtype)[None], weight, 1e-5, None, *RULES["Olmo2"])
    for by_kernel in (False, True):
        own = after.clone() if residual else None
        if by_kernel:
            from baton_kernels.rms_norm import kernel

            with poisoned():
                out = kernel.rms_norm(x, weight, 1e-5, own, *RULES["Olmo2"], left=scales)
        else:
            out = rms_norm(unfinished(x, scales), weight, 1e-5, residual=own, round_once=True)
        torch.testing.assert_close(out, expected, atol=2e-2, rtol=2e-2)
        if own is not None:
            torch.testing.assert_close(own[0], total, atol=2e-2, rtol=2e-2)


def chosen_parts(
    num_tokens: int, top_k: int, n: int, dtype: torch.dtype, device: str, slots: Tensor | None = None
) -> ChosenParts:
    """Parts that nobody wrote are NaN: those of no expert, of the first token the last and of the last all, and of
    padding."""
    parts, ids = rows(num_tokens, top_k, n, dtype=dtype, device=device), torch.arange(num_tokens * top_k).to(device) % 8
    ids = ids.view(num_tokens, top_k)
    ids[0, -1] = ids[-1] = 8
    parts[ids == 8] = float("nan")
    if slots is not None:
        parts[slots == 0] = float("nan")
    return ChosenParts(parts.view(num_tokens * top_k, n), ids, slots, 8)


def quantized_tensors(num_rows: int, n: int, device: str) -> QuantizedRows:
    return torch.zeros(num_rows, n, dtype=torch.int8, device=device), torch.zeros(num_rows, 1, device=device)


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("padding", [False, True])
@pytest.mark.parametrize(("num_tokens", "top_k", "n"), [(2, 8, 2048), (5, 3, 96), (18, 1, 80)])
@pytest.mark.parametrize(("device", "dtype"), PLACES)
def test_parts_that_experts_left(
    num_tokens: int, top_k: int, n: int, padding: bool, residual: bool, device: str, dtype: torch.dtype
) -> None:
    """The norm's sums have the bits of the kernel that only sums, whatever is done with them, also quantized. The
    tensor that they are left with is not read."""
    from baton_kernels.experts.sum_kernel import summed
    from baton_kernels.rms_norm import kernel

    slots = torch.arange(num_tokens, device=device) % 3 if padding else None
    left = chosen_parts(num_tokens, top_k, n, dtype, device, slots)
    weight, before = (rows(*shape, dtype=dtype, device=device, seed=2) for shape in ((n,), (num_tokens, n)))
    unread = torch.full((num_tokens, n), float("nan"), dtype=dtype, device=device)
    sums, found = summed(left), []
    for x, own_left in ((sums, None), (unread, left)):
        quantized, own = quantized_tensors(num_tokens, n, device), before.clone() if residual else None
        for given in (None, quantized):
            with poisoned():
                out = kernel.rms_norm(x, weight, 1e-5, own, 0.0, False, given, own_left)
            found.append([out, *quantized, *([] if own is None else [own.clone()])])
    for alone, together in zip(found[:2], found[2:], strict=True):
        assert all(torch.equal(*pair) for pair in zip(alone, together, strict=True))
    assert not sums[-1].any()
    assert torch.equal(finished(unfinished(unread, left)), sums)
    expected = reference.rms_norm(sums, weight, 1e-5, before.clone() if residual else None, 0.0, False)
    torch.testing.assert_close(found[2][0], expected)


def test_a_view_of_what_is_unfinished() -> None:
    x, left = torch.zeros(5, 96), chosen_parts(5, 3, 96, torch.float32, "cpu")
    assert left_of(viewed(x, (1, 5, 96))) is None
    assert left_of(viewed(unfinished(x, left), (1, 5, 96))) is left
    assert left_of(x.view(1, 5, 96)) is None
    sums = finished(viewed(x, (1, 5, 96)))
    assert sums.shape == (1, 5, 96)
    weight = rows(96, dtype=torch.float32, seed=1)
    assert torch.equal(rms_norm(viewed(x, (1, 5, 96)), weight, 1e-5), rms_norm(sums, weight, 1e-5))
