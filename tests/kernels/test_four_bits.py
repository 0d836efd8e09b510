"""4-bit weights in the order of tensor cores: they stand for what they stood for, and their products are exact sums."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from baton_kernels.gated_activation import gated_activation
from baton_kernels.quantized_linear import (
    QuantizedWeight,
    arrange,
    four_bits,
    gated_linear,
    linear,
    pack_halves,
    reference,
)
from baton_kernels.quantized_linear.four_bits import HALVES
from baton_kernels.quantized_linear.tiling import ARRANGED_ROWS
from tests.kernels.poison import poisoned


def weight_of(
    out_features: int,
    in_features: int,
    with_zero: bool = True,
    scale_dtype: torch.dtype = torch.float16,
    device: str = "cpu",
    group: int = 128,
) -> QuantizedWeight:
    torch.manual_seed(out_features + in_features)
    values = pack_halves(torch.randint(0, 16, (out_features, in_features)), 2 * group)
    scale = ((torch.rand(out_features, in_features // group) + 0.5) * in_features**-0.5 / 8).to(scale_dtype)
    zero = torch.randint(0, 16, scale.shape, dtype=torch.uint8) if with_zero else None
    return QuantizedWeight(values.to(device), scale.to(device), None if zero is None else zero.to(device), group)


@pytest.mark.parametrize("with_zero", [True, False])
@pytest.mark.parametrize("scale_dtype", HALVES)
def test_an_arranged_weight_stands_for_the_same(scale_dtype: torch.dtype, with_zero: bool) -> None:
    weight = weight_of(48, 768, with_zero, scale_dtype)
    arranged = arrange(weight)
    assert (arranged.out_features, arranged.in_features) == (48, 768)
    assert torch.equal(four_bits.dequantize(arranged, torch.float32), reference.dequantize(weight, torch.float32))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("scale_dtype", HALVES)
def test_the_kernel_dequantizes_an_arranged_weight(scale_dtype: torch.dtype, device: str) -> None:
    from baton_kernels.quantized_linear.dequantize_kernel import dequantize_four_bits

    weight = weight_of(48, 512, scale_dtype=scale_dtype, device=device)
    with poisoned():
        whole = dequantize_four_bits(arrange(weight), torch.float32)
    assert torch.equal(whole.cpu(), reference.dequantize(weight, torch.float32).cpu())


def test_other_weights_have_no_such_order() -> None:
    assert four_bits.has_order(weight_of(48, 768))
    assert not four_bits.has_order(weight_of(48, 768, group=64))
    assert not four_bits.has_order(weight_of(40, 768))
    weight = weight_of(48, 768)
    assert not four_bits.has_order(QuantizedWeight(weight.values, weight.scale.float(), weight.zero, 128))
    assert not four_bits.has_order(QuantizedWeight(weight.values, weight.scale[:24], None, 128, scale_rows=2))
    assert not four_bits.can_arrange(weight, torch.bfloat16), "there is no kernel for it on a CPU"


def test_without_a_gpu_products_are_those_of_the_whole_weight() -> None:
    weight = weight_of(96, 256)
    x, bias, whole = torch.randn(2, 3, 256), torch.randn(96), reference.dequantize(weight, torch.float32)
    arranged, expected = arrange(weight), torch.nn.functional.linear(x, whole, bias)
    assert torch.equal(linear(x, arranged, bias), expected)
    assert torch.equal(gated_linear(x, arranged, "silu", bias), gated_activation(expected, "silu"))


def near(out: Tensor, expected: Tensor) -> bool:
    """Within the rounding of the result; with an activation, of its factors too."""
    error = (out.float() - expected).norm() / expected.norm()
    return bool(error < (0.005 if out.dtype == torch.bfloat16 else 0.001))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("num_rows", [1, 9, 20, 50, 100, 129, ARRANGED_ROWS, ARRANGED_ROWS + 1])
@pytest.mark.parametrize(("out_features", "in_features"), [(4096, 1024), (208, 768), (28672, 256)])
def test_products_on_a_gpu(out_features: int, in_features: int, num_rows: int, dtype: torch.dtype) -> None:
    weight = weight_of(out_features, in_features, with_zero=in_features != 768, scale_dtype=dtype, device="cuda")
    assert four_bits.can_arrange(weight, dtype)
    assert not four_bits.can_arrange(weight, torch.float32)
    arranged = arrange(weight)
    wide = torch.randn(num_rows, in_features + 64, device="cuda", dtype=dtype)
    x, bias = wide[:, :in_features], torch.randn(out_features, device="cuda", dtype=dtype)
    expected = x.float() @ reference.dequantize(weight, torch.float32).T
    with poisoned():
        assert near(linear(x, arranged), expected)
        assert near(out := linear(x, arranged, bias), expected + bias.float())
        assert near(gated_linear(x, arranged, "silu", bias), gated_activation(expected + bias.float(), "silu"))
        assert torch.equal(linear(x, arranged, bias), out)
