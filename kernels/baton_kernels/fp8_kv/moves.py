"""Moves that quantize blocks on their way out of an unquantized pool, and dequantize them on their way in."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from baton_kernels.fp8_kv import dequantize, elements_of, head_bytes, quantize


class QuantizingMoves:
    """Like `block_copy.PoolMoves`, but each head's piece is quantized in staging: it is what a quantized pool would
    hold for the same keys and values. Callable from any thread.

    pool_bytes: [num_rows, row_bytes], uint8: rows of a pool of `dtype`, each one or more pieces [block_size, head_dim].
    An offset and a number of bytes are the pool's, and multiples of a piece's. Tensors and streams as for PoolMoves.
    """

    def __init__(self, pool_bytes: Tensor, dtype: torch.dtype, block_size: int, head_dim: int) -> None:
        self._rows = pool_bytes.view(dtype)
        self._block_size = block_size
        self._head_dim = head_dim
        self._piece_bytes = block_size * head_dim * dtype.itemsize
        assert pool_bytes.shape[1] % self._piece_bytes == 0

    def gather(
        self, row_ids: Tensor, num_rows: int, offset: int, num_bytes: int, staging: Tensor, stream: Any
    ) -> Callable[[], None]:
        return partial(self._move, True, *self._ends(row_ids, num_rows, offset, num_bytes, staging), stream)

    def scatter(
        self, row_ids: Tensor, num_rows: int, offset: int, num_bytes: int, staging: Tensor, stream: Any
    ) -> Callable[[], None]:
        """row_ids: unique."""
        return partial(self._move, False, *self._ends(row_ids, num_rows, offset, num_bytes, staging), stream)

    def _ends(
        self, row_ids: Tensor, num_rows: int, offset: int, num_bytes: int, staging: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The two ends of a move: the ids; columns of the pool, [pool rows, num_heads * block_size * head_dim]; and
        staging as [num_rows, num_heads, head_bytes], uint8."""
        assert offset % self._piece_bytes == num_bytes % self._piece_bytes == 0
        num_heads, itemsize = num_bytes // self._piece_bytes, self._rows.element_size()
        columns = self._rows[:, offset // itemsize : (offset + num_bytes) // itemsize]
        size = head_bytes(self._block_size, self._head_dim)
        heads = staging[: num_rows * num_heads * size].view(num_rows, num_heads, size)
        return row_ids[:num_rows], columns, heads

    def _move(self, gathers: bool, row_ids: Tensor, columns: Tensor, heads: Tensor, stream: Any) -> None:
        if columns.is_cuda:
            from baton_kernels.fp8_kv import move_kernel

            with torch.cuda.device(columns.device), torch.cuda.stream(stream):
                move_kernel.move(gathers, row_ids, columns, heads, self._block_size, self._head_dim)
        elif gathers:
            whole = columns.index_select(0, row_ids).view(*heads.shape[:2], self._block_size, self._head_dim)
            elements, scales = quantize(whole)
            torch.cat((elements.view(torch.uint8).flatten(2), scales), dim=2, out=heads)
        else:
            elements = elements_of(heads, self._block_size, self._head_dim)
            whole = dequantize(elements, heads[..., self._block_size * self._head_dim :], columns.dtype)
            columns.index_copy_(0, row_ids, whole.flatten(1))
