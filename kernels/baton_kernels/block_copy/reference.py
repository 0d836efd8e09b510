"""block_copy in plain torch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from baton_kernels.block_copy.words import as_words, word_bytes


def copy_blocks(pool: Tensor, sources: Tensor, destinations: Tensor) -> None:
    rows = as_words(pool.view(torch.uint8).view(pool.shape[0], -1))
    rows.index_copy_(0, destinations, rows.index_select(0, sources))


def gather_blocks(pool_bytes: Tensor, block_ids: Tensor, out: Tensor) -> None:
    width = word_bytes(pool_bytes, out)
    torch.index_select(as_words(pool_bytes, width), 0, block_ids, out=as_words(out, width))


def scatter_blocks(src: Tensor, pool_bytes: Tensor, block_ids: Tensor) -> None:
    width = word_bytes(pool_bytes, src)
    as_words(pool_bytes, width).index_copy_(0, block_ids, as_words(src, width))


class PoolMoves:
    def __init__(self, pool_bytes: Tensor) -> None:
        self._pool = pool_bytes

    def ready(
        self,
        gathers: bool,
        block_ids: Tensor,
        num_blocks: int,
        offset: int,
        piece_bytes: int,
        staging: Tensor,
        stream: Any,
    ) -> Callable[[], None]:
        columns = self._pool[:, offset : offset + piece_bytes]
        rows = staging[: num_blocks * piece_bytes].view(num_blocks, piece_bytes)
        if gathers:
            return partial(gather_blocks, columns, block_ids[:num_blocks], rows)
        return partial(scatter_blocks, rows, columns, block_ids[:num_blocks])
