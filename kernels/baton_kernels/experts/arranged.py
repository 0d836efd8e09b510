"""MXFP4 expert weights, in the order in which Hopper's tensor cores take them from registers.

Rows: every 16 rows of gate and up are 8 features of the gate and the same 8 of up, so that one thread has both. Rows of
down keep their order. Columns are divided into steps of 128, the last one filled up with zeros. A step's codes are
packed into 16 words of 32 bits, 4 consecutive words for each lane; a word has 4 codes of the step's first half and 4 of
its second. A code's bits are placed so that a shift and a mask turn two codes of a word into two bf16 numbers, which
are too small by 2**126 (`arranged_kernel`).

Scales: one word has the scales of a row in a step. Each is the exponent of a power of two in bf16, too large by 2**126.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from baton_kernels import pdl
from baton_kernels.experts.weights import GROUP, ExpertWeights

STEP = 128
"""Columns of a step of the kernel."""
LARGEST_SCALE = 128
"""The exponent of a larger scale would not fit in 8 bits."""
_TOO_SMALL_BY = 126
_GROUPS = STEP // GROUP
_FIELDS = ((15, 6), (12, 3), (9, 0), None)
"""For each of the four codes in half a word, the bit of its sign and the lowest bit of the other three. The last code
has the bits that are left: 14, and 11, 10 and 13."""


def can_arrange(of: ExpertWeights, dtype: torch.dtype) -> bool:
    """Whether the weights can be arranged, and their device has a kernel for that and for x of `dtype`. Waits for the
    device."""
    device = of.gate_up.device
    if dtype != torch.bfloat16 or not pdl.supported(device) or torch.cuda.get_device_capability(device)[0] != 9:
        return False
    return has_order(of)


def has_order(of: ExpertWeights) -> bool:
    """Whether the weights can be arranged, on any device."""
    if not of.four_bits or of.integers or of.arranged or of.gate_up_scale is None or of.down_scale is None:
        return False
    fits = of.intermediate_size % 8 == 0 and of.hidden_size % 8 == 0
    return fits and max(int(scale.max()) for scale in (of.gate_up_scale, of.down_scale)) <= LARGEST_SCALE


def arrange(of: ExpertWeights) -> ExpertWeights:
    """The arranged weights; `has_order` must hold. The given weights are not changed or referred to. Biases stay as
    they are."""
    assert of.gate_up_scale is not None
    assert of.down_scale is not None
    order = _gate_up_order(of)
    gate_up, gate_up_scale = _in_steps(of.gate_up, of.gate_up_scale, order)
    down, down_scale = _in_steps(of.down, of.down_scale, None)
    return replace(of, gate_up=gate_up, down=down, gate_up_scale=gate_up_scale, down_scale=down_scale)


def as_published(of: ExpertWeights) -> ExpertWeights:
    """The weights that `arrange` was given."""
    assert of.gate_up_scale is not None
    assert of.down_scale is not None
    back = _gate_up_order(of).argsort()
    gate_up, gate_up_scale = _from_steps(of.gate_up, of.gate_up_scale, of.hidden_size)
    down, down_scale = _from_steps(of.down, of.down_scale, of.intermediate_size)
    gate_up, gate_up_scale = gate_up[:, back], gate_up_scale[:, back]
    return replace(of, gate_up=gate_up, down=down, gate_up_scale=gate_up_scale, down_scale=down_scale)


def _gate_up_order(of: ExpertWeights) -> Tensor:
    """[2 * intermediate_size]: for each arranged row, the row that it was before."""
    features = torch.arange(of.intermediate_size, device=of.gate_up.device).view(-1, 1, 8)
    apart = torch.arange(2, device=features.device)[:, None] * (1 if of.interleaved else of.intermediate_size)
    return (features * (2 if of.interleaved else 1) + apart).flatten()


def _in_steps(codes: Tensor, scale: Tensor, order: Tensor | None) -> tuple[Tensor, Tensor]:
    """Words, [num_experts, rows, num_steps * 16], and scales, [num_experts, num_steps, rows], int32 both. Arranges one
    expert at a time, as each takes several copies."""
    num_experts, rows, width = codes.shape
    num_steps = -(-2 * width // STEP)
    words = torch.empty((num_experts, rows, num_steps * STEP // 8), dtype=torch.int32, device=codes.device)
    scales = torch.empty((num_experts, num_steps, rows), dtype=torch.int32, device=codes.device)
    for expert in range(num_experts):
        own, own_scale = codes[expert], scale[expert]
        if order is not None:
            own, own_scale = own[order], own_scale[order]
        filled = torch.nn.functional.pad(own, (0, num_steps * STEP // 2 - width))
        words[expert] = _words(torch.stack([filled & 15, filled >> 4], -1).view(rows, num_steps, STEP))
        padded = torch.nn.functional.pad(own_scale, (0, num_steps * _GROUPS - own_scale.shape[1]))
        exponents = (padded + _TOO_SMALL_BY).view(rows, num_steps, _GROUPS)
        scales[expert] = exponents.contiguous().view(torch.int32)[..., 0].t()
    return words, scales


def _words(codes: Tensor) -> Tensor:
    """Pack codes, [rows, num_steps, STEP], into words, [rows, num_steps * 16], int32."""
    rows = codes.shape[0]
    # A column is (half of the step, chunk, q, lane, p), a word (lane, chunk). A word's halves are p = 0 and 1; each has
    # the codes of both step halves and both q.
    parts = codes.view(rows, -1, 2, 4, 2, 4, 2).permute(0, 1, 5, 3, 2, 4, 6).reshape(rows, -1, 4, 2).int()
    halves = torch.zeros((*parts.shape[:2], 2), dtype=torch.int32, device=codes.device)
    for i, field in enumerate(_FIELDS):
        code = parts[:, :, i]
        sign, rest = code >> 3, code & 7
        if field is None:
            halves |= sign << 14 | (rest >> 1) << 10 | (rest & 1) << 13
        else:
            halves |= sign << field[0] | rest << field[1]
    return halves[..., 0] | halves[..., 1] << 16


def _from_steps(words: Tensor, scales: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    num_experts, rows, width = words.shape
    codes = torch.empty((num_experts, rows, columns // 2), dtype=torch.uint8, device=words.device)
    scale = torch.empty((num_experts, rows, columns // GROUP), dtype=torch.uint8, device=words.device)
    for expert in range(num_experts):
        halves = torch.stack([words[expert] & 0xFFFF, (words[expert] >> 16) & 0xFFFF], -1)
        found = []
        for field in _FIELDS:
            if field is None:
                found.append((halves >> 14 & 1) << 3 | (halves >> 10 & 3) << 1 | (halves >> 13 & 1))
            else:
                found.append((halves >> field[0] & 1) << 3 | (halves >> field[1] & 7))
        parts = torch.stack(found, 2).view(rows, -1, 4, 4, 2, 2, 2)  # lane, chunk, half, q, p
        own = parts.permute(0, 1, 4, 3, 5, 2, 6).reshape(rows, width * 4, 2)[:, : columns // 2].to(torch.uint8)
        codes[expert] = own[..., 0] | own[..., 1] << 4
        exponents = scales[expert].t().flatten().view(torch.uint8).view(rows, -1)
        scale[expert] = exponents[:, : columns // GROUP] - _TOO_SMALL_BY
    return codes, scale
