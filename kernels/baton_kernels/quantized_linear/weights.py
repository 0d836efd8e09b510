"""Quantized weights as the kernels read them, and the values that they stand for."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

LARGEST = {torch.float8_e4m3fn: 448, torch.int8: 127}
"""A row is scaled so that its largest magnitude becomes this value."""
PACKED_COLUMNS = 256
"""Columns within which 4-bit codes are packed, if a row has one scale."""


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """`(value - zero) * scale`, for [out_features, in_features] values.

    values: [out_features, in_features], float8_e4m3fn or int8; or [out_features, in_features / 2], uint8, codes from 0
        to 15 that `pack_halves` has packed.
    scale: [out_features / scale_rows, in_features / group]; one column if group is 0. fp32, or a 16-bit dtype.
    zero: [out_features, in_features / group], uint8 (4-bit codes) or int8; None: 8 for 4-bit codes, else 0.
    group: how many columns share a scale; 0: all. scale_rows: how many rows share a scale.
    """

    values: Tensor
    scale: Tensor
    zero: Tensor | None = None
    group: int = 0
    scale_rows: int = 1

    @property
    def four_bits(self) -> bool:
        return self.values.dtype == torch.uint8

    @property
    def out_features(self) -> int:
        return self.values.shape[0]

    @property
    def in_features(self) -> int:
        return self.values.shape[1] * (2 if self.four_bits else 1)

    @property
    def by_rows(self) -> bool:
        """Whether 8-bit values have one scale per row, so that their products with quantized rows can be summed before
        scaling."""
        return not (self.four_bits or self.group or self.scale_rows > 1 or self.zero is not None)

    @property
    def packed_columns(self) -> int:
        return packed_columns(self.in_features, self.group)


@dataclass(frozen=True, slots=True)
class FourBitWeight:
    """4-bit values in groups of 128 columns, in the order of `four_bits.arrange`.

    words: [out_features, in_features / 8], int32. Of every 256 columns, the first group's are the low halves of bytes,
        the second group's the high halves. Column 64h + 16j + 8q + 2t + p of a group, with digits h, q, p of 0 or 1
        and t, j of 0 to 3, is in byte 32t + 16h + 4j + 2p + q. So a lane, t, finds side by side what it holds of a
        matrix of 16 columns, j, and unpacking two words takes fewer shifts.
    scales: [in_features / 128, at least out_features], int32: 16 bits of scale, then 16 bits of zero point.
    scale_dtype: fp16 or bf16.
    """

    words: Tensor
    scales: Tensor
    scale_dtype: torch.dtype

    @property
    def out_features(self) -> int:
        return self.words.shape[0]

    @property
    def in_features(self) -> int:
        return 8 * self.words.shape[1]


def packed_columns(in_features: int, group: int) -> int:
    """Columns within which 4-bit codes are packed: two groups, so that a byte's halves belong to adjacent groups; or
    one group if their number is odd."""
    pair = 2 * group or PACKED_COLUMNS
    return pair if in_features % pair == 0 else group or in_features


def pack_halves(codes: Tensor, columns: int) -> Tensor:
    """Pack codes from 0 to 15, [out_features, in_features], into [out_features, in_features / 2], uint8. Within every
    `columns` columns, byte b has the code of column b in its low half and that of column `columns / 2 + b` in its high
    half."""
    low, high = codes.to(torch.uint8).reshape(codes.shape[0], -1, 2, columns // 2).unbind(2)
    return (low | high << 4).flatten(1).contiguous()


def unpack_halves(packed: Tensor, columns: int) -> Tensor:
    """The codes that `pack_halves` packed."""
    halves = packed.view(packed.shape[0], -1, columns // 2)
    return torch.cat([halves & 15, halves >> 4], dim=2).flatten(1)
