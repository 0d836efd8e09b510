"""Experts in MXFP4, arranged for Hopper's tensor cores: the order, and on a GPU the kernel."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from baton_kernels.experts import ExpertWeights, Routing, experts, kernel_tokens, reference, route
from baton_kernels.experts.arranged import LARGEST_SCALE, STEP, arrange, as_published, can_arrange, has_order
from baton_kernels.experts.tiling import BY_TOKEN_TOKENS, ROW_TOKENS, arranged_rows
from tests.kernels.expert_cases import RELATIVE, choices
from tests.kernels.poison import poisoned

torch.set_num_threads(1)


def drawn(
    num_experts: int, hidden: int, width: int, scales: tuple[int, int] = (0, LARGEST_SCALE), device: str = "cpu"
) -> ExpertWeights:
    """Of gpt-oss's form, with scales between these two."""
    codes, exponents = [], []
    for rows, columns in ((2 * width, hidden), (hidden, width)):
        codes.append(torch.randint(0, 256, (num_experts, rows, columns // 2), dtype=torch.uint8))
        exponents.append(torch.randint(scales[0], scales[1] + 1, (num_experts, rows, columns // 32)).byte())
    gate_up, down, gate_up_scale, down_scale = (one.to(device) for one in (*codes, *exponents))
    gate_up_bias, down_bias = (torch.randn(num_experts, n).to(device, torch.bfloat16) for n in (2 * width, hidden))
    return ExpertWeights(
        gate_up, down, "clamped", True, gate_up_bias, down_bias, gate_up_scale=gate_up_scale, down_scale=down_scale
    )


def same_weights(one: ExpertWeights, other: ExpertWeights) -> bool:
    names = ("gate_up", "down", "gate_up_scale", "down_scale", "gate_up_bias", "down_bias")
    return all(torch.equal(getattr(one, name), getattr(other, name)) for name in names)


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize(("hidden", "width"), [(64, 32), (288, 96), (256, 160)])
def test_what_is_arranged_can_be_had_back(hidden: int, width: int, interleaved: bool) -> None:
    """Also of widths that fill no step."""
    of = replace(drawn(3, hidden, width), interleaved=interleaved)
    assert has_order(of)
    arranged = arrange(of)
    assert arranged.arranged
    assert arranged.four_bits
    assert not has_order(arranged)
    assert (arranged.hidden_size, arranged.intermediate_size) == (hidden, width)
    assert same_weights(as_published(arranged), of)
    assert same_weights(as_published(arranged.only(1)), of.only(1))


def as_the_kernel_reads(words: Tensor, scales: Tensor) -> Tensor:
    """[rows, columns], bf16: the operations on a word that the kernel has in PTX. words: [rows, num_steps * 16];
    scales: [num_steps, rows]."""
    mask = 0x81C081C0
    word = words.long() & 0xFFFFFFFF
    last = ((word << 1) & 0x80008000) | ((word >> 3) & 0x01800180) | ((word >> 7) & 0x00400040)
    pairs = torch.stack([word & mask, (word << 3) & mask, (word << 6) & mask, last], -1)
    halves = torch.stack([pairs & 0xFFFF, pairs >> 16], -1)  # p last
    values = halves.to(torch.int32).to(torch.int16).view(torch.bfloat16)
    rows, num_steps = words.shape[0], scales.shape[0]
    shifts = torch.arange(4) // 2 * 8 + torch.tensor([[0], [16]])  # [half, chunk]
    exponents = (scales.t()[:, :, None, None] >> shifts) & 255
    factors = (exponents << 7).to(torch.int16).view(torch.bfloat16)  # [rows, num_steps, half, chunk]
    lanes = values.view(rows, num_steps, 4, 4, 2, 2, 2).permute(0, 1, 4, 3, 5, 2, 6)  # half, chunk, q, lane, p
    return (lanes * factors[..., None, None, None]).reshape(rows, num_steps * STEP)


def test_codes_become_their_values() -> None:
    """Every code with every scale, subnormal results included, exactly."""
    of = drawn(2, 320, 64)
    arranged = arrange(of)
    assert arranged.down_scale is not None
    assert of.down_scale is not None
    for expert in range(2):
        read = as_the_kernel_reads(arranged.down[expert], arranged.down_scale[expert])
        expected = reference.dequantize(of.down[expert], of.down_scale[expert], torch.bfloat16)
        assert torch.equal(read[:, :64], expected)
        assert not read[:, 64:].any(), "what fills a step counts for nothing"


def test_gate_and_up_alternate_in_eights() -> None:
    of = drawn(1, 128, 32, (127, 127))
    arranged = arrange(of)
    assert arranged.gate_up_scale is not None
    assert of.gate_up_scale is not None
    read = as_the_kernel_reads(arranged.gate_up[0], arranged.gate_up_scale[0])
    expected = reference.dequantize(of.gate_up[0], of.gate_up_scale[0], torch.bfloat16)
    for tile in range(4):
        features = slice(16 * tile, 16 * (tile + 1))
        assert torch.equal(read[features][:8], expected[features][0::2])
        assert torch.equal(read[features][8:], expected[features][1::2])


def test_the_reference_computes_arranged_weights() -> None:
    torch.manual_seed(0)
    of = drawn(4, 96, 64, (120, 124))
    x, (ids, weights) = torch.randn(5, 96), choices(5, 2, 4, "cpu")
    of = replace(of, gate_up_bias=None, down_bias=None)
    assert torch.equal(reference.experts(x, ids, weights, arrange(of)), reference.experts(x, ids, weights, of))


def test_what_has_no_such_order() -> None:
    of = drawn(2, 64, 32)
    assert not can_arrange(of, torch.bfloat16), "there is no kernel for it on a CPU"
    assert of.gate_up_scale is not None
    large = of.gate_up_scale.clone()
    large[1, 3, 1] = LARGEST_SCALE + 1
    assert not has_order(replace(of, gate_up_scale=large))
    assert not has_order(ExpertWeights(torch.zeros(2, 64, 64), torch.zeros(2, 64, 32)))


@pytest.mark.parametrize(("top_k", "num_experts"), [(4, 32), (4, 128), (8, 128), (2, 8), (1, 16)])
def test_startup_runs_every_kernel(top_k: int, num_experts: int) -> None:
    def way(num_tokens: int) -> object:
        rows = arranged_rows(num_tokens, top_k, num_experts)
        assert num_tokens > BY_TOKEN_TOKENS or num_tokens <= rows
        return rows, num_tokens <= ROW_TOKENS, num_tokens <= BY_TOKEN_TOKENS

    known = {way(num_tokens) for num_tokens in kernel_tokens(top_k, num_experts)}
    assert {way(num_tokens) for num_tokens in range(1, 9000)} <= known


SHAPES = [(2880, 2880, 32, 4), (2880, 1440, 8, 4), (512, 96, 16, 2), (64, 64, 4, 1), (96, 32, 4, 2)]


@pytest.mark.gpu
@pytest.mark.parametrize(("hidden", "width", "num_experts", "top_k"), SHAPES)
def test_on_a_gpu(hidden: int, width: int, num_experts: int, top_k: int) -> None:
    """Also sizes that are no multiples of tiles and steps; choices of no expert; padding."""
    torch.manual_seed(0)
    of = drawn(num_experts, hidden, width, (116, 121), "cuda")
    assert can_arrange(of, torch.bfloat16)
    assert not can_arrange(of, torch.float16)
    arranged = arrange(of)
    assert same_weights(as_published(arranged), of)
    for interleaved, bias in ((True, True), (False, False)):
        form = replace(of, interleaved=interleaved, gate="clamped" if bias else "silu")
        if not bias:
            form = replace(form, gate_up_bias=None, down_bias=None)
        arranged = arrange(form)
        for num_tokens in sorted({*kernel_tokens(top_k, num_experts), 2, 3, 7, 33, 100, 2048}):
            skipped = num_tokens % 3 * 4  # rows that are not aligned, too
            x = torch.randn(num_tokens, hidden + skipped, device="cuda", dtype=torch.bfloat16)[:, skipped:]
            logits = torch.randn(num_tokens, num_experts, device="cuda")
            weights, ids = route(logits, Routing(top_k, "chosen_softmax"), None, torch.bfloat16)
            ids[-1, -1] = num_experts
            slots = (torch.arange(num_tokens, device="cuda") + num_tokens) % 3
            expected = reference.experts(x, ids, weights, form).float()
            with poisoned():
                out = experts(x, ids, weights, arranged).float()
                padded = experts(x, ids, weights, arranged, slots).float()
            largest = expected.abs().amax(-1)
            assert ((out - expected).abs().amax(-1) <= RELATIVE[torch.bfloat16] * largest).all(), num_tokens
            wanted = expected * (slots > 0)[:, None]
            assert ((padded - wanted).abs().amax(-1) <= RELATIVE[torch.bfloat16] * largest).all(), num_tokens
