"""packed_linear against fp64, and 8-bit rows against their reference."""

from __future__ import annotations

import pytest
import torch

from baton_kernels.packed_linear import (
    can_pack,
    can_pack_int4,
    can_pack_int8,
    pack,
    pack_int8,
    packed_linear,
    reference,
    with_int4,
)

torch.set_num_threads(1)

DTYPES = [torch.float32, torch.bfloat16]
EPS = {torch.float32: 1e-6, torch.bfloat16: 1e-2}


def operands(num_rows: int, dtype: torch.dtype) -> list[torch.Tensor]:
    torch.manual_seed(num_rows)
    x = torch.randn(num_rows, 96)[:, :80] * torch.logspace(-2, 2, num_rows)[:, None]
    return [tensor.to(dtype) for tensor in (x, torch.randn(48, 80), torch.randn(48))]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_rows", [1, 3, 200])
@pytest.mark.parametrize("biased", [False, True])
def test_a_packed_product_is_as_exact_as_its_dtype(num_rows: int, dtype: torch.dtype, biased: bool) -> None:
    x, weight, bias = operands(num_rows, dtype)
    if not can_pack(weight):
        pytest.skip("torch has no oneDNN here")
    packed = pack(weight)
    expected = x.double() @ weight.double().T + (bias.double() if biased else 0)
    weight.fill_(float("nan"))  # it is not referred to
    out = packed_linear(x[None], packed, bias if biased else None)
    assert out.shape == (1, num_rows, 48)
    assert out.dtype == dtype
    error = (out[0].double() - expected).abs().amax(1) / expected.abs().amax(1)
    assert float(error.max()) < EPS[dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("biased", [False, True])
def test_8_bit_rows_are_multiplied_as_by_the_reference(dtype: torch.dtype, biased: bool) -> None:
    x, weight, bias = operands(9, dtype)
    x[4] = 0
    values, scale = torch.randint(-127, 128, weight.shape, dtype=torch.int8), torch.rand(48, 1) + 0.1
    packed = pack_int8(values, scale)
    expected = reference.int8_linear(x, values, scale[:, 0], bias if biased else None).float()
    exact = x.float() @ (values * scale).T + (bias.float() if biased else 0)
    values.zero_()
    out = packed_linear(x, packed, bias if biased else None).float()
    largest = exact.abs().amax(1) + 1e-9
    assert float(((out - expected).abs().amax(1) / largest).max()) < 2 * EPS[dtype]
    assert float(((out - exact).abs().amax(1) / largest).max()) < 0.04
    few = packed_linear(x[:2], packed, bias if biased else None).float()
    assert float(((out[:2] - few).abs().amax(1) / largest[:2]).max()) < EPS[dtype], "rows have no part in one another"


def test_the_reference_stands_in_where_a_processor_has_no_such_instruction(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, _ = operands(3, torch.bfloat16)
    values, scale = torch.randint(-127, 128, weight.shape, dtype=torch.int8), torch.rand(48)
    fast = packed_linear(x, pack_int8(values, scale)).float()
    monkeypatch.setattr("baton_kernels.packed_linear.onednn.has", lambda dtype: False)
    assert not can_pack_int8()
    assert not can_pack(weight)
    slow = packed_linear(x, pack_int8(values, scale)).float()
    assert float((fast - slow).abs().max() / slow.abs().max()) < 0.02


@pytest.mark.parametrize(
    ("shape", "group"), [((64, 64), 32), ((192, 256), 128), ((64, 96), 0), ((128, 512), 64), ((64, 512), 512)], ids=str
)
@pytest.mark.parametrize("asymmetric", [False, True])
@pytest.mark.parametrize("num_rows", [1, 4, 5])
def test_few_rows_are_multiplied_by_the_codes_of_4_bits(
    shape: tuple[int, int], group: int, asymmetric: bool, num_rows: int
) -> None:
    if not can_pack_int4(shape[1], group, torch.bfloat16) or not can_pack(torch.zeros(1, dtype=torch.bfloat16)):
        pytest.skip("this processor has no such product")
    torch.manual_seed(num_rows)
    num_groups = shape[1] // group if group else 1
    codes, scale = torch.randint(0, 16, shape, dtype=torch.uint8), torch.rand(shape[0], num_groups).half() * 0.1
    zero = torch.randint(0, 16, scale.shape, dtype=torch.uint8) if asymmetric else None
    wide = shape[1] // num_groups
    centred = codes.float() - (8 if zero is None else zero.float().repeat_interleave(wide, 1))
    values = centred * scale.float().repeat_interleave(wide, 1)
    x, bias = torch.randn(num_rows, shape[1]).bfloat16(), torch.randn(shape[0]).bfloat16()
    plain = pack(values.bfloat16())
    packed = with_int4(plain, codes, scale, zero, group)
    expected = x.double() @ values.double().T + bias.double()
    for tensor in (codes, scale):
        tensor.zero_()  # they are not referred to
    out = packed_linear(x, packed, bias)
    assert float(((out.double() - expected).abs().amax(1) / expected.abs().amax(1)).max()) < EPS[torch.bfloat16]
    assert torch.equal(out, packed_linear(x, plain, bias)) == (num_rows > 4)
    if num_rows <= 4:
        assert torch.equal(out[:1], packed_linear(x[:1], packed, bias)), "rows have no part in one another"


def test_weights_that_the_kernel_of_4_bits_cannot_take() -> None:
    assert not can_pack_int4(128, 128, torch.float32)
    assert not can_pack_int4(144, 16, torch.bfloat16)
    if can_pack_int4(128, 128, torch.bfloat16) and can_pack(torch.zeros(1, dtype=torch.bfloat16)):
        codes, scale = torch.zeros(72, 128, dtype=torch.uint8), torch.ones(72, 1)
        plain = pack(torch.zeros(72, 128, dtype=torch.bfloat16))
        assert with_int4(plain, codes, scale, None, 128) is plain
