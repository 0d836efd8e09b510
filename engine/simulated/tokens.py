"""The tokens of a model without weights: each is a function of the prompt and of its own place in the answer.

So an answer that continues on another node, or is computed again, is the same, and a test can predict every token.
"""

from __future__ import annotations

import array
import math
import zlib
from collections.abc import Iterator
from collections.abc import Sequence as Seq

from baton.messages import TokenLogprobs
from baton.prompt_logprobs import PromptLogprobs, most_piece_tokens
from engine.sequence import Sequence
from engine.step import Choice, Chunk

_STRIDE = 2654435761  # Knuth's multiplicative hash
_LN2 = math.log(2)


class MadeUpTokens:
    """Makes up tokens, never one of `never`, such as EOS: answers end at max_tokens or at the end of the context.

    The n-th most likely token has the probability 2**-n, and the first is always chosen: no sampling parameter changes
    that. The samples of a request get different tokens.
    """

    def __init__(self, vocab_size: int, never: tuple[int, ...] = ()) -> None:
        self._said = [token for token in range(vocab_size) if token not in never]
        self._prompts: dict[Sequence, int] = {}  # sequence -> checksum of its prompt

    def forget(self, sequence: Sequence) -> None:
        self._prompts.pop(sequence, None)

    def token(self, sequence: Sequence, sample: int, index: int, rank: int = 0) -> int:
        """Token `index` of the answer; `rank` counts from the most likely one."""
        if (prompt := self._prompts.get(sequence)) is None:
            prompt = self._prompts[sequence] = checksum(sequence.prompt_tokens)
        place = (prompt ^ (index * _STRIDE) ^ (sample * 40503)) * _STRIDE >> 7
        return self._said[(place + rank) % len(self._said)]

    def choices(self, chunk: Chunk) -> list[Choice]:
        """The token that follows the chunk's last one, for each sample. Empty if the chunk has no logits."""
        if not chunk.num_logits:
            return []
        seq = chunk.sequence
        index, num_top = chunk.end - len(seq.prompt_tokens), seq.sampling.num_logprobs
        return [
            Choice(self.token(seq, sample, index), self._logprobs(seq, sample, index, num_top))
            for sample in seq.samples
        ]

    def _logprobs(self, seq: Sequence, sample: int, index: int, num_top: int) -> TokenLogprobs | None:
        if num_top < 0:
            return None
        ranks = range(min(num_top, len(self._said)))
        top = tuple((self.token(seq, sample, index, rank), -_LN2 * (rank + 1)) for rank in ranks)
        return TokenLogprobs(-_LN2, top)

    def prompt_logprobs(self, chunk: Chunk) -> Iterator[PromptLogprobs]:
        """Logprobs of the tokens after the chunk's scored positions, in pieces: each token is the most likely, with
        probability 1/2."""
        num_top = min(chunk.sequence.num_prompt_logprobs or 0, len(self._said))
        scored, most = chunk.scored_positions, most_piece_tokens(num_top)
        for start in range(scored.start, scored.stop, most):
            yield self._piece(chunk.sequence, range(start, min(start + most, scored.stop)), num_top)

    def _piece(self, seq: Sequence, scored: range, num_top: int) -> PromptLogprobs:
        top_ids, top = array.array("I"), array.array("f")
        for position in scored:
            own = seq.prompt_tokens[position + 1]
            others = [
                token for token in (self.token(seq, 0, position, rank) for rank in range(num_top + 1)) if token != own
            ]
            top_ids.extend([own, *others][:num_top])
            top.extend(-_LN2 * (rank + 1) for rank in range(num_top))
        own_logprobs = array.array("f", [-_LN2] * len(scored)).tobytes()
        ranks = array.array("I", [1] * len(scored)).tobytes()
        return PromptLogprobs(scored.start + 1, num_top, own_logprobs, ranks, top_ids.tobytes(), top.tobytes())


def checksum(tokens: Seq[int]) -> int:
    return zlib.crc32(array.array("I", tokens))
