"""apply_token_masks: the reference against bits that numpy unpacks, and the kernel against the reference."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from baton_kernels.token_mask import apply_token_masks, reference

torch.set_num_threads(1)

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 100, 4096])
def test_reference_is_what_the_bits_say(vocab_size: int) -> None:
    draw = np.random.default_rng(vocab_size)
    masks = draw.integers(-(2**31), 2**31, (3, -(-vocab_size // 32)), np.int32)
    logits = torch.from_numpy(draw.standard_normal((5, vocab_size), np.float32))
    expected = logits.clone()
    allowed = np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little")[:, :vocab_size].astype(bool)
    for row, kept in zip((4, 0, 2), allowed, strict=True):
        expected[row, torch.from_numpy(~kept)] = -torch.inf
    apply_token_masks(logits, torch.tensor([4, 0, 2]), torch.from_numpy(masks))
    assert torch.equal(logits, expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("vocab_size", [1, 32, 100, 2049, 4100])
def test_kernel(vocab_size: int, device: str) -> None:
    from baton_kernels.token_mask import kernel

    draw = np.random.default_rng(vocab_size)
    words = draw.integers(-(2**31), 2**31, (3, -(-vocab_size // 32)), np.int32)
    masks, rows = torch.from_numpy(words).to(device), torch.tensor([2, 0, 4], device=device)
    logits = torch.from_numpy(draw.standard_normal((5, vocab_size), np.float32)).to(device)
    expected = logits.clone()
    reference.apply_token_masks(expected, rows, masks)
    kernel.apply_token_masks(logits, rows, masks)
    kernel.apply_token_masks(logits, rows[:0], masks[:0])
    assert torch.equal(logits, expected)
