"""quantized_linear: the kernels against fp64 products with the dequantized weights, and the choice among them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from baton_kernels.gated_activation import gated_activation
from baton_kernels.linear.tiling import MAX_TILES, Tiling
from baton_kernels.quantized_linear import (
    QuantizedWeight,
    activated_linear,
    dequantize,
    gated_linear,
    linear,
    pack_halves,
    packed_columns,
    reference,
    unpack_halves,
    unscaled_activated_linear,
)
from baton_kernels.quantized_linear.four_bits_kernel import choose as choose_arranged
from baton_kernels.quantized_linear.tiling import ARRANGED_ROWS, MAX_ROWS, choose, choose_four_bits
from baton_kernels.quantized_linear.weights import LARGEST
from baton_kernels.unfinished import left_of
from engine.config import EngineConfig
from engine.model.warm_up import first_steps
from tests.kernels.poison import poisoned

torch.set_num_threads(1)

PLACES = [
    pytest.param("cpu", torch.float32),
    pytest.param("cpu", torch.float16),
    pytest.param("cuda", torch.bfloat16, marks=pytest.mark.gpu),
    pytest.param("cuda", torch.float32, marks=pytest.mark.gpu),
]
EPS = {torch.float32: 4e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
FP8, INT8 = torch.float8_e4m3fn, torch.int8
SHAPES = [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096), (192, 96), (57344, 8192)]


def quantized(
    out_features: int,
    in_features: int,
    dtype: torch.dtype,
    group: int = 0,
    scale_rows: int = 1,
    with_zero: bool = False,
    device: str = "cpu",
) -> QuantizedWeight:
    """dtype: uint8 for values of 4 bits."""
    torch.manual_seed(out_features + in_features)
    num_groups = in_features // group if group else 1
    scale = (torch.rand(-(-out_features // scale_rows), num_groups) + 0.5) * in_features**-0.5 / LARGEST.get(dtype, 8)
    zero = torch.randint(0, 16, (out_features, num_groups), dtype=torch.uint8) if with_zero else None
    if dtype == torch.uint8:
        codes = torch.randint(0, 16, (out_features, in_features))
        values = pack_halves(codes, packed_columns(in_features, group))
    else:
        values = (torch.randn(out_features, in_features).clamp(-3, 3) / 3 * LARGEST[dtype]).to(dtype)
    moved = None if zero is None else zero.to(device)
    return QuantizedWeight(values.to(device), scale.to(device), moved, group, scale_rows)


def check(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    expected, summed = x.double() @ weight.double().T, x.double().abs() @ weight.double().abs().T
    if bias is not None:
        expected, summed = expected + bias.double(), summed + bias.double().abs()
    assert out.shape == expected.shape
    assert ((out.double() - expected).abs() <= EPS[out.dtype] * expected.abs() + 2.0**-21 * summed).all()


FORMS = [
    pytest.param(FP8, 0, 1, False, id="fp8"),
    pytest.param(FP8, 128, 128, False, id="fp8-blocks"),
    pytest.param(INT8, 0, 1, False, id="int8"),
    pytest.param(INT8, 64, 1, False, id="int8-groups"),
    pytest.param(INT8, 64, 1, True, id="int8-zeros"),
    pytest.param(INT8, 0, 1, True, id="int8-zeros-rows"),
    pytest.param(torch.uint8, 64, 1, False, id="4-bits"),
    pytest.param(torch.uint8, 32, 1, True, id="4-bits-zeros"),
    pytest.param(torch.uint8, 0, 1, False, id="4-bits-rows"),
    pytest.param(torch.uint8, 128, 1, True, id="4-bits-wide-groups"),
]


FEW_ROWS = [
    pytest.param(*rows, *form.values, *place.values, marks=place.marks if ci or place.marks else pytest.mark.full)
    for i, rows in enumerate([(1, 1, 1), (5, 3, 2), (20, 2, 1)])
    for j, form in enumerate(FORMS)
    for k, place in enumerate(PLACES)
    for ci in [(i + j + k) % 2 == 0]
]
"""Every two values of different kinds meet in one of those that CI runs."""


@pytest.mark.parametrize(
    ("num_rows", "splits", "steps", "values", "group", "scale_rows", "with_zero", "device", "dtype"), FEW_ROWS
)
def test_few_rows(
    num_rows: int,
    splits: int,
    steps: int,
    values: torch.dtype,
    group: int,
    scale_rows: int,
    with_zero: bool,
    device: str,
    dtype: torch.dtype,
) -> None:
    from baton_kernels.quantized_linear import kernel

    weight = quantized(130, 512, values, group, scale_rows, with_zero, device)
    depth = max(32, (weight.packed_columns if weight.four_bits else group or 128) // steps)
    wide = torch.randn(num_rows, 576).to(device, dtype)
    x, bias = wide[:, :512], torch.randn(130).to(device, dtype)
    tiling = Tiling(16, out=64, depth=depth, num_warps=4, num_stages=2, splits=splits)
    with poisoned():
        out = kernel.few_rows(x, None, weight, bias, None, tiling, dtype)
    check(out, x, dequantize(weight, torch.float32), bias)


@pytest.mark.parametrize(("device", "dtype"), PLACES)
@pytest.mark.parametrize(("values", "group", "scale_rows", "with_zero"), [FORMS[0], FORMS[5]])
def test_gated(
    values: torch.dtype, group: int, scale_rows: int, with_zero: bool, device: str, dtype: torch.dtype
) -> None:
    from baton_kernels.quantized_linear import kernel

    weight = quantized(128, 256, values, group, scale_rows, with_zero, device)
    x = torch.randn(3, 256).to(device, dtype)
    tiling = Tiling(16, out=64, depth=weight.packed_columns if group else 128, num_warps=4, num_stages=2)
    with poisoned():
        out = kernel.few_rows(x, None, weight, None, "silu", tiling, dtype)
    expected = gated_activation(x.float() @ dequantize(weight, torch.float32).T, "silu")
    assert torch.allclose(out.float(), expected, atol=4 * EPS[dtype], rtol=4 * EPS[dtype])


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [FP8, INT8])
@pytest.mark.parametrize("splits", [1, 2])
def test_few_quantized_rows(splits: int, dtype: torch.dtype, device: str) -> None:
    """The product of the quantized rows, exactly; and these are near the rows."""
    from baton_kernels.quantized_linear import kernel
    from baton_kernels.quantized_linear.quantize_rows_kernel import quantize_rows

    weight = quantized(96, 256, dtype, device=device)
    x = torch.randn(5, 256).to(device)
    with poisoned():
        values, scale = quantize_rows(x, None, dtype)
        tiling = Tiling(16, out=64, depth=128, num_warps=4, num_stages=2, splits=splits)
        out = kernel.few_rows(values, scale, weight, None, None, tiling, torch.float32)
    expected = (values.double() * scale.double()) @ dequantize(weight, torch.float32).double().T
    # fp8 products are summed with 14 bits by Hopper's tensor cores
    assert (out - expected).abs().max() <= (3e-3 if device == "cuda" else 1e-5) * expected.abs().max()
    like = reference.quantize_rows(x, dtype)
    assert torch.allclose(scale, like[1])
    # Triton's interpreter loses the carry where a mantissa rounds up to the next power of two
    near = (values.float() - like[0].float()).abs() <= (1 if dtype == INT8 else 32)
    assert near.float().mean() >= (1 if device == "cuda" else 0.98)
    assert ((values.float() * scale - x).abs() <= 0.04 * x.abs().max()).float().mean() >= 0.98


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_rows_are_quantized_after_their_activation_and_carry_nan(device: str) -> None:
    from baton_kernels.quantized_linear.quantize_rows_kernel import quantize_rows

    gate_up = torch.randn(4, 192).to(device)
    gate_up[1, 100] = float("nan")
    gate_up[2] = 0
    values, scale = quantize_rows(gate_up, "silu", FP8)
    plain, plain_scale = quantize_rows(gated_activation(gate_up, "silu"), None, FP8)
    assert torch.equal(scale.isnan().flatten().cpu(), torch.tensor([False, True, False, False]))
    for row in (0, 3):
        assert torch.equal(values[row].float(), plain[row].float())
        assert torch.equal(scale[row], plain_scale[row])
    assert not values[2].float().any()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(("values", "group", "scale_rows", "with_zero"), FORMS)
def test_dequantize(values: torch.dtype, group: int, scale_rows: int, with_zero: bool, device: str) -> None:
    from baton_kernels.quantized_linear.dequantize_kernel import dequantize as kernel

    weight = quantized(70, 512, values, group, scale_rows, with_zero)
    moved = QuantizedWeight(
        weight.values.to(device),
        weight.scale.to(device),
        weight.zero if weight.zero is None else weight.zero.to(device),
        group,
        scale_rows,
    )
    assert torch.equal(kernel(moved, torch.float32).cpu(), reference.dequantize(weight, torch.float32))


def test_dequantize_is_value_minus_zero_times_scale() -> None:
    codes = torch.arange(256).remainder(16).view(2, 128)
    scale, zero = torch.tensor([[1.0, 2], [3, 4]]), torch.tensor([[0, 1], [2, 15]], dtype=torch.uint8)
    weight = QuantizedWeight(pack_halves(codes, packed_columns(128, 64)), scale, zero, group=64)
    expected = torch.cat(
        [(codes[:, :64] - zero[:, :1].int()) * scale[:, :1], (codes[:, 64:] - zero[:, 1:].int()) * scale[:, 1:]], 1
    )
    assert torch.equal(dequantize(weight, torch.float32), expected)


@pytest.mark.parametrize("columns", [32, 64, 256])
def test_halves_are_packed_and_unpacked(columns: int) -> None:
    codes = torch.randint(0, 16, (3, 512), dtype=torch.uint8)
    packed = pack_halves(codes, columns)
    assert packed.shape == (3, 256)
    assert torch.equal(unpack_halves(packed, columns), codes)
    assert packed[0, 0] == codes[0, 0] | codes[0, columns // 2] << 4


@pytest.mark.gpu
@pytest.mark.parametrize(("values", "group", "scale_rows", "with_zero"), FORMS)
@pytest.mark.parametrize("num_rows", [1, 8, 9, 20, 33, 128, 129, 700])
@pytest.mark.parametrize("in_features", [1024, 8192])
def test_linear_on_a_gpu(
    in_features: int, num_rows: int, values: torch.dtype, group: int, scale_rows: int, with_zero: bool
) -> None:
    """Quantized rows of x differ by what their codes cannot hold; all others by rounding alone."""
    weight = quantized(768, in_features, values, group, scale_rows, with_zero, "cuda")
    x = torch.randn(num_rows, in_features, device="cuda", dtype=torch.bfloat16)
    bias = torch.randn(768, device="cuda", dtype=torch.bfloat16)
    whole = dequantize(weight, torch.float32)
    for out, expected in (
        (linear(x, weight, bias), x.float() @ whole.T + bias.float()),
        (gated_linear(x, weight, "silu"), gated_activation(x.float() @ whole.T, "silu")),
    ):
        assert (out.float() - expected).norm() / expected.norm() < (0.05 if values in LARGEST else 0.01)


@pytest.mark.parametrize(("out_features", "in_features"), SHAPES)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("num_rows", [1, 8, 9, 16, 33, 64, 65, 128, 129, 256, 257, 5000])
def test_the_tiling_fits_the_shape(num_rows: int, gated: bool, out_features: int, in_features: int) -> None:
    for depth in (0, 32, 64, 128):
        tiling = choose(num_rows, out_features, in_features, gated, depth)
        assert tiling is not None or num_rows > 128
        assert tiling is None or num_rows <= (128 if gated else 256)
        if tiling:
            assert in_features % tiling.depth == 0
            assert not depth or depth % tiling.depth == 0
            row_blocks = -(-num_rows // tiling.rows)
            assert tiling.rows <= 2 * num_rows or tiling.rows == 8, "more than half of a program's rows are padding"
            assert tiling.splits == 1 or (not gated and -(-out_features // tiling.out) * row_blocks <= MAX_TILES)
    for group in (32, 96, 128, 0):
        columns = packed_columns(in_features, group)
        tiling = choose_four_bits(num_rows, out_features, in_features, gated, columns)
        if tiling:
            assert columns % tiling.depth == 0
            assert tiling.splits == 1 or not gated
        else:
            assert num_rows > 128 or columns not in (32, 64, 128, 256) or in_features % columns


def test_on_a_cpu_x_is_not_quantized() -> None:
    weight = quantized(64, 128, FP8)
    x, bias = torch.randn(2, 3, 128), torch.randn(64)
    whole = dequantize(weight, torch.float32)
    assert torch.equal(linear(x, weight, bias), torch.nn.functional.linear(x, whole, bias))
    assert torch.equal(gated_linear(x, weight, "silu"), gated_activation(torch.nn.functional.linear(x, whole), "silu"))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("values", [FP8, INT8])
def test_sums_that_fit_only_after_scaling_are_finite(values: torch.dtype, dtype: torch.dtype) -> None:
    weight = QuantizedWeight(torch.full((3, 1024), 100.0).to(values), torch.full((3, 1), 1e-3))
    out = linear(torch.full((2, 1024), 8.0, dtype=dtype), weight)
    torch.testing.assert_close(out.float(), torch.full((2, 3), float(weight.values[0, 0]) * 8.192), rtol=1e-2, atol=0)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [FP8, INT8])
def test_a_norm_quantizes_its_rows_as_they_would_be_afterwards(dtype: torch.dtype, device: str) -> None:
    from baton_kernels.quantized_linear.quantize_rows_kernel import quantize_rows
    from baton_kernels.rms_norm import kernel

    x, residual, weight = (tensor.to(device) for tensor in (torch.randn(11, 96), torch.randn(11, 96), torch.rand(96)))
    if device == "cuda":  # the interpreter warns of a row without a number
        x[4] = float("nan")
    quantized = torch.empty(11, 96, dtype=dtype, device=device), torch.empty(11, 1, device=device)
    with poisoned():
        plain = kernel.rms_norm(x, weight, 1e-5, residual.clone(), 0.0, False)
        out = kernel.rms_norm(x, weight, 1e-5, residual.clone(), 0.0, False, quantized)
    values, scale = quantize_rows(out, None, dtype)
    rows = torch.arange(11) != 4
    torch.testing.assert_close(out[rows], plain[rows], atol=1e-6, rtol=1e-6)  # compiled apart, they may round apart
    assert torch.equal(quantized[1][rows], scale[rows])
    assert torch.equal(quantized[0][rows].float(), values[rows].float())
    assert quantized[1].isnan().sum() == (device == "cuda")


@pytest.mark.gpu
def test_products_take_rows_that_a_norm_has_quantized(monkeypatch: pytest.MonkeyPatch) -> None:
    from baton_kernels.quantized_linear import quantize_rows_kernel
    from baton_kernels.rms_norm import rms_norm

    weight = quantized(512, 1024, FP8, device="cuda")
    x, ones = torch.randn(300, 1024, device="cuda", dtype=torch.bfloat16), torch.ones(1024, device="cuda").bfloat16()
    expected = [linear(rms_norm(x[:n], ones, 1e-5), weight) for n in (4, 20, 300)]
    monkeypatch.setattr(quantize_rows_kernel, "quantize_rows", None)
    for n, product in zip((4, 20, 300), expected, strict=True):
        assert torch.equal(linear(rms_norm(x[:n], ones, 1e-5, quantize=FP8), weight), product)


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [130, 256, 700])
def test_a_product_whose_scales_a_norm_multiplies_by(num_rows: int) -> None:
    from baton_kernels.rms_norm import rms_norm

    weight = quantized(512, 1024, FP8, device="cuda")
    gate_up = torch.randn(1, num_rows, 2048, device="cuda", dtype=torch.bfloat16)
    residual, ones = torch.randn(1, num_rows, 512, device="cuda").bfloat16(), torch.ones(512, device="cuda").bfloat16()
    product = unscaled_activated_linear(gate_up, "silu", weight, torch.ones((), device="cuda"))
    assert (left_of(product) is None) == (num_rows > MAX_ROWS)
    expected = activated_linear(gate_up, "silu", weight)
    found = [rms_norm(x, ones, 1e-5, residual=residual.clone()) for x in (product, expected)]
    torch.testing.assert_close(*found, atol=3e-2, rtol=3e-2)


def test_a_start_runs_every_kernel_for_few_rows() -> None:
    """The steps computed before the first request have every padded number of rows."""
    config = EngineConfig(num_blocks=2000, max_model_len=8192, vocab_size=9, max_num_batched_tokens=8192)
    warmed = {sum(chunk.length for chunk in chunks) for chunks in first_steps(config)}
    tilings = [{choose(n, 4096, 4096, False, 0) for n in rows} for rows in (warmed, range(2, 300))]
    assert tilings[0] == tilings[1]
    assert choose(MAX_ROWS, 4096, 4096, False, 0) is not None
    in_order = {(choose_arranged(n, gated=False), n > 128) for n in warmed if n <= ARRANGED_ROWS}
    assert in_order == {(choose_arranged(n, gated=False), n > 128) for n in range(1, ARRANGED_ROWS + 1)}
