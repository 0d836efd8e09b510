"""apply_token_masks as a Triton kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 2048  # logits per program


@triton.jit(do_not_specialize_on_alignment=["rows_ptr", "masks_ptr"])
def _token_mask_kernel(logits_ptr, rows_ptr, masks_ptr, vocab_size, num_words, TILE: tl.constexpr):
    mask_row = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + mask_row)
    token = tl.program_id(1) * TILE + tl.arange(0, TILE)
    exists = token < vocab_size
    word = tl.load(masks_ptr + mask_row * num_words + token // 32, mask=exists, other=0)
    forbidden = ((word >> (token % 32)) & 1) == 0
    tl.store(logits_ptr + row * vocab_size + token, float("-inf"), mask=exists & forbidden)


def apply_token_masks(logits: Tensor, rows: Tensor, masks: Tensor) -> None:
    vocab_size = logits.shape[1]
    if rows.shape[0]:
        grid = (rows.shape[0], triton.cdiv(vocab_size, TILE))
        with torch.cuda.device_of(logits):
            _token_mask_kernel[grid](logits, rows, masks, vocab_size, masks.shape[1], TILE, num_warps=4)
