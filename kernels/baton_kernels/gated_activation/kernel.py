"""gated_activation as a Triton kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton_kernels.pdl import launch_options

TILE = 1024  # elements per program: 4 warps, one 16-byte access of each of gate, up and out per thread


@triton.jit
def activated(gate, ACTIVATION: tl.constexpr):
    if ACTIVATION == "silu":
        gate = gate / (1.0 + tl.exp(-gate))  # a multiplication less than with sigmoid
    elif ACTIVATION == "gelu_tanh":
        # 0.5 (1 + tanh(z)) is sigmoid(2 z); Triton has no built-in tanh.
        gate = gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    else:
        gate = 0.5 * gate * (1.0 + tl.math.erf(gate * 0.7071067811865476))
    return gate


@triton.jit
def _gated_activation_kernel(
    gate_up_ptr, out_ptr, INTERMEDIATE: tl.constexpr, TILE: tl.constexpr, ACTIVATION: tl.constexpr, PDL: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = column < INTERMEDIATE
    if PDL:
        tl.extra.cuda.gdc_wait()
    gate_ptrs = gate_up_ptr + row * (2 * INTERMEDIATE) + column
    gate = tl.load(gate_ptrs, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_ptrs + INTERMEDIATE, mask=mask, other=0.0).to(tl.float32)
    rounded = activated(gate, ACTIVATION).to(out_ptr.dtype.element_ty).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    tl.store(out_ptr + row * INTERMEDIATE + column, (rounded * up).to(out_ptr.dtype.element_ty), mask=mask)


def gated_activation(gate_up: Tensor, activation: str) -> Tensor:
    intermediate = gate_up.shape[-1] // 2
    out = torch.empty((*gate_up.shape[:-1], intermediate), dtype=gate_up.dtype, device=gate_up.device)
    num_rows = out.numel() // intermediate
    if num_rows:
        grid = (num_rows, triton.cdiv(intermediate, TILE))
        pdl = launch_options(gate_up.device)
        _gated_activation_kernel[grid](gate_up, out, intermediate, TILE, activation, num_warps=4, **pdl)
    return out
