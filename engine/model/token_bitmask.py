"""Makes the masks of `baton_kernels.token_mask.apply_token_masks` on the host."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
from numpy.typing import NDArray

from baton_kernels.token_mask import BITS


def num_words(vocab_size: int) -> int:
    """How many int32 words a row has."""
    return -(-vocab_size // BITS)


def pack_bitmask(tokens: Collection[int], vocab_size: int) -> NDArray[np.int32]:
    """A row with the bits of these tokens set; ids beyond the vocabulary are ignored."""
    allowed = np.zeros(num_words(vocab_size) * BITS, np.bool_)
    known = np.fromiter(tokens, np.int64, len(tokens))
    allowed[known[known < vocab_size]] = True
    return np.packbits(allowed, bitorder="little").view("<i4").astype(np.int32)
