"""Experts: the reference is what transformers computes, and the kernels agree with it, whoever chooses what."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GptOssConfig, MixtralConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from baton_kernels.experts import (
    ExpertWeights,
    Routing,
    can_compute,
    experts,
    kernel_tokens,
    on_gpu,
    reference,
    route,
)
from baton_kernels.experts.arranged import arrange
from baton_kernels.experts.tiling import (
    BY_TOKEN_TOKENS,
    CLASSES,
    ROW_TOKENS,
    RowTilings,
    Tiling,
    Tilings,
    choose,
)
from baton_kernels.gated_activation import ACTIVATIONS
from baton_kernels.rms_norm import rms_norm
from baton_kernels.unfinished import finished, left_of
from tests.kernels.expert_cases import PLACES, check, check_products, choices, in_four_bits, weights_of
from tests.kernels.poison import poisoned

torch.set_num_threads(1)

SMALL = Tilings(Tiling(8, 32, 32, 4, 3), Tiling(8, 32, 32, 4, 3, group=3))


# ---- the reference ----


def own_loop(module: Any, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """transformers' loop over experts."""
    result: Tensor = inspect.unwrap(type(module).forward)(module, x, ids, weights)
    return result


@torch.inference_mode()
def test_reference_is_transformers() -> None:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 24, "intermediate_size": 20, "num_local_experts": 5}
    x, (ids, weights) = torch.randn(11, 24), choices(11, 2, 5, "cpu")
    mixtral: Any = MixtralExperts(MixtralConfig(**sizes))
    oss: Any = GptOssExperts(GptOssConfig(**sizes))
    for module in (mixtral, oss):
        for parameter in module.parameters():
            parameter.data = torch.randn(parameter.shape)
    of = ExpertWeights(mixtral.gate_up_proj, mixtral.down_proj)
    check(reference.experts(x, ids, weights, of), own_loop(mixtral, x, ids, weights))
    of = ExpertWeights(
        oss.gate_up_proj.mT, oss.down_proj.mT, "clamped", True, oss.gate_up_proj_bias, oss.down_proj_bias
    )
    check(reference.experts(x, ids, weights, of), own_loop(oss, x, ids, weights))


def test_reference_of_weights_of_8_bits() -> None:
    """A scale per row multiplies the values."""
    torch.manual_seed(0)
    of = weights_of(4, 32, 16, torch.float32, "cpu")
    scales = torch.rand(4, 32) + 0.5, torch.rand(4, 32) + 0.5
    scaled = replace(of, gate_up_scale=scales[0], down_scale=scales[1])
    whole = replace(of, gate_up=of.gate_up * scales[0][..., None], down=of.down * scales[1][..., None])
    x, (ids, weights) = torch.randn(5, 32), choices(5, 2, 4, "cpu")
    check(reference.experts(x, ids, weights, scaled), reference.experts(x, ids, weights, whole))


def test_choices_of_no_expert_add_nothing() -> None:
    torch.manual_seed(0)
    of, x = weights_of(4, 16, 16, torch.float32, "cpu"), torch.randn(3, 16)
    ids, weights = choices(3, 2, 4, "cpu")
    ids[1, 0] = ids[2, 0] = ids[2, 1] = 4
    out = experts(x, ids, weights, of)
    check(out[:1], experts(x[:1], ids[:1], weights[:1], of))
    check(out[1:2], experts(x[1:2], ids[1:2, 1:], weights[1:2, 1:], of))
    assert not out[2].any()


# ---- the products ----


@pytest.mark.parametrize(("device", "dtype"), PLACES)
@pytest.mark.parametrize("clamped", [False, True])
@pytest.mark.parametrize("num_tokens", [1, ROW_TOKENS, 13, 20])
def test_experts(num_tokens: int, clamped: bool, device: str, dtype: torch.dtype) -> None:
    """Sizes that are no multiples of the tiles'; choices of no expert; padding."""
    torch.manual_seed(num_tokens)
    hidden, width = (40, 24) if device == "cpu" else (80, 48)
    of = weights_of(6, hidden, width, dtype, device, clamped)
    check_products(of, torch.randn(num_tokens, 96).to(device, dtype)[:, :hidden])


def check_left(of: ExpertWeights, num_tokens: int, dtype: torch.dtype, device: str, sums_by_itself: bool) -> None:
    """The sums have the same bits; a result whose sums are left has none yet."""
    torch.manual_seed(num_tokens)
    x, (ids, weights) = torch.randn(num_tokens, 64).to(device, dtype), choices(num_tokens, 3, 6, device)
    ids[-1, 1] = 6
    for slots in (None, torch.arange(num_tokens, device=device) % 3):
        with poisoned():
            out = on_gpu(x, ids, weights.to(dtype), of, slots, leaves_sum=True)
            expected = on_gpu(x, ids, weights.to(dtype), of, slots)
        assert (left_of(out) is None) == sums_by_itself
        assert sums_by_itself or out.isnan().all()
        assert torch.equal(finished(out), expected)


@pytest.mark.parametrize(("device", "dtype"), PLACES[1:])
def test_sums_that_are_left(device: str, dtype: torch.dtype) -> None:
    of = weights_of(6, 64, 32, dtype, device)
    check_left(of, ROW_TOKENS, dtype, device, sums_by_itself=True)
    for num_tokens in (5,) if device == "cpu" else (5, 300):
        check_left(of, num_tokens, dtype, device, sums_by_itself=False)


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [1, 5, 300])
def test_sums_that_arranged_weights_leave(num_tokens: int) -> None:
    of = arrange(in_four_bits(weights_of(6, 64, 32, torch.bfloat16, "cuda")))
    check_left(of, num_tokens, torch.bfloat16, "cuda", sums_by_itself=False)


def test_nothing_is_left_on_a_cpu() -> None:
    of, x, (ids, weights) = weights_of(4, 32, 16, torch.float32, "cpu"), torch.randn(5, 32), choices(5, 2, 4, "cpu")
    left = experts(x, ids, weights, of, leaves_sum=True)
    assert left_of(left) is None
    assert torch.equal(left, experts(x, ids, weights, of))


@pytest.mark.parametrize(("device", "dtype"), PLACES[:1] + PLACES[3:])
@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
def test_gates(device: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, (ids, weights) = torch.randn(4, 32).to(device, dtype), choices(4, 2, 3, device)
    of = weights_of(3, 32, 32, dtype, device)
    for activation in ACTIVATIONS:
        for interleaved in (False, True):
            form = replace(of, gate=activation, interleaved=interleaved)
            for rows in (1, 4):
                out = on_gpu(x[:rows], ids[:rows], weights[:rows].to(dtype), form, None)
                check(out, reference.experts(x[:rows], ids[:rows], weights[:rows].to(dtype), form))


@pytest.mark.parametrize(("device", "dtype"), PLACES[:1] + PLACES[3:])
def test_tiles_in_bands(device: str, dtype: torch.dtype) -> None:
    """Blocks of one expert in several bands, the last of which is not full."""
    from baton_kernels.experts import in_blocks
    from baton_kernels.experts.sum_kernel import summed

    torch.manual_seed(0)
    of = weights_of(3, 96, 64, dtype, device)
    x, (ids, weights) = torch.randn(50, 96).to(device, dtype), choices(50, 2, 3, device)
    tilings = SMALL if device == "cpu" else Tilings(Tiling(16, 64, 32, 4, 3, 3), Tiling(16, 64, 32, 4, 3, 2))
    with poisoned():
        out = summed(in_blocks(x, ids, weights.to(dtype), of, None, tilings))
    check(out, reference.experts(x, ids, weights.to(dtype), of))


def test_without_tokens() -> None:
    of = weights_of(3, 32, 16, torch.float32, "cpu")
    assert on_gpu(torch.empty(0, 32), torch.empty(0, 2, dtype=torch.int64), torch.empty(0, 2), of, None).shape == (
        0,
        32,
    )


# ---- which kernels ----


@pytest.mark.parametrize(("top_k", "num_experts"), [(8, 128), (4, 32), (2, 8), (1, 16), (8, 256), (6, 64)])
def test_startup_runs_every_kernel(top_k: int, num_experts: int) -> None:
    """Whatever number of tokens comes later has its tilings, and its way to count, from one that ran at startup."""

    def way(num_tokens: int) -> object:
        num_choices = num_tokens * top_k
        by_token = num_tokens <= BY_TOKEN_TOKENS
        return choose(num_tokens, top_k, num_experts), by_token, num_choices > 4096, num_choices > 256

    known = {way(num_tokens) for num_tokens in kernel_tokens(top_k, num_experts)}
    met = {way(num_tokens) for num_tokens in range(1, 9000)}
    # alone, with vectors, nothing is counted
    vectors = {found for found in met if isinstance(found[0], RowTilings)}  # type: ignore[index]
    assert met - vectors <= known
    assert any(isinstance(found[0], RowTilings) for found in known)  # type: ignore[index]


def test_a_share_of_the_experts_gets_a_share_of_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 256 tokens with 8 of 128 experts each, an expert gets 16 rows, whether all are here or a quarter."""
    chosen = list[object]()
    monkeypatch.setattr("baton_kernels.experts.in_blocks", lambda *given: chosen.append(given[-1]) or given[0])
    x, ids, weights = torch.zeros(256, 64), torch.zeros(256, 8, dtype=torch.int64), torch.zeros(256, 8)
    for num_experts in (128, 32):
        stored = torch.zeros(num_experts, 64, 64, dtype=torch.bfloat16), torch.zeros(num_experts, 64, 32)
        of = ExpertWeights(*stored, num_experts_elsewhere=128 - num_experts)
        on_gpu(x, ids, weights, of, None, leaves_sum=True)
    assert chosen == [choose(256, 8, 128)] * 2


@pytest.mark.parametrize("itemsize", [0.5, 1, 2, 4])
def test_tilings_fit_into_an_sm(itemsize: float) -> None:
    for most, _ in CLASSES:
        tilings = choose(int(min(most, 2000)) * 16, 8, 128, itemsize)
        assert isinstance(tilings, Tilings)
        assert tilings.gate_up.rows == tilings.down.rows
        for tiling, matrices in ((tilings.gate_up, 2), (tilings.down, 1)):
            x_bytes = (1 if itemsize == 1 and most > 64 else max(2, itemsize)) * tiling.rows  # fp8: many tokens
            assert tiling.num_stages * tiling.depth * (matrices * tiling.out * itemsize + x_bytes) <= 227 * 1024


def test_what_the_kernels_cannot_do() -> None:
    assert can_compute(weights_of(2, 40, 20, torch.float32, "cpu"))


@pytest.mark.gpu
def test_odd_sizes_and_columns_are_refused() -> None:
    assert can_compute(weights_of(2, 48, 32, torch.bfloat16, "cuda"))
    assert not can_compute(weights_of(2, 40, 32, torch.bfloat16, "cuda"))
    of = weights_of(2, 48, 48, torch.bfloat16, "cuda")
    assert not can_compute(replace(of, down=of.down.mT))
    assert can_compute(in_four_bits(weights_of(2, 64, 32, torch.bfloat16, "cuda")))


# ---- on a GPU ----

SHAPES = [(2048, 768, 128, 8, False), (2880, 2880, 32, 4, True), (4096, 14336, 8, 2, False), (1024, 512, 64, 8, False)]


@pytest.mark.gpu
@pytest.mark.parametrize(("hidden", "width", "num_experts", "top_k", "clamped"), SHAPES)
def test_in_the_sizes_of_serving(hidden: int, width: int, num_experts: int, top_k: int, clamped: bool) -> None:
    torch.manual_seed(0)
    of = weights_of(num_experts, hidden, width, torch.bfloat16, "cuda", clamped)
    for num_tokens in sorted({*kernel_tokens(top_k, num_experts), 2, 3, 7, 33, 100, 2048}):
        x = torch.randn(num_tokens, hidden, device="cuda", dtype=torch.bfloat16)
        logits = torch.randn(num_tokens, num_experts, device="cuda")
        weights, ids = route(logits, Routing(top_k, normalized=True), None, torch.bfloat16)
        with poisoned():
            out = experts(x, ids, weights, of)
        check(out, reference.experts(x, ids, weights, of))


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [1, 8, 48, 200, 700, 3000])
def test_weights_of_8_bits(num_tokens: int) -> None:
    """As the reference, which multiplies what the weights stand for, but for the rounding of x."""
    from benchmarks.layers.random_experts import LARGEST_FP8_ERROR, Layer, Shape

    for shape in (Shape(2048, 768, 32, Routing(4)), Shape(2880, 2880, 8, Routing(2, "chosen_softmax"), clamped=True)):
        layer = Layer.random(shape, torch.device("cuda"), torch.bfloat16, "fp8")
        assert layer.check(num_tokens) < (0.02 if num_tokens <= 2 else LARGEST_FP8_ERROR), "x is in 8 bits, or not"


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [1, 2, 8, 64, 512, 2000])
def test_replayed_as_called(num_tokens: int) -> None:
    """In a graph, with other tokens in each replay: the same bits as called, and padding that reads no expert."""
    torch.manual_seed(0)
    of = weights_of(32, 1024, 512, torch.bfloat16, "cuda")
    router = torch.randn(32, 1024, device="cuda", dtype=torch.bfloat16)
    x = torch.zeros(num_tokens, 1024, device="cuda", dtype=torch.bfloat16)
    slots = torch.ones(num_tokens, dtype=torch.int64, device="cuda")

    def layer() -> Tensor:
        weights, ids = route(x @ router.T, Routing(4), None, torch.bfloat16)
        return experts(x, ids, weights, of, slots)

    layer()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer()
    for number in range(20):
        x.copy_(torch.randn_like(x))
        slots.copy_(torch.arange(num_tokens, device="cuda") % (2 + number) + number % 2)
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, layer())
        assert not out[slots == 0].any()


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [1, 8, 32, 128, 512])
def test_replayed_with_the_norm_that_sums(num_tokens: int) -> None:
    """In a graph, with other tokens in each replay: the same bits as of a norm after the kernel that only sums."""
    torch.manual_seed(0)
    of = weights_of(128, 2048, 768, torch.bfloat16, "cuda")
    router = torch.randn(128, 2048, device="cuda", dtype=torch.bfloat16)
    x, residual = torch.zeros(2, num_tokens, 2048, device="cuda", dtype=torch.bfloat16)
    weight, slots = torch.rand_like(x[0]), torch.ones(num_tokens, dtype=torch.int64, device="cuda")

    def layer(leaves_sum: bool) -> tuple[Tensor, Tensor]:
        weights, ids = route(x @ router.T, Routing(8, normalized=True), None, torch.bfloat16)
        added, total = experts(x, ids, weights, of, slots, leaves_sum=leaves_sum), residual.clone()
        return rms_norm(added, weight, 1e-6, residual=total), total

    layer(leaves_sum=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = layer(leaves_sum=True)
    for number in range(20):
        x.copy_(torch.randn_like(x))
        residual.copy_(torch.randn_like(x))
        slots.copy_(torch.arange(num_tokens, device="cuda") % (2 + number) + number % 2)
        graph.replay()
        for one, other in zip(found, layer(leaves_sum=False), strict=True):
            assert torch.equal(one, other)
