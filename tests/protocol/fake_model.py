"""A model without arithmetic whose KV can be read back: a wrong, stale or misplaced block is seen at once.

The KV of a token is the pair (position, token). Computing a chunk first checks that the blocks hold exactly the KV of
all earlier positions, then writes its own. The next token is a hash of the whole context and the seed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch

from baton.layout import KvLayout
from baton.sampling import FinishReason, SamplingParams
from engine.step import Choice, Chunk

VOCAB_SIZE = 97
EOS = 1


def next_token(tokens: Sequence[int], seed: int, min_tokens_left: bool = False) -> int:
    digest = hashlib.sha256(repr((list(tokens), seed)).encode()).digest()
    token = digest[0] % VOCAB_SIZE
    return 2 if token == EOS and min_tokens_left else token


def expected_output(
    prompt: Sequence[int], sampling: SamplingParams, sample: int, max_model_len: int
) -> tuple[list[int], FinishReason]:
    """What an undisturbed run of one sample gives."""
    tokens = list(prompt)
    while True:
        tokens.append(next_token(tokens, sampling.seed + sample))
        output = tokens[len(prompt) :]
        if tokens[-1] == EOS and not sampling.ignore_eos:
            return output, FinishReason.STOP
        if len(output) >= sampling.max_tokens or len(tokens) >= max_model_len:
            return output, FinishReason.LENGTH


class FakeModel:
    """Implements `engine.step.ModelRunner` over a pool of `[num_blocks, block_size]` int64."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.pool = torch.full((num_blocks, block_size), -1, dtype=torch.int64)
        self.block_size = block_size
        block_bytes = block_size * 8
        self.layout = KvLayout(1, 1, 1, 1, block_size, "int64", 0, 1, block_bytes, "fake")

    @property
    def pool_bytes(self) -> torch.Tensor:
        """[num_blocks, block_bytes], uint8: the same memory."""
        return self.pool.view(torch.uint8)

    def run(self, chunks: Sequence[Chunk]) -> list[list[Choice]]:
        for chunk in chunks:
            seq = chunk.sequence
            want = torch.tensor([self._kv(p, t) for p, t in enumerate(seq.tokens[: chunk.start])], dtype=torch.int64)
            have = self._slots(seq.block_table, chunk.start)
            assert torch.equal(have, want), f"{seq.work}: KV of a position is not what it should be"
            for position in range(chunk.start, chunk.end):
                block = seq.block_table[position // self.block_size]
                self.pool[block, position % self.block_size] = self._kv(position, seq.tokens[position])
        return [self._choices(chunk) if chunk.samples_token else [] for chunk in chunks]

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        for source, target in pairs:
            self.pool[target] = self.pool[source]

    @staticmethod
    def _kv(position: int, token: int) -> int:
        return position * 1000 + token

    def _slots(self, table: list[int], num_tokens: int) -> torch.Tensor:
        return self.pool[torch.tensor(table, dtype=torch.int64)].flatten()[:num_tokens]

    def _choices(self, chunk: Chunk) -> list[Choice]:
        seq = chunk.sequence
        return [Choice(next_token(seq.tokens, seq.sampling.seed + sample)) for sample in seq.samples]
