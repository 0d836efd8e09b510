"""The smallest logit that each row's top_k, top_p and min_p keep, without sorting the row.

top_k and top_p both ask for the largest value t such that enough lies at or above t: top_k tokens, or a probability of
top_p. The search narrows a range of integers: float bits, mapped so that the integers sort like the floats. Each pass
over the row sums the weight above four pivots at once, the first ones at likely distances from the largest logit. Once
few candidates are left, they are copied to scratch memory, which later passes read instead of the row. One program
handles a row, as each pass depends on the last.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, disallow-untyped-calls=False

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from baton_kernels.sampling import DrawParams

_TILE = 2048
_COPY_TILE = 4096
_CAPACITY = 4096  # tokens of scratch memory per row


@triton.jit
def _order(x, SHIFT: tl.constexpr):
    """Map fp32 to int32, preserving order. SHIFT: how many low bits are 0 in every x, and are dropped."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)  # -0.0 + 0.0 is 0.0
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits) >> SHIFT


@triton.jit
def _round_up(order, SHIFT: tl.constexpr):
    """The shifted order of the smallest representable value that is not below an fp32 with this unshifted order."""
    return tl.where(order < 0, order >> SHIFT, -((-order) >> SHIFT))  # negative values have low bits of all ones here


@triton.jit
def _value(order, SHIFT: tl.constexpr):
    """The inverse of `_order`."""
    bits = order.to(tl.int32) << SHIFT
    return tl.where(bits < 0, (bits | ((1 << SHIFT) - 1)) ^ 0x7FFFFFFF, bits).to(tl.float32, bitcast=True)


@triton.jit
def _load(x_ptr, tokens, n):
    return tl.load(x_ptr + tokens, mask=tokens < n, other=float("-inf")).to(tl.float32)


@triton.jit
def _largest(x_ptr, n, TILE: tl.constexpr):
    largest = tl.full([TILE], float("-inf"), tl.float32)
    for start in range(0, n, TILE):
        largest = tl.maximum(largest, _load(x_ptr, start + tl.arange(0, TILE), n))
    return tl.max(largest, axis=0)


@triton.jit
def _total(x_ptr, n, low, largest, temperature, SHIFT: tl.constexpr, TILE: tl.constexpr):
    """How many of x[:n] are at or above `low`, and the sum of their probabilities relative to the largest one."""
    count, mass = tl.zeros([TILE], tl.int32), tl.zeros([TILE], tl.float32)
    for start in range(0, n, TILE):
        tokens = start + tl.arange(0, TILE)
        x = _load(x_ptr, tokens, n)
        kept = (_order(x, SHIFT) >= low) & (tokens < n)
        count += kept.to(tl.int32)
        mass += tl.where(kept, tl.exp((x - largest) / temperature), 0.0)
    return tl.sum(count, axis=0), tl.sum(mass, axis=0)


@triton.jit
def _move(low, high, num_low, num_high, pivot, count, weight, target):
    """Update `_narrow`'s range by one pivot. count, weight: [TILE], to be summed."""
    num = tl.sum(count, axis=0)
    enough = tl.sum(weight, axis=0) >= target
    low, num_low = tl.where(enough, pivot, low), tl.where(enough, num, num_low)
    below = (pivot < high) & (not enough)
    return low, tl.where(below, pivot, high), num_low, tl.where(below, num, num_high)


@triton.jit
def _likely(largest, distance, low, high, SHIFT: tl.constexpr):
    return tl.minimum(tl.maximum(_order(largest - distance, SHIFT).to(tl.int64), low), high - 1)


@triton.jit
def _narrow(
    x_ptr, n, low, high, num_low, num_high, first, target, by_mass, largest, temperature, SHIFT: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Return (low, high, num_low, num_high) after a pass over x[:n].

    The weight at or above `low` is at least `target`, that at or above `high` is less; weight is a number of tokens or
    their probability. num_low, num_high: how many tokens these are.
    """
    span = high - low
    p, q, r, s = low + span // 5, low + span * 2 // 5, low + span * 3 // 5, low + span * 4 // 5
    if first:
        p = _likely(largest, temperature * 20.0, low, high, SHIFT)
        q = _likely(largest, temperature * 10.0, low, high, SHIFT)
        r = _likely(largest, temperature * 5.0, low, high, SHIFT)
        s = _likely(largest, temperature * 2.0, low, high, SHIFT)
    p_count, q_count = tl.zeros([TILE], tl.int32), tl.zeros([TILE], tl.int32)
    r_count, s_count = tl.zeros([TILE], tl.int32), tl.zeros([TILE], tl.int32)
    p_weight, q_weight = tl.zeros([TILE], tl.float32), tl.zeros([TILE], tl.float32)
    r_weight, s_weight = tl.zeros([TILE], tl.float32), tl.zeros([TILE], tl.float32)
    for start in range(0, n, TILE):
        tokens = start + tl.arange(0, TILE)
        x = _load(x_ptr, tokens, n)
        order = tl.where(tokens < n, _order(x, SHIFT), -0x80000000)  # below the order of any value
        weight = tl.where(by_mass, tl.exp((x - largest) / temperature), 1.0)
        above_p, above_q = order >= p.to(tl.int32), order >= q.to(tl.int32)
        above_r, above_s = order >= r.to(tl.int32), order >= s.to(tl.int32)
        p_count, p_weight = p_count + above_p.to(tl.int32), p_weight + tl.where(above_p, weight, 0.0)
        q_count, q_weight = q_count + above_q.to(tl.int32), q_weight + tl.where(above_q, weight, 0.0)
        r_count, r_weight = r_count + above_r.to(tl.int32), r_weight + tl.where(above_r, weight, 0.0)
        s_count, s_weight = s_count + above_s.to(tl.int32), s_weight + tl.where(above_s, weight, 0.0)
    low, high, num_low, num_high = _move(low, high, num_low, num_high, p, p_count, p_weight, target)
    low, high, num_low, num_high = _move(low, high, num_low, num_high, q, q_count, q_weight, target)
    low, high, num_low, num_high = _move(low, high, num_low, num_high, r, r_count, r_weight, target)
    return _move(low, high, num_low, num_high, s, s_count, s_weight, target)


@triton.jit
def _copy(x_ptr, n, low, out_ptr, SHIFT: tl.constexpr, TILE: tl.constexpr):
    """Write the elements of x[:n] that are at or above `low`, in their original order."""
    num_copied = 0
    for start in range(0, n, TILE):
        tokens = start + tl.arange(0, TILE)
        x = _load(x_ptr, tokens, n)
        kept = ((_order(x, SHIFT) >= low) & (tokens < n)).to(tl.int32)
        places = num_copied + tl.cumsum(kept, axis=0) - kept
        tl.store(out_ptr + places, x.to(out_ptr.dtype.element_ty), mask=kept > 0)
        num_copied += tl.sum(kept, axis=0)
    tl.debug_barrier()  # threads read what others have written


@triton.jit(
    do_not_specialize_on_alignment=["rows_ptr", "temperature_ptr", "top_k_ptr", "top_p_ptr", "min_p_ptr", "out_ptr"]
)
def _threshold_kernel(
    logits_ptr,
    rows_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    scratch_ptr,
    out_ptr,
    row_stride,
    vocab_size,
    SHIFT: tl.constexpr,
    TILE: tl.constexpr,
    COPY_TILE: tl.constexpr,
    CAPACITY: tl.constexpr,
):
    choice = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperature_ptr + choice)
    top_k = tl.load(top_k_ptr + choice).to(tl.int32)
    top_p, min_p = tl.load(top_p_ptr + choice), tl.load(min_p_ptr + choice)
    threshold = float("-inf")
    if (temperature > 0.0) & ((top_k > 0) | (top_p < 1.0) | (min_p > 0.0)):
        x_ptr = logits_ptr + tl.load(rows_ptr + choice).to(tl.int64) * row_stride
        copy_ptr = scratch_ptr + choice * CAPACITY
        num_copied = 0
        largest = _largest(x_ptr, vocab_size, COPY_TILE)
        floor = tl.where(min_p > 0.0, largest + temperature * tl.log(tl.maximum(min_p, 1e-30)), float("-inf"))
        low = _round_up(_order(floor, 0).to(tl.int64), SHIFT)
        for phase in range(2):  # top_k, then top_p on what is left
            by_mass = phase == 1
            if (by_mass & (top_p < 1.0)) | ((phase == 0) & (top_k > 0)):
                if num_copied > 0:
                    num_low, mass = _total(copy_ptr, num_copied, low, largest, temperature, SHIFT, TILE)
                else:
                    num_low, mass = _total(x_ptr, vocab_size, low, largest, temperature, SHIFT, TILE)
                # Of the tokens that tie with the last of top_k, only as many as complete top_k count.
                excess = tl.where(top_k > 0, tl.maximum(num_low - top_k, 0), 0)
                last = tl.where(excess > 0, _value(low, SHIFT), largest)
                mass -= excess.to(tl.float32) * tl.exp((last - largest) / temperature)
                target = tl.where(by_mass, top_p * mass, top_k.to(tl.float32))
                high = _order(largest, SHIFT).to(tl.int64) + 1
                high = tl.where(by_mass | (num_low > top_k), high, low)
                num_high = 0
                first = True
                # Stop when one token or one value is left between them: `low` then selects the same tokens anywhere.
                while (high - low > 1) & (num_low - num_high > 1):
                    if num_copied > 0:
                        low, high, num_low, num_high = _narrow(
                            copy_ptr, num_copied, low, high, num_low, num_high, first, target, by_mass,
                            largest, temperature, SHIFT, TILE,
                        )  # fmt: skip
                    else:
                        low, high, num_low, num_high = _narrow(
                            x_ptr, vocab_size, low, high, num_low, num_high, first, target, by_mass,
                            largest, temperature, SHIFT, TILE,
                        )  # fmt: skip
                        if num_low <= CAPACITY:
                            _copy(x_ptr, vocab_size, low, copy_ptr, SHIFT, COPY_TILE)
                            num_copied = num_low
                    first = False
        threshold = _value(low, SHIFT)
    tl.store(out_ptr + choice, threshold)


def thresholds(
    logits: Tensor, rows: Tensor, params: DrawParams, *, tile: int = _TILE, capacity: int = _CAPACITY
) -> Tensor:
    """[num_choices], fp32: the smallest logit that is kept in row `rows[i]`; -inf where nothing is filtered."""
    num_choices = rows.shape[0]
    out = torch.empty(num_choices, dtype=torch.float32, device=logits.device)
    scratch = torch.empty(num_choices, capacity, dtype=logits.dtype, device=logits.device)
    _threshold_kernel[(num_choices,)](
        logits,
        rows,
        params.temperature,
        params.top_k,
        params.top_p,
        params.min_p,
        scratch,
        out,
        logits.stride(0),
        logits.shape[1],
        {torch.bfloat16: 16, torch.float16: 13}.get(logits.dtype, 0),
        tile,
        _COPY_TILE,
        capacity,
        num_warps=16,
    )
    return out
