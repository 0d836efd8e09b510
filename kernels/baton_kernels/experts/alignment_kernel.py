"""Sorts choices by expert into blocks of rows, as vLLM's `moe_align_block_size` does, without the host: sizes are those
of the worst case, and a counter on the device says how many blocks there are.

There is one program per expert. Each counts all choices, so that it knows where its own begin; programs share nothing,
and nothing depends on the order in which they run. Many choices are first counted in segments, and then each program
places the choices of one expert in one segment.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, disallow-untyped-calls=False
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton_kernels.experts.tiling import ALIGN_AT_ONCE, FEW_CHOICES, max_blocks
from baton_kernels.pdl import launch_options

SEGMENT = 8192
CHUNK = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """Which choices are computed together: blocks of `rows` choices of one expert, at most `most` of them.

    order: [most * rows] int32, choices stably sorted by expert; an expert's last block is filled up with the number of
        choices. expert_of: [most] int32, each block's expert. count: [1] int32, how many blocks there are; entries
        after them are not written. All three None: nothing is sorted, and kernels find a block's rows through `ids`,
        [num_tokens, top_k], and `slot_mapping`, [num_tokens] (None: there is no padding).
    """

    rows: int
    most: int
    ids: Tensor
    slot_mapping: Tensor | None = None
    order: Tensor | None = None
    expert_of: Tensor | None = None
    count: Tensor | None = None

    @property
    def is_sorted(self) -> bool:
        return self.order is not None

    @property
    def has_padding(self) -> bool:
        """Whether kernels have to look for padding; sorted choices contain none."""
        return not self.is_sorted and self.slot_mapping is not None

    @property
    def num_rows(self) -> int:
        """The rows that the first product writes, in the order of the blocks; or of the choices, if nothing is
        sorted."""
        return (self.ids if self.order is None else self.order).numel()

    @property
    def arguments(self) -> tuple[Tensor, Tensor, Tensor]:
        """A kernel's arguments: order, expert_of and count; if nothing is sorted, ids, slot mapping and a tensor that
        is not read."""
        if self.order is None or self.expert_of is None or self.count is None:
            return self.ids, self.ids if self.slot_mapping is None else self.slot_mapping, self.ids
        return self.order, self.expert_of, self.count


@triton.jit
def _load_experts(
    ids_ptr, slot_mapping_ptr, choice, end, TOP_K: tl.constexpr, NUM_EXPERTS: tl.constexpr, HAS_PADDING: tl.constexpr
):
    """The experts of the choices; NUM_EXPERTS beyond the end, for padding, and for choices of no expert."""
    mask = choice < end
    expert = tl.load(ids_ptr + choice, mask=mask, other=NUM_EXPERTS).to(tl.int32)
    if HAS_PADDING:
        slot = tl.load(slot_mapping_ptr + choice // TOP_K, mask=mask, other=0)
        expert = tl.where(slot <= 0, NUM_EXPERTS, expert)
    return tl.minimum(expert, NUM_EXPERTS)


@triton.jit(do_not_specialize=["num_choices"])
def _count_kernel(
    ids_ptr,
    slot_mapping_ptr,
    counts_ptr,
    num_choices,
    TOP_K: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS: tl.constexpr,
    SEGMENT: tl.constexpr,
    CHUNK: tl.constexpr,
    HAS_PADDING: tl.constexpr,
    PDL: tl.constexpr,
):
    """counts: [segments, EXPERTS]."""
    segment = tl.program_id(0)
    if PDL:
        tl.extra.cuda.gdc_wait()
    end = tl.minimum(num_choices, (segment + 1) * SEGMENT)
    counts = tl.zeros([EXPERTS], tl.int32)
    for begin in range(segment * SEGMENT, end, CHUNK):
        choice = begin + tl.arange(0, CHUNK)
        expert = _load_experts(ids_ptr, slot_mapping_ptr, choice, end, TOP_K, NUM_EXPERTS, HAS_PADDING)
        counts += tl.histogram(expert, EXPERTS)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    tl.store(counts_ptr + segment * EXPERTS + tl.arange(0, EXPERTS), counts)


@triton.jit(do_not_specialize=["num_choices", "num_segments"])
def _place_kernel(
    ids_ptr,
    slot_mapping_ptr,
    counts_ptr,
    order_ptr,
    expert_of_ptr,
    count_ptr,
    num_choices,
    num_segments,
    TOP_K: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS: tl.constexpr,
    ROWS: tl.constexpr,
    SEGMENT: tl.constexpr,
    CHUNK: tl.constexpr,
    COUNTED: tl.constexpr,
    HAS_PADDING: tl.constexpr,
    PDL: tl.constexpr,
):
    """COUNTED: `_count_kernel` ran; else there is one segment."""
    own = tl.program_id(0)
    segment = tl.program_id(1)
    lane = tl.arange(0, EXPERTS)
    if PDL:
        tl.extra.cuda.gdc_wait()
    end = tl.minimum(num_choices, (segment + 1) * SEGMENT) if COUNTED else num_choices
    first = segment * SEGMENT if COUNTED else 0
    counts = tl.zeros([EXPERTS], tl.int32)
    seen = 0
    if COUNTED:
        for other in range(num_segments):
            counted = tl.load(counts_ptr + other * EXPERTS + lane)
            counts += counted
            seen += tl.where(other < segment, tl.sum(tl.where(lane == own, counted, 0), 0), 0)
    else:
        for begin in range(0, num_choices, CHUNK):
            choice = begin + tl.arange(0, CHUNK)
            expert = _load_experts(ids_ptr, slot_mapping_ptr, choice, end, TOP_K, NUM_EXPERTS, HAS_PADDING)
            counts += tl.histogram(expert, EXPERTS)
    blocks = tl.where(lane < NUM_EXPERTS, (counts + ROWS - 1) // ROWS, 0)
    first_block = tl.sum(tl.where(lane < own, blocks, 0), 0)
    num_blocks = tl.sum(tl.where(lane == own, blocks, 0), 0)
    base = order_ptr + first_block * ROWS
    for begin in range(first, end, CHUNK):
        choice = begin + tl.arange(0, CHUNK)
        expert = _load_experts(ids_ptr, slot_mapping_ptr, choice, end, TOP_K, NUM_EXPERTS, HAS_PADDING)
        hit = expert == own
        rank = seen + tl.cumsum(hit.to(tl.int32), 0) - 1
        tl.store(base + rank, choice, mask=hit)
        seen += tl.sum(hit.to(tl.int32), 0)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    if segment == 0:
        total = tl.sum(tl.where(lane == own, counts, 0), 0)
        place = total + tl.arange(0, ROWS)
        tl.store(base + place, tl.full([ROWS], 0, tl.int32) + num_choices, mask=place < num_blocks * ROWS)
        for begin in range(0, num_blocks, 32):
            block = begin + tl.arange(0, 32)
            tl.store(expert_of_ptr + first_block + block, tl.full([32], 0, tl.int32) + own, mask=block < num_blocks)
        if own == 0:
            tl.store(count_ptr, tl.sum(blocks, 0))


def align(ids: Tensor, slot_mapping: Tensor | None, num_experts: int, rows: int) -> Blocks:
    """Sort choices by expert. ids: [num_tokens, top_k], contiguous; choices of `num_experts` or above, and those of
    tokens whose slot is not positive, are left out. slot_mapping: [num_tokens], or None."""
    num_choices, device = ids.numel(), ids.device
    most = max_blocks(num_choices, num_experts, rows)
    order = torch.empty(most * rows, dtype=torch.int32, device=device)
    expert_of = torch.empty(most, dtype=torch.int32, device=device)
    count = torch.empty(1, dtype=torch.int32, device=device)
    experts = triton.next_power_of_2(num_experts + 1)
    common = (ids.shape[1], num_experts, experts)
    counted = num_choices > ALIGN_AT_ONCE
    segments = triton.cdiv(num_choices, SEGMENT) if counted else 1
    counts, options = count, launch_options(device)
    read = (ids, ids if slot_mapping is None else slot_mapping)
    if counted:
        counts = torch.empty((segments, experts), dtype=torch.int32, device=device)
        _count_kernel[(segments,)](
            *read, counts, num_choices, *common, SEGMENT, CHUNK, slot_mapping is not None, num_warps=8, **options
        )
    chunk = CHUNK if num_choices > FEW_CHOICES else FEW_CHOICES
    _place_kernel[(num_experts, segments)](
        *read, counts, order, expert_of, count, num_choices, segments, *common, rows, SEGMENT, chunk, counted,
        slot_mapping is not None, num_warps=4, **options,
    )  # fmt: skip
    return Blocks(
        rows=rows, most=most, ids=ids, slot_mapping=slot_mapping, order=order, expert_of=expert_of, count=count
    )


def blocks_by_token(ids: Tensor, slot_mapping: Tensor | None, num_experts: int, rows: int) -> Blocks:
    """One block per expert with one row per token, without sorting: there are at most `rows` tokens, and a token
    chooses an expert at most once."""
    assert ids.shape[0] <= rows
    return Blocks(rows=rows, most=num_experts, ids=ids, slot_mapping=slot_mapping)
