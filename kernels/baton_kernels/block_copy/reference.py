"""block_copy in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor


def copy_blocks(pool: Tensor, sources: Tensor, destinations: Tensor) -> None:
    rows = _words(pool.view(torch.uint8).view(pool.shape[0], -1))
    rows.index_copy_(0, destinations, rows.index_select(0, sources))


def gather_blocks(pool_bytes: Tensor, block_ids: Tensor, out: Tensor) -> None:
    width = _word_bytes(pool_bytes, out)
    torch.index_select(_words(pool_bytes, width), 0, block_ids, out=_words(out, width))


def scatter_blocks(src: Tensor, pool_bytes: Tensor, block_ids: Tensor) -> None:
    width = _word_bytes(pool_bytes, src)
    _words(pool_bytes, width).index_copy_(0, block_ids, _words(src, width))


_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


def _word_bytes(*tensors: Tensor) -> int:
    """The widest element that all of them can be read as: indexing moves elements, so bytes alone take several times
    as long."""
    return next(w for w in _WORDS if all(t.shape[1] % w == 0 and t.data_ptr() % w == 0 for t in tensors))


def _words(rows: Tensor, width: int | None = None) -> Tensor:
    """[n, row_bytes] uint8 as [n, row_bytes / width], the same memory."""
    return rows.view(_WORDS[width or _word_bytes(rows)])
