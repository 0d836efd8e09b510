"""all_reduce_rms_norm as a Triton kernel: every rank pushes its part of each row to all others, and sums what arrives.

    a program, for rows r = program, program + num_programs, ...:
        write the rows of this rank's part into the program's region in each other rank's buffer
        for each row: read the regions of the own buffer until nothing in them is EMPTY; sum; EMPTY them again
        add the residual, norm, store

With more than two ranks, a rank would push many rows several times: then every program has an owner among the ranks
(two shots).

    a program of another rank:   write the rows of this rank's part into the program's region in the owner's buffer
        for each row: read the owner's region until nothing in it is EMPTY; EMPTY it again; norm, store
    a program of the owner
        for each row: sum the parts and add the residual as above; write the row into each other rank's buffer; norm,
        store

Only rows travel: there are no flags and no barriers, since an element that is not EMPTY has arrived. Ranks never send
EMPTY. Elements are at most 4 bytes and aligned, so that none arrives in part; their order does not matter.

The part of the buffers that a program touches belongs to the programs with its number alone, whatever rows, widths or
dtypes their calls have. They use two halves of it in turns. `turns` keeps in memory which half is next, so that a CUDA
graph continues where the last one ended. For each number, a rank never overwrites what another rank has not read:

    - A rank that writes in call c + 2 has ended its call c + 1, in which it read what the others wrote in theirs.
    - A rank that wrote in call c + 1 had ended its call c, since the programs of a stream wait for all kernels before.
      (In two shots, what a rank reads is the owner's, which has read what all others wrote.)
    - So call c has ended on all ranks. It read its half, and left it EMPTY: the half that call c + 2 uses.

Waiting programs always make progress: a launch has so few programs that GPUs with as many SMs run all of them at once,
beside kernels that end by themselves. GPUs that cannot do so start programs in order, so that the first program that
has not ended runs on all ranks.

After TensorRT-LLM's one-shot all-reduce with Lamport's flags (`trtllm_allreduce_fusion.cuh` in FlashInfer). That has
three buffers, because all threads of a call share them there, and uses -0.0 as its empty element.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton_kernels.all_reduce_rms_norm import EMPTY, NUM_PROGRAMS, REGION_BYTES, PeerMemory
from baton_kernels.pdl import launch_options
from baton_kernels.quantized_linear.quantize_rows_kernel import store_quantized
from baton_kernels.quantized_linear.weights import LARGEST
from baton_kernels.rms_norm.kernel import normed

_EMPTY = tl.constexpr(EMPTY)
_NUM_PROGRAMS = tl.constexpr(NUM_PROGRAMS)
_REGION_BYTES = tl.constexpr(REGION_BYTES)


@triton.jit
def _region(address, distance, turn, SIZE: tl.constexpr, BITS: tl.constexpr):
    """Where this program's rows from another rank are in the buffer at `address`. distance: by how much that rank's
    number precedes that of the buffer's rank."""
    base = tl.multiple_of(address.to(tl.pointer_type(BITS)), 16)
    index = (turn * (SIZE - 1) + distance - 1) * _NUM_PROGRAMS + tl.program_id(0)
    return base + index.to(tl.int64) * (_REGION_BYTES // (BITS.primitive_bitwidth // 8))


@triton.jit
def _push(ptrs, values, mask, BITS: tl.constexpr):
    """Write the bits of the values, but never EMPTY."""
    LAST: tl.constexpr = 2 ** (BITS.primitive_bitwidth - 1) - 1  # also a NaN
    bits = values.to(BITS, bitcast=True)
    tl.store(ptrs, tl.where(bits == _EMPTY, LAST, bits), mask=mask)


@triton.jit
def _take(ptrs, mask):
    """Wait until all elements at `ptrs` have arrived, return their bits, and leave them EMPTY. Volatile loads see what
    other GPUs write."""
    bits = tl.load(ptrs, mask=mask, other=0, volatile=True)
    while tl.min(tl.min((bits != _EMPTY).to(tl.int32), 1), 0) == 0:
        bits = tl.load(ptrs, mask=mask, other=0, volatile=True)
    tl.store(ptrs, tl.full(bits.shape, _EMPTY, bits.dtype), mask=mask)
    return bits


@triton.jit(do_not_specialize=["num_rows"])
def _all_reduce_rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    quantized_ptr,
    scale_ptr,
    addresses_ptr,
    turns_ptr,
    num_rows,
    eps,
    weight_offset,
    N: tl.constexpr,
    N_PADDED: tl.constexpr,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    PROGRAMS: tl.constexpr,
    BITS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    ROUND_ONCE: tl.constexpr,
    LARGEST: tl.constexpr,
    ROUND: tl.constexpr,
    TWO_SHOTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """BITS: the integer type of x's element size. LARGEST: what a row's largest value becomes when it is quantized; 0:
    rows are not quantized."""
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    program = tl.program_id(0)
    column = tl.arange(0, N_PADDED)[None, :]
    mask = column < N
    weight = tl.load(weight_ptr + column, mask=mask, other=0.0).to(tl.float32) + weight_offset
    if PDL:
        tl.extra.cuda.gdc_wait()
    turn = tl.load(turns_ptr + program)
    own_address = tl.load(addresses_ptr + RANK)
    owner = program % SIZE
    for distance in tl.static_range(1, SIZE):
        receiver = (RANK + distance) % SIZE
        if (not TWO_SHOTS) or receiver == owner:
            region = _region(tl.load(addresses_ptr + receiver), distance, turn, SIZE, BITS)
            for row in range(program, num_rows, PROGRAMS):
                part = tl.load(x_ptr + tl.cast(row, tl.int64) * N + column, mask=mask, other=0.0)
                _push(region + row // PROGRAMS * N + column, part, mask, BITS)
    tl.debug_barrier()  # all threads send before any waits
    for row in range(program, num_rows, PROGRAMS):
        offset = tl.cast(row, tl.int64) * N + column
        place = row // PROGRAMS * N + column
        if (not TWO_SHOTS) or owner == RANK:
            own = tl.load(x_ptr + offset, mask=mask, other=0.0).to(tl.float32)
            if HAS_RESIDUAL:
                residual = tl.load(residual_ptr + offset, mask=mask, other=0.0).to(tl.float32)
            x = tl.zeros([1, N_PADDED], tl.float32)
            for rank in tl.static_range(SIZE):
                if rank == RANK:
                    x += own
                else:
                    region = _region(own_address, (RANK - rank + SIZE) % SIZE, turn, SIZE, BITS)
                    x += _take(region + place, mask).to(DTYPE, bitcast=True).to(tl.float32)
            rounded = x.to(DTYPE)
            if HAS_RESIDUAL:
                rounded = (rounded.to(tl.float32) + residual).to(DTYPE)
            if TWO_SHOTS:
                for distance in tl.static_range(1, SIZE):
                    address = tl.load(addresses_ptr + (RANK + distance) % SIZE)
                    _push(_region(address, distance, turn, SIZE, BITS) + place, rounded, mask, BITS)
        else:
            region = _region(own_address, (RANK - owner + SIZE) % SIZE, turn, SIZE, BITS)
            rounded = _take(region + place, mask).to(DTYPE, bitcast=True)
        if HAS_RESIDUAL:
            tl.store(residual_ptr + offset, rounded, mask=mask)
        out = normed(rounded.to(tl.float32), weight, eps, N, ROUND_ONCE, DTYPE)
        tl.store(out_ptr + offset, out, mask=mask)
        if LARGEST:
            one = row + tl.arange(0, 1)[:, None]
            store_quantized(
                out.to(tl.float32), quantized_ptr + offset, scale_ptr + one, mask, one < num_rows, LARGEST, ROUND
            )
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    tl.store(turns_ptr + program, 1 - turn)


def all_reduce_rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    peers: PeerMemory,
    residual: Tensor | None,
    weight_offset: float,
    round_once: bool,
    quantized: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """quantized: tensors for the result's rows, quantized as by `quantize_rows`, and for their scales."""
    out = torch.empty_like(x)
    n = x.shape[-1]
    num_rows = x.numel() // n
    if num_rows == 0:
        return out
    padded = triton.next_power_of_2(n)
    _all_reduce_rms_norm_kernel[(min(num_rows, peers.num_programs),)](
        x,
        x if residual is None else residual,
        weight,
        out,
        *(quantized or (out, out)),
        peers.addresses,
        peers.turns,
        num_rows,
        eps,
        weight_offset,
        n,
        padded,
        peers.rank,
        peers.size,
        peers.num_programs,
        tl.int16 if x.itemsize == 2 else tl.int32,
        residual is not None,
        round_once,
        0 if quantized is None else LARGEST[quantized[0].dtype],
        quantized is not None and quantized[0].dtype == torch.int8,
        peers.takes_two_shots(num_rows, n * x.itemsize),
        num_warps=max(1, min(16, padded // 512)),
        **launch_options(x.device),
    )
    return out
