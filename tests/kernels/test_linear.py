"""linear and gated_linear: the kernels against fp64, at least as exact as cuBLAS, and the choice among them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from baton_kernels.gated_activation import ACTIVATIONS, Activation, gated_activation
from baton_kernels.linear import KERNEL_ROWS, gated_linear, linear
from baton_kernels.linear.tiling import MAX_TILES, RowTiling, Tiling, WideTiling, choose
from tests.kernels.poison import poisoned

torch.set_num_threads(1)

PLACES = [
    pytest.param("cpu", torch.float32),
    pytest.param("cpu", torch.float16),
    pytest.param("cuda", torch.bfloat16, marks=pytest.mark.gpu),
]
EPS = {torch.float32: 4e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
SUM_EPS = 2.0**-21
"""Of all that is summed, with whatever sign: fp32 sums have some order, which is up to the interpreter's processor."""
ROWS = RowTiling(out=4, depth=64, num_warps=4, num_stages=3)
TILES = [
    pytest.param(Tiling(8, out=16, depth=64, num_warps=4, num_stages=3, slices=4), id="slices"),
    pytest.param(Tiling(16, out=64, depth=64, num_warps=4, num_stages=2), id="plain"),
    pytest.param(Tiling(64, out=64, depth=64, num_warps=4, num_stages=2, splits=3), id="splits"),
]
SHAPES = [
    (28672, 4096, True),
    (6144, 4096, False),
    (4096, 4096, False),
    (4096, 14336, False),
    (128256, 4096, False),
    (37888, 3584, True),
    (3072, 2048, False),
    (16384, 2048, True),
]


def operands(num_rows: int, out_features: int, in_features: int, dtype: torch.dtype, device: str) -> list[Tensor]:
    """x, weight and bias; x is a slice of something wider, as a projection's part is."""
    torch.manual_seed(num_rows * 1000 + out_features)
    x = torch.randn(num_rows, in_features + 64)[:, :in_features]
    weight, bias = torch.randn(out_features, in_features) * in_features**-0.5, torch.randn(out_features)
    wide = torch.zeros(num_rows, in_features + 64, dtype=dtype, device=device)
    wide[:, :in_features] = x
    return [wide[:, :in_features], weight.to(device, dtype), bias.to(device, dtype)]


def exact(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    out = x.double() @ weight.double().T
    return out if bias is None else out + bias.double()


def check(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """No further from the truth than one rounding at the end, and fp32 sums before it."""
    expected = exact(x, weight, bias)
    summed = exact(x.abs(), weight.abs(), bias if bias is None else bias.abs())
    assert out.shape == expected.shape
    assert ((out.double() - expected).abs() <= EPS[out.dtype] * expected.abs() + SUM_EPS * summed).all()


@pytest.mark.parametrize(("device", "dtype"), PLACES)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(("out_features", "in_features"), [(1, 64), (16, 192), (37, 128), (9, 104)])
def test_row_kernel(out_features: int, in_features: int, with_bias: bool, device: str, dtype: torch.dtype) -> None:
    from baton_kernels.linear import kernel

    x, weight, bias = operands(1, out_features, in_features, dtype, device)
    with poisoned():
        out = kernel.few_rows(x, weight, bias if with_bias else None, None, ROWS)
    check(out, x, weight, bias if with_bias else None)


@pytest.mark.parametrize(("device", "dtype"), PLACES)
@pytest.mark.parametrize("tiling", TILES)
@pytest.mark.parametrize(
    ("num_rows", "out_features", "in_features"), [(1, 16, 64), (3, 37, 128), (8, 130, 320), (5, 21, 168)]
)
def test_tile_kernel(
    num_rows: int, out_features: int, in_features: int, tiling: Tiling, device: str, dtype: torch.dtype
) -> None:
    from baton_kernels.linear import kernel

    x, weight, bias = operands(num_rows, out_features, in_features, dtype, device)
    for given in (None, bias):
        with poisoned():
            out = kernel.few_rows(x, weight, given, None, tiling)
        check(out, x, weight, given)


@pytest.mark.parametrize(("device", "dtype"), PLACES)
@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # numpy's, in the interpreter; infinity is right
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("tiling", [ROWS, *TILES[:2]])
def test_gated(tiling: RowTiling | Tiling, activation: Activation, device: str, dtype: torch.dtype) -> None:
    """As the two operations one after the other; a rounding before the activation may fall the other way."""
    from baton_kernels.linear import kernel

    for num_rows, intermediate in ((1, 19), (5, 64)):
        if isinstance(tiling, RowTiling) and num_rows > 1:
            continue
        x, weight, bias = operands(num_rows, 2 * intermediate, 128, dtype, device)
        with poisoned():
            out = kernel.few_rows(x, weight, bias, activation, tiling)
        expected = gated_activation(exact(x, weight, bias).to(dtype), activation)
        torch.testing.assert_close(out, expected, rtol=4 * EPS[dtype], atol=4 * EPS[dtype])


@pytest.mark.parametrize(("device", "dtype"), PLACES)
@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(("num_rows", "intermediate", "in_features"), [(1, 16, 64), (40, 72, 136), (33, 128, 64)])
def test_many_rows(
    num_rows: int, intermediate: int, in_features: int, activation: Activation, device: str, dtype: torch.dtype
) -> None:
    """More tiles than programs, and tiles that reach beyond rows, features and columns."""
    from baton_kernels.linear.many_rows import can_take, many_rows

    x, weight, _ = operands(num_rows, 2 * intermediate, in_features, dtype, device)
    assert can_take(x, weight)
    assert not can_take(x[:, 1:], weight)
    small = WideTiling(rows=16, out=16, depth=32, group=2, num_warps=4, num_stages=2)
    on_gpu = WideTiling(rows=64, out=32, depth=64, group=2, num_warps=4, num_stages=3)
    with poisoned():
        out = many_rows(x, weight, activation, small if device == "cpu" else on_gpu, 3)
    expected = gated_activation(exact(x, weight, None).to(dtype), activation)
    torch.testing.assert_close(out, expected, rtol=4 * EPS[dtype], atol=4 * EPS[dtype])


def test_on_a_cpu_as_torch() -> None:
    x, weight, bias = operands(6, 10, 7, torch.float32, "cpu")
    x = x.view(2, 3, 7)
    assert torch.equal(linear(x, weight, bias), torch.nn.functional.linear(x, weight, bias))
    assert torch.equal(linear(x, weight), torch.nn.functional.linear(x, weight))
    assert torch.equal(gated_linear(x, weight, "gelu", bias), gated_activation(linear(x, weight, bias), "gelu"))


@pytest.mark.parametrize(("out_features", "in_features", "gated"), SHAPES)
def test_chosen_tilings_fit(out_features: int, in_features: int, gated: bool) -> None:
    for num_rows in range(1, 140):
        tiling = choose(num_rows, out_features, in_features, gated, 132)
        if num_rows == 1:
            assert isinstance(tiling, RowTiling)
        elif isinstance(tiling, Tiling):
            assert num_rows <= tiling.rows
            assert not (gated and tiling.splits > 1)
            of_weight = tiling.out * (2 if gated else 1)
            assert tiling.num_stages * tiling.depth * (of_weight + tiling.rows) * 2 <= 227 * 1024
        if tiling is not None:
            assert in_features % tiling.depth == 0
            if isinstance(tiling, Tiling) and tiling.splits > 1:
                assert -(-out_features // tiling.out) <= MAX_TILES
    chosen = {choose(n, out_features, in_features, gated, 132) for n in range(1, 600)}
    few, many = KERNEL_ROWS[:-1], KERNEL_ROWS[-1]
    assert chosen == {choose(n, out_features, in_features, gated, 132) for n in (*few, 256)}
    assert isinstance(choose(many, out_features, in_features, gated, 132), WideTiling) == gated


def test_small_or_odd_weights_are_left_to_cublas() -> None:
    assert choose(1, 512, 512, False, 132) is None
    assert choose(4, 4096, 4096 + 8, False, 132) is None


def test_routers_of_experts_are_split_for_a_decode_step() -> None:
    chosen = {n for n in range(1, 200) if choose(n, 128, 2048, False, 132) is not None}
    assert chosen == set(range(17, 65))
    for num_rows in (17, 64):
        tiling = choose(num_rows, 128, 2048, False, 132)
        assert isinstance(tiling, Tiling)
        assert tiling.rows >= num_rows
        assert 2048 % (tiling.splits * tiling.depth) == 0
        assert tiling.splits > 1
    assert choose(32, 128, 2048 + 256, False, 132) is None
    assert choose(32, 1, 2048, False, 132) is None
    assert choose(32, 128, 2048, True, 132) is None, "columns of a gated product cannot be split"


@pytest.mark.gpu
@pytest.mark.parametrize(("out_features", "in_features", "gated"), SHAPES[:4])
@pytest.mark.parametrize("num_rows", [1, 2, 13, 32, 64, 100, 200, 2000])
def test_no_less_exact_than_cublas(num_rows: int, out_features: int, in_features: int, gated: bool) -> None:
    x, weight, bias = operands(num_rows, out_features, in_features, torch.bfloat16, "cuda")
    with poisoned():
        added = None if num_rows > 128 else bias
        out = gated_linear(x, weight, "silu", added) if gated else linear(x, weight, added)
    cublas = torch.nn.functional.linear(x, weight, added)
    expected = exact(x, weight, added)
    if gated:
        gate, up = expected.chunk(2, dim=-1)
        cublas, expected = gated_activation(cublas, "silu"), torch.nn.functional.silu(gate) * up
    ours, theirs = ((y.double() - expected).norm() / expected.norm() for y in (out, cublas))
    assert ours < 1.05 * theirs + 1e-4
    torch.testing.assert_close(out, cublas, rtol=3e-2, atol=3e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 8, 16, 32, 64])
def test_replayed_as_called(num_rows: int) -> None:
    """A chain of matmuls that start while the one before still runs: the same bits in each replay, and eagerly."""
    x, qkv, _ = operands(num_rows, 6144, 4096, torch.bfloat16, "cuda")
    gate_up, down = (operands(1, n, k, torch.bfloat16, "cuda")[1] for n, k in ((28672, 4096), (4096, 14336)))

    def chain() -> Tensor:
        y = x
        for _ in range(4):
            y = linear(gated_linear(linear(y, qkv)[:, 1024:5120], gate_up, "silu"), down) + x
        return y

    expected = chain()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = chain()
    for _ in range(100):
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, expected)
    assert torch.equal(chain(), expected)


@pytest.mark.gpu
def test_first_used_in_a_capture() -> None:
    """Counters that are made within a graph are that graph's."""
    from baton_kernels.linear import kernel

    x, weight, _ = operands(16, 4096, 4096, torch.bfloat16, "cuda")
    expected = linear(x, weight)
    kernel._ARRIVED.clear()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = linear(x, weight)
    for _ in range(3):
        graph.replay()
        assert torch.equal(out, expected)
    assert not kernel._ARRIVED
    assert torch.equal(linear(x, weight), expected)
