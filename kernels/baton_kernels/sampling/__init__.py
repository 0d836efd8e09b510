"""Chooses one token from each row of logits: the most likely one, or a draw that is a function of the row's seed and
position alone."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from baton_kernels.sampling import reference
from baton_kernels.sampling.reference import IN_PROMPT

__all__ = ["IN_PROMPT", "TOKENS_PER_WORD", "DrawParams", "apply_token_bitmask", "penalize", "sample"]

TOKENS_PER_WORD = 32
"""Of a bitmask of tokens."""


@dataclass(frozen=True, slots=True)
class DrawParams:
    """One value per choice, all [num_choices] on the device of the logits, contiguous.

    temperature fp32, 0: the most likely token, whatever the rest says. top_k int64, 0: off. top_p fp32 in (0, 1].
    min_p fp32 in [0, 1]. seed int64, the bits of an unsigned 64-bit number. position int64, of the token to be drawn
    in its sequence.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seed: Tensor
    position: Tensor


def sample(logits: Tensor, rows: Tensor, params: DrawParams | None, *, filtered: bool) -> Tensor:
    """Tokens [num_choices], int32: choice i from row `rows[i]` of the logits. Does not wait for the device.

    logits: [num_rows, vocab_size], fp32, bf16 or fp16, rows contiguous; computed with as fp32. -inf forbids a token.
    rows: [num_choices], int64. params: None when all take the most likely token. filtered: whether any has top_k,
    top_p or min_p; without it they are ignored.

    The most likely token is the lowest of those that tie. A draw is from softmax(logits / temperature), as filtered:
    in vLLM's order min_p, top_k, top_p, each to what the one before left; tokens that tie with the last one kept stay
    too. Each choice is independent of the others, and of the device up to rounding: of fp32 logarithms, which decide
    between tokens whose noisy scores all but tie; and of the sums of probabilities, 1e-5 of top_p at its boundary.
    """
    assert logits.ndim == 2
    assert logits.stride(1) == 1
    assert rows.ndim == 1
    assert params is None or all(getattr(params, name).shape == rows.shape for name in DrawParams.__slots__)
    if logits.is_cuda:
        from baton_kernels.sampling import kernel

        return kernel.sample(logits, rows, params, filtered)
    return reference.sample(logits, rows, params, filtered)


def penalize(
    logits: Tensor, counts: Tensor, rows: Tensor, repetition: Tensor, frequency: Tensor, presence: Tensor
) -> None:
    """Penalise, in place, the tokens that row `rows[i]` of the counts says sequence i has had already.

    logits: [num_choices, vocab_size], fp32, contiguous. counts: [num_rows, vocab_size], int32, contiguous: how often
    the output has the token, plus IN_PROMPT. rows: [num_choices], int64. repetition, frequency, presence:
    [num_choices], fp32, 1, 0 and 0 being none; repetition also counts the prompt. The formulas are vLLM's.
    """
    assert logits.shape == (rows.shape[0], counts.shape[1])
    assert logits.dtype == torch.float32
    assert counts.dtype == torch.int32
    assert logits.is_contiguous()
    assert counts.is_contiguous()
    if logits.is_cuda:
        from baton_kernels.sampling import kernel

        kernel.penalize(logits, counts, rows, repetition, frequency, presence)
    else:
        reference.penalize(logits, counts, rows, repetition, frequency, presence)


def apply_token_bitmask(logits: Tensor, bitmask: Tensor, rows: Tensor) -> None:
    """Forbid, in place, the tokens whose bits are 0 in row `rows[i]` of the bitmask: their logits become -inf.

    logits: [num_choices, vocab_size], fp32, contiguous. bitmask: [num_rows, words], int32, contiguous, of at least
    ceil(vocab_size / 32) words: bit t % 32 of word t // 32 is token t's, as xgrammar and vLLM have it. rows:
    [num_choices], int64; -1: all tokens are allowed.
    """
    assert rows.shape == logits.shape[:1]
    assert logits.dtype == torch.float32
    assert bitmask.dtype == torch.int32
    assert bitmask.shape[1] * TOKENS_PER_WORD >= logits.shape[1]
    assert logits.is_contiguous()
    assert bitmask.is_contiguous()
    if logits.is_cuda:
        from baton_kernels.sampling import kernel

        kernel.apply_token_bitmask(logits, bitmask, rows)
    else:
        reference.apply_token_bitmask(logits, bitmask, rows)
