"""Draws one token from each row of logits, as a function of the row's seed and position alone."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from baton_kernels.sampling import reference


@dataclass(frozen=True, slots=True)
class DrawParams:
    """One value per row, all [num_rows] on the device of the logits.

    temperature fp32, above 0. top_k int64, 0: off. top_p fp32 in (0, 1]. min_p fp32 in [0, 1]. seed int64, the bits of
    an unsigned 64-bit number. position int64, of the token to be drawn in its sequence.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seed: Tensor
    position: Tensor


def sample(logits: Tensor, params: DrawParams, *, num_ordered: int) -> Tensor:
    """Tokens [num_rows], int64, one drawn from softmax(logits / temperature) of each row, as filtered.

    logits: [num_rows, vocab_size], fp32; -inf forbids a token. The filters apply in vLLM's order: min_p, top_k, top_p,
    each to what the one before left; tokens that tie with the last one kept stay too. Independent of the other rows,
    and of the device up to the rounding of fp32 logarithms.

    num_ordered: how many of a row's largest logits the filters must see in order, which is most of their cost: 0 when
    no row has top_k or top_p, the largest top_k when every row with top_p has one, else vocab_size.
    """
    assert logits.ndim == 2
    assert all(getattr(params, name).shape == logits.shape[:1] for name in DrawParams.__slots__)
    return reference.sample(logits, params, num_ordered)
