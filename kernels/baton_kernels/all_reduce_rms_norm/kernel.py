"""all_reduce_rms_norm as a Triton kernel: every rank pushes its part of each row to all others, and sums what arrives.

    a program, for rows r = program, program + num_programs, ...:
        write the rows of this rank's part into the program's region in each other rank's buffer
        for each row: read the regions of the own buffer until nothing in them is EMPTY; EMPTY them again; sum
        add the residual, norm, store

With more than two ranks, a rank would push each row several times. Then each rank sums its share of the columns of
every row, for all of them (two shots), which is as fast for one row:

        write each other rank's columns of the rows into the program's region in its buffer
        for each row: read this rank's columns in the own buffer as above; sum; add the residual; write them into the
        buffer of each other rank, behind those
        for each row: read the sums of the other columns as above; norm, store

Only rows travel: there are no flags and no barriers, since an element that is not EMPTY has arrived. Ranks never send
EMPTY. Elements are at most 4 bytes and aligned, so that none arrives in part; their order does not matter.

The part of the buffers that a program touches belongs to the programs with its number alone, whatever rows, widths or
dtypes their calls have. They use two halves of it in turns. `turns` keeps in memory which half is next, so that a CUDA
graph continues where the last one ended. For each number, a rank never overwrites what another rank has not read:

    - A rank that writes in call c + 2 has ended its call c + 1, in which it read what all others wrote in theirs.
    - A rank that wrote in call c + 1 had ended its call c, since the programs of a stream wait for all kernels before.
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
from baton_kernels.quantized_linear.quantize_rows_kernel import largest_of, store_quantized
from baton_kernels.quantized_linear.weights import LARGEST
from baton_kernels.rms_norm.kernel import normed

_EMPTY = tl.constexpr(EMPTY)
_NUM_PROGRAMS = tl.constexpr(NUM_PROGRAMS)
_REGION_BYTES = tl.constexpr(REGION_BYTES)


@triton.jit
def _regions(address, distance, turn, SIZE: tl.constexpr, BITS: tl.constexpr):
    """Where this program's rows from other ranks are in the buffers at `address`. distance: by how much the number of
    the rank that sends them precedes that of the buffer's rank."""
    index = (turn * (SIZE - 1) + distance - 1) * _NUM_PROGRAMS + tl.program_id(0)
    offset = index.to(tl.int64) * (_REGION_BYTES // (BITS.primitive_bitwidth // 8))
    return tl.multiple_of(address.to(tl.pointer_type(BITS)) + offset, (16, 16))


@triton.jit
def _push(ptrs, values, mask, BITS: tl.constexpr):
    """Write the bits of the values, but never EMPTY."""
    LAST: tl.constexpr = 2 ** (BITS.primitive_bitwidth - 1) - 1  # also a NaN
    bits = values.to(BITS, bitcast=True)
    tl.store(ptrs, tl.where(bits == _EMPTY, LAST, bits), mask=mask)


@triton.jit
def _take(ptrs, mask, DTYPE: tl.constexpr):
    """Wait until all elements at `ptrs` have arrived, return them, and leave them EMPTY. Volatile loads see what other
    GPUs write."""
    bits = tl.load(ptrs, mask=mask, other=0, volatile=True)
    while tl.min((bits != _EMPTY).to(tl.int32)) == 0:
        bits = tl.load(ptrs, mask=mask, other=0, volatile=True)
    tl.store(ptrs, tl.full(bits.shape, _EMPTY, bits.dtype), mask=mask)
    return bits.to(DTYPE, bitcast=True)


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
    SHARE: tl.constexpr,
    SHARE_PADDED: tl.constexpr,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    SIZE_PADDED: tl.constexpr,
    PROGRAMS: tl.constexpr,
    BITS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    ROUND_ONCE: tl.constexpr,
    LARGEST: tl.constexpr,
    ROUND: tl.constexpr,
    PDL: tl.constexpr,
):
    """SHARE: of a row's columns, those that a rank sums; all N in one shot. BITS: the integer type of x's element size.
    LARGEST: what a row's largest value becomes when it is quantized; 0: rows are not quantized.

    A tile has ranks by columns of their shares: [SIZE_PADDED, SHARE_PADDED]. In one shot, that of a whole row has but
    one rank."""
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    TWO_SHOTS: tl.constexpr = SHARE < N
    program = tl.program_id(0)
    rank = tl.arange(0, SIZE_PADDED)[:, None]
    others = (rank < SIZE) & (rank != RANK)
    column = tl.arange(0, SHARE_PADDED)[None, :]
    if TWO_SHOTS:  # the row's columns in the tile, and this rank's
        whole = rank * SHARE + column
        own = RANK * SHARE + column
    else:
        whole = column
        own = column
    whole_mask = (column < SHARE) & (whole < N)
    own_mask = (column < SHARE) & (own < N)
    # Nothing changes weights or addresses, so they are loaded before the wait.
    weight = tl.load(weight_ptr + whole, mask=whole_mask, other=0.0).to(tl.float32) + weight_offset
    address = tl.zeros([SIZE_PADDED, 1], tl.int64)
    for other in tl.static_range(SIZE):
        address = tl.where(rank == other, tl.load(addresses_ptr + other), address)
    own_address = tl.load(addresses_ptr + RANK)
    if PDL:
        tl.extra.cuda.gdc_wait()
    # A row is loaded before it is known where it goes, and the next one before it is needed.
    part = tl.load(x_ptr + tl.cast(program, tl.int64) * N + whole, mask=whole_mask & (program < num_rows), other=0.0)
    turn = tl.load(turns_ptr + program)
    sent = _regions(address, (rank - RANK + SIZE) % SIZE, turn, SIZE, BITS) + column
    received = _regions(own_address, (RANK - rank + SIZE) % SIZE, turn, SIZE, BITS) + column
    for row in range(program, num_rows, PROGRAMS):
        _push(sent + row // PROGRAMS * N, part, others & whole_mask, BITS)
        next_row = row + PROGRAMS
        next_mask = whole_mask & (next_row < num_rows)
        part = tl.load(x_ptr + tl.cast(next_row, tl.int64) * N + whole, mask=next_mask, other=0.0)
    tl.debug_barrier()  # all threads send before any waits
    for row in range(program, num_rows, PROGRAMS):
        place = row // PROGRAMS * N
        offset = tl.cast(row, tl.int64) * N
        x = tl.load(x_ptr + offset + own, mask=own_mask, other=0.0)
        if HAS_RESIDUAL:
            residual = tl.load(residual_ptr + offset + own, mask=own_mask, other=0.0).to(tl.float32)
        parts = tl.where(rank == RANK, x, _take(received + place, others & own_mask, DTYPE))
        rounded = tl.sum(parts.to(tl.float32), axis=0, keep_dims=True).to(DTYPE)
        if HAS_RESIDUAL:
            rounded = (rounded.to(tl.float32) + residual).to(DTYPE)
        if TWO_SHOTS:
            _push(sent + (place + SHARE), rounded, others & own_mask, BITS)
            tl.store(out_ptr + offset + own, rounded, mask=own_mask)
        else:
            _store(
                rounded, row, offset + whole, whole_mask, weight, eps, residual_ptr, out_ptr, quantized_ptr, scale_ptr,
                N, HAS_RESIDUAL, ROUND_ONCE, LARGEST, ROUND,
            )  # fmt: skip
    if TWO_SHOTS:
        tl.debug_barrier()  # threads read sums that others have stored
        for row in range(program, num_rows, PROGRAMS):
            offset = tl.cast(row, tl.int64) * N
            x = tl.load(out_ptr + offset + whole, mask=(rank == RANK) & whole_mask, other=0.0)
            taken = _take(received + (row // PROGRAMS * N + SHARE), others & whole_mask, DTYPE)
            _store(
                tl.where(rank == RANK, x, taken), row, offset + whole, whole_mask, weight, eps,
                residual_ptr, out_ptr, quantized_ptr, scale_ptr, N, HAS_RESIDUAL, ROUND_ONCE, LARGEST, ROUND,
            )  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    tl.store(turns_ptr + program, 1 - turn)


@triton.jit
def _store(
    rounded,
    row,
    offset,
    mask,
    weight,
    eps,
    residual_ptr,
    out_ptr,
    quantized_ptr,
    scale_ptr,
    N: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    ROUND_ONCE: tl.constexpr,
    LARGEST: tl.constexpr,
    ROUND: tl.constexpr,
):
    """Store a row that is summed, and normed. rounded: the tile of the row."""
    if HAS_RESIDUAL:
        tl.store(residual_ptr + offset, rounded, mask=mask)
    x = rounded.to(tl.float32)
    out = normed(x, tl.sum(x * x), weight, eps, N, ROUND_ONCE, rounded.dtype)
    tl.store(out_ptr + offset, out, mask=mask)
    if LARGEST:
        out = out.to(tl.float32)
        ptrs = quantized_ptr + offset
        store_quantized(out, largest_of(out, None), ptrs, scale_ptr + row, mask, row >= 0, LARGEST, ROUND)


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
    size = peers.size
    share = peers.share_bytes(n * x.itemsize) // x.itemsize
    tile = triton.next_power_of_2(size), triton.next_power_of_2(share)
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
        share,
        tile[1],
        peers.rank,
        size,
        tile[0],
        peers.num_programs,
        tl.int16 if x.itemsize == 2 else tl.int32,
        residual is not None,
        round_once,
        0 if quantized is None else LARGEST[quantized[0].dtype],
        quantized is not None and quantized[0].dtype == torch.int8,
        num_warps=max(1, min(16, tile[1] // (512 if share == n else 256))),
        **launch_options(x.device),
    )
    return out
