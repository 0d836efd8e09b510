"""Logprobs of a prompt's tokens, in pieces: packed, because a long prompt has a million numbers."""

from __future__ import annotations

import array
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

NUMBER_BYTES = 4
MAX_PIECE_TOKENS = 1024
MAX_PIECE_LOGPROBS = 21 * MAX_PIECE_TOKENS
"""Bounds a piece, and so a message: 172 KB. A single token may have more, as many as the vocabulary."""

_SWAP = sys.byteorder == "big"


def most_piece_tokens(num_top: int) -> int:
    """The most tokens of a piece with so many alternatives each."""
    return max(1, min(MAX_PIECE_TOKENS, MAX_PIECE_LOGPROBS // (1 + num_top)))


class PromptTokenLogprob(NamedTuple):
    """`rank`: 1 for the most likely token at its place. `top`: the most likely tokens with their logprobs, best
    first."""

    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Of the prompt's tokens from `first_index` on; token 0 has none, because nothing is before it.

    All numbers are little-endian and have 4 bytes. For each token: `logprobs` (float) and `ranks` (unsigned), its own;
    `top_token_ids` (unsigned) and `top_logprobs` (float), `num_top` each, best first.
    """

    first_index: int
    num_top: int
    logprobs: bytes
    ranks: bytes
    top_token_ids: bytes = b""
    top_logprobs: bytes = b""

    @property
    def num_tokens(self) -> int:
        return len(self.logprobs) // NUMBER_BYTES

    @property
    def num_bytes(self) -> int:
        return 2 * len(self.logprobs) * (1 + self.num_top)

    @property
    def end_index(self) -> int:
        return self.first_index + self.num_tokens

    def without_first(self, count: int) -> PromptLogprobs:
        """Without its first `count` tokens."""
        if not count:
            return self
        own, top = count * NUMBER_BYTES, count * NUMBER_BYTES * self.num_top
        return PromptLogprobs(
            self.first_index + count,
            self.num_top,
            self.logprobs[own:],
            self.ranks[own:],
            self.top_token_ids[top:],
            self.top_logprobs[top:],
        )

    def __iter__(self) -> Iterator[PromptTokenLogprob]:
        ids, values = unpack_ids(self.top_token_ids), unpack_floats(self.top_logprobs)
        own = zip(unpack_floats(self.logprobs), unpack_ids(self.ranks), strict=True)
        for i, (logprob, rank) in enumerate(own):
            top = slice(i * self.num_top, (i + 1) * self.num_top)
            yield PromptTokenLogprob(logprob, rank, tuple(zip(ids[top], values[top], strict=True)))


def unpack_ids(data: bytes) -> array.array[int]:
    """Little-endian uint32."""
    ids = array.array("I", data)
    if _SWAP:
        ids.byteswap()
    return ids


def unpack_floats(data: bytes) -> array.array[float]:
    """Little-endian fp32."""
    floats = array.array("f", data)
    if _SWAP:
        floats.byteswap()
    return floats
