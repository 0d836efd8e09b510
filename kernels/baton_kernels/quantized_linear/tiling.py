"""Chooses how a matmul with quantized weights is computed, by shapes alone, so that every call of a shape runs the same
kernel.

Timings are in microseconds on an H200 for Llama 3.1 8B's qkv, o, gate_up with its activation, and down; weights not in
L2. bf16 takes 13.7, 10.0, 54.7, 28.2 for one row and 14.6, 10.9, 58.3, 30.9 for 32.
"""

from __future__ import annotations

import functools

from baton_kernels.linear.tiling import MAX_TILES, Tiling

WEIGHT_ONLY_ROWS = 8
"""Up to so many rows, quantizing x takes more time than it saves."""
MAX_ROWS = 128


@functools.lru_cache(maxsize=4096)
def choose(num_rows: int, out_features: int, in_features: int, gated: bool, depth: int) -> Tiling | None:
    """The tiling for values of 8 bits; None: too many rows, or a width that the kernel cannot divide.

    depth: the most columns of a step, which all have the same scale.

    Up to 8 rows: 9.6, 7.6, 30.1, 18.0. 32, with x in fp8: 8.9, 7.6, 32.1, 18.4. 128: 13.7, 10.7, 36.8, 25.2, where
    cuBLAS takes 14.0, 13.7, 34.1 without the activation, 36.3.
    """
    if num_rows > MAX_ROWS:
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
    elif gated:
        tiling = Tiling(rows, out=128, depth=128, num_warps=8, num_stages=4)
    elif tiles > 64:
        tiling = Tiling(rows, out=64, depth=128, num_warps=4, num_stages=4)
    else:
        tiling = Tiling(rows, out=64, depth=256, num_warps=4, num_stages=3, splits=2)
    return _of_depth(tiling, in_features, depth)


@functools.lru_cache(maxsize=4096)
def choose_four_bits(num_rows: int, out_features: int, in_features: int, gated: bool, depth: int) -> Tiling | None:
    """The tiling for 4-bit values, which are packed within `depth` columns.

    Up to 8 rows: 8.2, 6.8, 26.3, 13.4. 32: 12.4, 8.7, 39.8, 20.6. 128: 25.9, 17.2, 94.7, 47.7.
    """
    if num_rows > MAX_ROWS or not 32 <= depth <= 256 or depth & (depth - 1) or in_features % depth:
        return None
    rows = _padded(num_rows)
    tiles = -(-out_features // 64)
    if gated:
        if rows <= 32:
            return Tiling(rows, out=64, depth=depth, num_warps=4, num_stages=4)
        return Tiling(rows, out=128, depth=depth, num_warps=8, num_stages=3 if rows == 64 else 2)
    if rows <= 8:
        return Tiling(rows, out=64, depth=depth, num_warps=4, num_stages=3, splits=_splits(tiles, 8))
    if rows <= 32:
        splits = 2 if tiles > 64 else 4
        stages = 3 if tiles > 64 else 4
        return Tiling(rows, out=64, depth=depth, num_warps=4, num_stages=stages, splits=_splits(tiles, splits))
    splits = 1 if rows == 128 and tiles > 64 else 4 if in_features >= 8192 and rows == 64 else 2
    return Tiling(rows, out=64, depth=depth, num_warps=4, num_stages=3, splits=_splits(tiles, splits))


def _of_depth(tiling: Tiling, in_features: int, depth: int) -> Tiling | None:
    """The tiling with steps of at most `depth` columns that divide the width."""
    step = min(tiling.depth, depth or tiling.depth)
    while step >= 32 and (in_features % step or (depth and depth % step)):
        step //= 2
    if step < 32:
        return None
    return Tiling(tiling.rows, tiling.out, step, tiling.num_warps, tiling.num_stages, splits=tiling.splits)


def _splits(tiles: int, wanted: int) -> int:
    """One, where there are programs enough."""
    return wanted if tiles <= min(128, MAX_TILES) else 1


def _padded(num_rows: int) -> int:
    """The tensor cores' N dimension has at least 8."""
    return max(8, 1 << (num_rows - 1).bit_length())
