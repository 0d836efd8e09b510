"""How a matmul of few rows is divided among programs, and how programs store their results.

In each program, one warp makes the tensor memory accelerator copy tiles of x and of the weight; one or two groups of 4
warps multiply 64 features each by all rows of x, at their own pace. Several programs may divide the columns of a tile.

Giving equal shares of all tiles to as many programs as there is room for (Osama et al., "Stream-K", 2023) takes 10 to
15% longer: more tiles are then summed from several programs.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, disallow-untyped-calls=False
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language import debug_barrier

from baton_kernels.device import num_sms
from baton_kernels.linear.kernel import arrival_counters, gated
from baton_kernels.linear.tiling import MAX_TILES

OUT = 64
"""Features of a group of 4 warps, 16 for each warp."""
_COPYING_REGISTERS = 24
"""Registers of a thread that copies."""


@gluon.jit
def share(num_steps):
    """The program's steps: [first, end)."""
    split, num_splits = gl.program_id(2), gl.num_programs(2)
    return num_steps * split // num_splits, num_steps * (split + 1) // num_splits


@gluon.jit
def row_of(own, index, out_features, GATED: gl.constexpr):
    """The weight's row for one of the 64 rows of a tile. With an activation, every 16 rows are 8 features of the gate
    and the same 8 of up, so that one thread has both."""
    eighth = index // 16 * 8 + index % 8
    return own * 32 + eighth + index // 8 % 2 * out_features if GATED else own * 64 + index


@gluon.jit
def finish(
    sums,
    bias_ptr,
    out_ptr,
    part_ptr,
    arrived_ptr,
    own,
    num_rows,
    out_features,
    ROWS: gl.constexpr,
    SPLIT: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    ACTIVATION: gl.constexpr,
):
    """Store the sums of a tile, [64, ROWS]. If several programs share the tile, the last one to finish adds all their
    sums. own: the number of the tile."""
    DTYPE: gl.constexpr = out_ptr.dtype.element_ty
    GATED: gl.constexpr = ACTIVATION is not None
    PART: gl.constexpr = 64 * ROWS
    index = gl.arange(0, 64, layout=gl.SliceLayout(1, sums.type.layout))
    is_last = True
    if SPLIT:
        split, num_splits = gl.program_id(2), gl.num_programs(2)
        cell = own * gl.num_programs(0) + gl.program_id(0)
        part_ptrs = part_ptr + cell.to(gl.int64) * (num_splits * PART)
        part_ptrs += index[:, None] * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(0, sums.type.layout))[None, :]
        gl.store(part_ptrs + split * PART, sums)
        debug_barrier()  # order all threads' stores before the release by one thread
        is_last = gl.atomic_add(arrived_ptr + cell, 1, sem="acq_rel", scope="gpu") == num_splits - 1
        if is_last:
            gl.store(arrived_ptr + cell, 0)  # the next matmul expects zeros
            # Read all parts from memory, in a fixed order, so that the sum does not depend on which program is last.
            sums = gl.load(part_ptrs, cache_modifier=".cg")
            for other in range(1, num_splits):
                sums += gl.load(part_ptrs + other * PART, cache_modifier=".cg")
    if is_last:
        row = row_of(own, index, out_features, GATED)
        if HAS_BIAS:
            num_sums = 2 * out_features if GATED else out_features
            sums += gl.load(bias_ptr + row, mask=row < num_sums, other=0.0).to(gl.float32)[:, None]
        if GATED:
            gate, up = gl.split(sums.reshape([4, 2, 8, ROWS]).permute([0, 2, 3, 1]))
            values = gated(gate, up, ACTIVATION, DTYPE).reshape([32, ROWS])
            feature = own * 32 + gl.arange(0, 32, layout=gl.SliceLayout(1, values.type.layout))
        else:
            values, feature = sums, row
        x_row = gl.program_id(0) * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(0, values.type.layout))
        outs = out_ptr + x_row.to(gl.int64)[None, :] * out_features + feature[:, None]
        gl.store(outs, values.to(DTYPE), mask=(feature < out_features)[:, None] & (x_row < num_rows)[None, :])


@dataclass(frozen=True, slots=True)
class TileTiling:
    """rows: how many rows of x a program has. groups: groups of 4 warps that multiply. programs: how many run on an SM
    at a time, with `registers` registers per thread at the start. least_steps: the fewest steps of a program that
    divides the columns with others."""

    rows: int
    groups: int
    stages: int
    programs: int
    registers: int
    least_steps: int

    @property
    def registers_of_second(self) -> int:
        """Registers of a thread in the second group of warps, once the threads that copy have given theirs up; a
        multiple of 8, as the hardware requires."""
        warps = 4 * self.groups
        return min(240, (self.registers * (warps + 4) - _COPYING_REGISTERS * 4) // warps // 8 * 8)


@dataclass(frozen=True, slots=True)
class Programs:
    """The programs of a launch, and the tensors that they write. out: [num_rows, features]."""

    grid: tuple[int, int, int]
    out: Tensor
    part: Tensor
    arrived: Tensor

    @classmethod
    def of(
        cls,
        num_rows: int,
        out_features: int,
        num_steps: int,
        activation: str | None,
        tiling: TileTiling,
        device: torch.device,
        dtype: torch.dtype,
    ) -> Programs:
        """Divide a matmul among programs. out_features: of the weight. dtype: of the results."""
        out = torch.empty((num_rows, out_features // (1 if activation is None else 2)), dtype=dtype, device=device)
        row_blocks, tiles = triton.cdiv(num_rows, tiling.rows), triton.cdiv(out_features, OUT * tiling.groups)
        room = tiling.programs * num_sms(device) // (tiles * row_blocks)
        num_parts = tiles * tiling.groups * row_blocks
        splits = max(1, min(room, num_steps // tiling.least_steps)) if num_parts <= MAX_TILES else 1
        if splits == 1:
            return cls((row_blocks, tiles, 1), out, out, out)
        part = torch.empty((num_parts, splits, OUT, tiling.rows), dtype=torch.float32, device=device)
        return cls((row_blocks, tiles, splits), out, part, arrival_counters(device))

    @property
    def splits(self) -> int:
        return self.grid[2]

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.out, self.part, self.arrived


def weight_descriptor(weight: Tensor, gated: bool, columns: int) -> TensorDescriptor:
    """A descriptor of [out_features, n] elements, for tiles of 64 rows in the order of `row_of`. columns: of a tile,
    128 bytes. Features come in eights, those of gate and of up as well."""
    out_features, width = weight.shape
    sums = 2 if gated else 1
    features = out_features // sums
    assert features % 8 == 0
    return TensorDescriptor(
        weight, [features // 8, sums, 8, width], [8 * width, features * width, width, 1], [8 // sums, sums, 8, columns],
        gl.NVMMASharedLayout(128, 8 * weight.element_size(), 4),
    )  # fmt: skip
