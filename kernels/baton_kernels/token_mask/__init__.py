"""Forbids tokens by bitmasks: constrained decoding leaves only the tokens that a grammar accepts."""

from __future__ import annotations

import torch
from torch import Tensor

from baton_kernels.token_mask import reference

BITS = 32
"""Tokens in a word of a mask."""


def apply_token_masks(logits: Tensor, rows: Tensor, masks: Tensor) -> None:
    """Set logits to -inf, in place, for the tokens whose bits are 0: those of row `rows[i]` by mask i.

    logits: [num_rows, vocab_size], fp32, contiguous. rows: [num_masks], int64, each row at most once. masks:
    [num_masks, ceil(vocab_size / 32)], int32, contiguous; bit b of word w stands for token 32 w + b.
    """
    assert logits.dtype == torch.float32
    assert logits.is_contiguous()
    assert masks.dtype == torch.int32
    assert masks.is_contiguous()
    assert masks.shape == (rows.shape[0], -(-logits.shape[1] // BITS))
    if logits.is_cuda:
        from baton_kernels.token_mask import kernel

        kernel.apply_token_masks(logits, rows, masks)
    else:
        reference.apply_token_masks(logits, rows, masks)
