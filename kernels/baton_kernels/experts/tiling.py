"""Chooses the kernels of an expert layer by shapes alone, so that every call with the same shapes runs the same ones.

The number of rows per expert decides. With few, reading the chosen experts' weights takes the time; with many, the
tensor cores do.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

ROW_TOKENS = 2
"""Up to so many tokens, nearly all choices are of different experts, and each is a matrix-vector product."""
BY_TOKEN_TOKENS = 16
"""Up to so many tokens, nothing is sorted: each expert's programs look for the tokens that chose it."""
ALIGN_AT_ONCE = 4096
"""Up to so many choices, each program counts all of them alone."""
FEW_CHOICES = 256
"""Up to so many choices, a program counts all of them at once."""


@dataclass(frozen=True, slots=True)
class RowTiling:
    """One row of x: a program handles `out` features (of gate and of up), in steps of `depth` columns."""

    out: int
    depth: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class Tiling:
    """A block of `rows` rows of one expert: a program handles `out` features (of gate and of up) of it, in steps of
    `depth` columns. group: how many blocks' tiles are computed side by side, so that they share their reads in L2; 0:
    all."""

    rows: int
    out: int
    depth: int
    num_warps: int
    num_stages: int
    group: int = 0


@dataclass(frozen=True, slots=True)
class Tilings:
    """early: programs of the second product begin where the last ones of the first leave room, find their rows, and
    wait there. It pays where each kernel has many more programs than fit at once: a layer of Qwen3-30B-A3B then takes
    126.3 us instead of 128.5 for 8 tokens, 302.1 instead of 304.2 for 128. Bringing their weights into L2 meanwhile
    made it slower, by 7 us for 32 tokens and 12 for 64."""

    gate_up: Tiling
    down: Tiling
    early: bool = False


@dataclass(frozen=True, slots=True)
class RowTilings:
    gate_up: RowTiling
    down: RowTiling


ROW = RowTilings(RowTiling(8, 128, 2, 5), RowTiling(8, 128, 2, 5))
ROW_FOUR_BITS = RowTilings(RowTiling(8, 256, 2, 4), RowTiling(8, 256, 2, 4))
"""Like `ROW`, for 4-bit weights; not tuned."""
FEW = Tilings(Tiling(16, 32, 128, 2, 4), Tiling(16, 128, 128, 4, 3), early=True)
"""For 16-bit weights where nothing is sorted. For 4, 8 and 16 tokens of Qwen3-30B-A3B, gate and up take 48.3, 76.9 and
122.1 us, and down takes 26.3, 41.6 and 64.8; with tiles of 64 features, 48.3, 77.6 and 122.1, and 27.9, 41.5 and
65.2."""
CLASSES: tuple[tuple[float, Tilings], ...] = (
    (8, Tilings(Tiling(16, 64, 128, 4, 3, 8), Tiling(16, 128, 128, 4, 3, 8), early=True)),
    (24, Tilings(Tiling(32, 64, 64, 4, 3, 8), Tiling(32, 128, 64, 4, 5, 8))),
    (48, Tilings(Tiling(64, 64, 64, 4, 3, 8), Tiling(64, 128, 64, 4, 4, 8))),
    (160, Tilings(Tiling(128, 64, 64, 4, 3, 8), Tiling(128, 128, 64, 4, 3, 8))),
    (float("inf"), Tilings(Tiling(128, 128, 64, 8, 4, 8), Tiling(128, 256, 64, 8, 4, 8))),
)
"""(most rows per expert, tilings): the best that `benchmarks.layers.experts_tune` found on an H200 for layers of
Qwen3-30B-A3B and gpt-oss-20b. In groups of 8, the programs of blocks that do not exist come last, not in between: a
layer of Qwen3-30B-A3B takes 283.1 us instead of 286.2 for 128 tokens, and 299.4 instead of 303.4 for 256."""


@functools.lru_cache(maxsize=4096)
def choose(
    num_tokens: int, top_k: int, num_experts: int, itemsize: float = 2, in_blocks: bool = False
) -> RowTilings | Tilings:
    """The tilings for these shapes. itemsize: bytes per element of a weight, 0.5 for 4 bits; the table is for 2.
    in_blocks: each step's product has its own scale, and so briefly needs registers besides those of the sums."""
    if num_tokens <= ROW_TOKENS:
        return ROW_FOUR_BITS if itemsize < 1 else ROW
    if num_tokens <= BY_TOKEN_TOKENS and itemsize == 2:
        return FEW
    mean = num_tokens * top_k / num_experts
    tilings = next(tilings for most, tilings in CLASSES if mean <= most)
    gate_up, down = (_for_size(tiling, itemsize) for tiling in (tilings.gate_up, tilings.down))
    if in_blocks and gate_up.rows == 128:
        gate_up, down = replace(gate_up, out=gate_up.out // 2), replace(down, out=down.out // 2)
    return replace(tilings, gate_up=gate_up, down=down)


def _for_size(tiling: Tiling, itemsize: float) -> Tiling:
    """The tiling with as many bytes per step, and no more shared memory than an SM has. With 4 bits, tiles of many rows
    keep their depth, because they also need room as 16 bits before they are multiplied."""
    if itemsize < 1:
        return replace(tiling, depth=128) if tiling.rows <= 16 else tiling
    if itemsize == 4:
        return replace(tiling, depth=tiling.depth // 2, num_stages=min(3, tiling.num_stages))
    return replace(tiling, depth=min(128, 2 * tiling.depth)) if itemsize == 1 else tiling


ARRANGED_ROWS = ((4, 8), (14, 16), (24, 32), (80, 64), (float("inf"), 128))
"""(most rows per expert, rows of a block) for arranged MXFP4 weights."""


def arranged_rows(num_tokens: int, top_k: int, num_experts: int) -> int:
    """The rows of a block for arranged weights. A block for few tokens has room for all of them."""
    if num_tokens <= BY_TOKEN_TOKENS:
        return 8 if num_tokens <= ROW_TOKENS else max(8, 1 << (num_tokens - 1).bit_length())
    return next(rows for most, rows in ARRANGED_ROWS if num_tokens * top_k / num_experts <= most)


@functools.cache
def kernel_tokens(top_k: int, num_experts: int) -> tuple[int, ...]:
    """Token counts that together run every kernel for such a layer: after calling `experts` with each of them at
    startup, nothing is compiled later."""
    ends = {ROW_TOKENS, BY_TOKEN_TOKENS, FEW_CHOICES // top_k, ALIGN_AT_ONCE // top_k}
    ends |= {int(most * num_experts / top_k) for most, _ in (*CLASSES[:-1], *ARRANGED_ROWS[:-1])}
    return tuple(sorted({1, *(end for end in ends if end), *(end + 1 for end in ends)}))


def max_blocks(num_choices: int, num_experts: int, rows: int) -> int:
    """The most blocks that so many choices can need."""
    hit = min(num_choices, num_experts)
    return hit + (num_choices - hit) // rows
