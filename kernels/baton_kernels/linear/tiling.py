"""Chooses the kernel of a matmul by shapes alone, so that every call with the same shapes runs the same one.

Timings are in microseconds on an H200 (132 SMs) with weights not in L2, cuBLAS's first: "15.3 to 13.6" is cuBLAS, then
this kernel. For shapes that are not listed, cuBLAS is as fast or faster.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

MAX_ROWS = 128
KERNEL_ROWS = (1, 8, 16, 32, 64, 128, 2048)
"""Numbers of rows that together run every kernel for a weight: after calling `linear` with each of them at startup,
nothing is compiled later."""
MAX_TILES = 1024  # tiles of a matmul with split columns: the number of counters
SMALL = 1 << 20  # elements of a weight; for smaller ones there is little to gain


@dataclass(frozen=True, slots=True)
class RowTiling:
    """One row of x: a program handles `out` rows of the weight, in steps of `depth` columns."""

    out: int
    depth: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class Tiling:
    """Few rows of x: a program multiplies `rows` of them, usually all, by `out` rows of the weight.

    depth: columns per step, split among `slices` groups of warps.
    splits: programs that split the columns; the last to finish sums their parts.
    """

    rows: int
    out: int
    depth: int
    num_warps: int
    num_stages: int
    slices: int = 1
    splits: int = 1


@dataclass(frozen=True, slots=True)
class WideTiling:
    """Many rows of a gated matmul: a program's tile is [rows, out] of gate and of up; tiles are ordered in bands
    `group` tiles high."""

    rows: int
    out: int
    depth: int
    group: int
    num_warps: int
    num_stages: int


AnyTiling = RowTiling | Tiling | WideTiling


@functools.lru_cache(maxsize=4096)
def choose(num_rows: int, out_features: int, in_features: int, gated: bool, num_sms: int) -> AnyTiling | None:
    """The kernel for [num_rows, in_features] @ [out_features, in_features].T; None means cuBLAS.

    gated: `out_features` counts the rows of both gate and up, and the kernel includes the activation.
    """
    if not gated and _is_router(num_rows, out_features, in_features):
        return Tiling(_padded(num_rows), out=16, depth=128, num_warps=4, num_stages=3, splits=8)
    if out_features * in_features < SMALL or in_features % (64 if in_features > 2048 and not gated else 256):
        return None
    if num_rows == 1:
        return _one_row(out_features, in_features, gated)
    if num_rows > MAX_ROWS:
        return _wide(num_rows, out_features, num_sms) if gated else None
    if gated:
        return _gated(num_rows, out_features, num_sms)
    return _few_rows(num_rows, out_features, in_features, num_sms)


def _is_router(num_rows: int, out_features: int, in_features: int) -> bool:
    """The choice of experts for a decode step. Of 128 features and 2048 columns, with the norm before it and the choice
    after it: 8.2 to 6.1 for 32 rows, 8.4 to 6.9 for 64, no gain for 128."""
    return 16 < num_rows <= 64 and 64 <= out_features <= 256 and in_features % 1024 == 0 and in_features <= 4096


def _one_row(out_features: int, in_features: int, gated: bool) -> RowTiling:
    """qkv 15.3 to 13.6, o 12.6 to 9.7, gate_up with its activation 59.7 to 54.5, down 30.5 to 27.9. Of 2048 features
    and 4096 columns 9.9 to 6.9, of 5120 and 2880 11.3 to 9.8, of 201088 and 2880 269 to 254."""
    if in_features % 512:
        return RowTiling(out=16, depth=256, num_warps=4, num_stages=4)
    if gated:
        return RowTiling(out=4, depth=512, num_warps=2, num_stages=6)
    if out_features <= 3072:
        return RowTiling(out=4, depth=512, num_warps=2, num_stages=4)
    return RowTiling(out=8, depth=512, num_warps=4, num_stages=3)


def _gated(num_rows: int, out_features: int, num_sms: int) -> Tiling | None:
    """With the activation: 57.3 to 55.7 for 8 rows, 59.3 to 57.4 for 32, 63.1 to 60.1 for 64, 68.9 to 64.6 for 128.

    A program's stages fill most of an SM's shared memory, so the last wave of programs must be nearly full: with 37888
    features and large tiles, 64 rows took 85.5, against 74.4 with cuBLAS.
    """
    rows = _padded(num_rows)
    fill_64, fill_128 = (_fill(out_features // 2, tile, num_sms) for tile in (64, 128))
    if num_rows <= 8 and fill_64 < 0.8:
        return Tiling(rows, out=32, depth=128, num_warps=2, num_stages=5)
    if num_rows <= 32 and fill_64 > 0.74:
        return Tiling(max(16, rows), out=64, depth=128, num_warps=4, num_stages=4)
    if fill_128 > (0.7 if num_rows <= 32 else 0.8):
        return Tiling(rows, out=128, depth=64, num_warps=8, num_stages=4)
    if num_rows > 32 and fill_64 > 0.8:
        return Tiling(rows, out=64, depth=64, num_warps=4, num_stages=5)
    return None


def _wide(num_rows: int, out_features: int, num_sms: int) -> WideTiling | None:
    """Pays where power limits consecutive matmuls: 64 prompts of 2048 at once, 41900 to 42700 tokens/s; one of 32768,
    1248 to 1230 ms. Otherwise as fast as cuBLAS, except that cuBLAS is faster by an eighth at 1536 rows, by 3% at 256.
    """
    tiles = -(-num_rows // 128) * -(-out_features // 256)
    if num_rows < 1024 or tiles / (-(-tiles // num_sms) * num_sms) < 0.95:
        return None
    return WideTiling(rows=128, out=128, depth=64, group=8 if num_rows < 4096 else 16, num_warps=8, num_stages=3)


def _few_rows(num_rows: int, out_features: int, in_features: int, num_sms: int) -> Tiling | None:
    """Up to 8 rows: qkv 16.7 to 15.3, o 12.6 to 10.1, down 31.0 to 28.6. 32: 15.8 to 14.6, 13.1 to 11.3, 32.2 to 30.6;
    64: down 35.3 to 32.4. lm_head 241 to 234 for 8 rows, 255 to 245 for 32, 271 to 254 for 64. Of 5120 features and
    2880 columns 11.6 to 10.6 for 8 rows, 12.0 to 11.6 for 32."""
    rows = _padded(num_rows)
    if num_rows <= 8 and out_features <= 8192:
        # Small tiles, so that many programs fit on each SM: each slice of the columns has its own warp.
        if out_features > 32 * num_sms:
            return Tiling(rows, out=16, depth=256, num_warps=2, num_stages=4, slices=2)
        return Tiling(rows, out=16, depth=256, num_warps=4, num_stages=5, slices=4)
    if 16 < num_rows <= 64 and out_features >= 16384:
        return Tiling(rows, out=128, depth=64, num_warps=8, num_stages=6)
    if num_rows <= 32 or (num_rows <= 64 and in_features >= 8192 and out_features < 16384):
        splits = max(1, min(8, num_sms // -(-out_features // 64)))
        if splits > 1:
            rows = max(32, rows)  # 16 rows, padded to 32: 11.5 to 11.1 (o), 31.3 to 30.3 (down)
        return Tiling(rows, out=64, depth=128, num_warps=4, num_stages=5, splits=splits)
    return None


def _fill(features: int, tile: int, num_sms: int) -> float:
    """The busy fraction of all waves of programs, with one program per SM."""
    tiles = -(-features // tile)
    return tiles / (-(-tiles // num_sms) * num_sms)


def _padded(num_rows: int) -> int:
    return max(8, 1 << (num_rows - 1).bit_length())
