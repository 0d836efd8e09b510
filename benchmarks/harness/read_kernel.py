"""A Triton kernel that only reads, to measure a GPU's peak memory bandwidth. Imported only if there is a GPU."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def read_kernel(source, sums, BLOCK: tl.constexpr, NUM_BLOCKS: tl.constexpr):  # type: ignore[no-untyped-def] # noqa: N803
    """Each program sums `NUM_BLOCKS * BLOCK` consecutive int32 of `source` into its own int64 of `sums`, modulo 2^32.

    The blocks are unrolled, so that all their loads are in flight at once.
    """
    program = tl.program_id(0).to(tl.int64)
    offsets = program * (NUM_BLOCKS * BLOCK) + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], dtype=tl.int32)
    for i in tl.static_range(NUM_BLOCKS):
        total += tl.load(source + offsets + i * BLOCK)
    tl.store(sums + program, tl.sum(total.to(tl.int64), axis=0))
