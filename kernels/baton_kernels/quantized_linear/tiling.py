"""Chooses how a matmul with quantized weights is computed, by shapes alone, so that every call with the same shapes
runs the same kernel.

Timings are in microseconds on an H200 for Llama 3.1 8B's qkv, o, gate_up with its activation, and down, with weights
not in L2. bf16 takes 13.7, 10.0, 54.7, 28.2 for one row and 14.6, 10.9, 58.3, 30.9 for 32.
"""

from __future__ import annotations

import functools

from baton_kernels.linear.tiling import MAX_TILES, Tiling

WEIGHT_ONLY_ROWS = 8
"""Up to so many rows, quantizing x takes more time than it saves."""
MAX_GATED_ROWS = 128
"""Beyond so many rows, cuBLAS multiplies by gate and up faster, though the activation is a kernel of its own."""
MAX_ROWS = 256
ARRANGED_ROWS = 256
"""Up to so many rows, in blocks of 128, multiplying by 4-bit values takes less time than converting them first."""


@functools.lru_cache(maxsize=4096)
def choose(num_rows: int, out_features: int, in_features: int, gated: bool, depth: int) -> Tiling | None:
    """The tiling for 8-bit values; None: too many rows, or a width that the kernel cannot divide.

    depth: the most columns of a step, all of which must share a scale.

    Up to 8 rows: 9.6, 7.6, 30.1, 18.0. 32 rows, with x in fp8: 8.9, 7.6, 32.1, 18.4. 128 rows: 11.1, 8.5, 35.5, 21.7,
    where cuBLAS takes 13.9, 13.7, 34.4 without the activation, 36.7. 256 rows: 13, 10.4, and 29 for down, where cuBLAS
    takes 14, 13.7 and 36.9.
    """
    if num_rows > (MAX_GATED_ROWS if gated else MAX_ROWS) or depth & (depth - 1):
        return None
    rows = _padded(num_rows)
    tiles = -(-out_features // 64)
    if num_rows <= WEIGHT_ONLY_ROWS:
        if gated:
            tiling = Tiling(rows, out=128, depth=256, num_warps=8, num_stages=3)
        elif in_features >= 8192:
            tiling = Tiling(rows, out=64, depth=256, num_warps=4, num_stages=3, splits=_splits(tiles, 4))
        else:
            tiling = Tiling(rows, out=64, depth=128, num_warps=4, num_stages=4, splits=_splits(tiles, 4))
    elif rows <= 64:
        splits = 1 if tiles > 64 else 2 if rows == 64 else 4
        tiling = Tiling(rows, out=64, depth=256, num_warps=4, num_stages=4, splits=1 if gated else splits)
    elif rows == 256:  # as many programs as SMs
        if tiles <= 66:
            tiling = Tiling(128, out=64, depth=128, num_warps=4, num_stages=6)
        elif tiles <= 132:
            tiling = Tiling(128, out=128, depth=128, num_warps=8, num_stages=6)
        else:
            return None
    elif gated:
        tiling = Tiling(rows, out=64, depth=128, num_warps=4, num_stages=3)
    elif tiles <= 66 and in_features < 8192:
        tiling = Tiling(64, out=64, depth=256, num_warps=4, num_stages=4)
    else:
        tiling = Tiling(rows, out=64, depth=256, num_warps=4, num_stages=4, splits=1 if tiles > 64 else 2)
    return _of_depth(tiling, in_features, depth)


@functools.lru_cache(maxsize=4096)
def choose_four_bits(num_rows: int, out_features: int, in_features: int, gated: bool, depth: int) -> Tiling | None:
    """The tiling for 4-bit values, which are packed within `depth` columns; None: too many rows, or a width that the
    kernel cannot divide.

    8 rows: 10.6, 7.0, 30.4, 14.6. 32 rows: 14.2, 9.3, 43.7, 25.0. 128 rows: 26.9, 18.0, 85.0, 50.8.
    """
    if num_rows > 128 or not 32 <= depth <= 256 or depth & (depth - 1) or in_features % depth:
        return None
    rows = _padded(num_rows)
    tiles = -(-out_features // 64)
    if gated:
        if rows <= 32:
            return Tiling(rows, out=64, depth=depth, num_warps=4, num_stages=4)
        if rows == 64:
            return Tiling(rows, out=128, depth=depth, num_warps=8, num_stages=3)
        return Tiling(rows, out=64, depth=min(depth, 128), num_warps=4, num_stages=3)
    if rows <= 8:
        return Tiling(rows, out=64, depth=depth, num_warps=4, num_stages=3, splits=_splits(tiles, 8))
    if rows <= 32:
        splits = 2 if tiles > 64 else 4
        stages = 3 if tiles > 64 else 4
        return Tiling(rows, out=64, depth=depth, num_warps=4, num_stages=stages, splits=_splits(tiles, splits))
    splits = 1 if rows == 128 and tiles > 64 else 4 if tiles <= 64 and rows == 64 else 2
    return Tiling(rows, out=64, depth=depth, num_warps=4, num_stages=3, splits=_splits(tiles, splits))


def _of_depth(tiling: Tiling, in_features: int, depth: int) -> Tiling | None:
    """The tiling with steps of at most `depth` columns that divide the width; None: there is none."""
    step = min(tiling.depth, depth or tiling.depth)
    while step >= 32 and (in_features % step or (depth and depth % step)):
        step //= 2
    if step < 32:
        return None
    return Tiling(tiling.rows, tiling.out, step, tiling.num_warps, tiling.num_stages, splits=tiling.splits)


def _splits(tiles: int, wanted: int) -> int:
    """How many programs split the columns of a tile: `wanted`, or 1 if there are enough tiles."""
    return wanted if tiles <= min(128, MAX_TILES) else 1


def _padded(num_rows: int) -> int:
    """The next power of two, and at least 8, which is the least N of the tensor cores."""
    return max(8, 1 << (num_rows - 1).bit_length())
