"""What a step's time depends on."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from engine.step import Chunk


@dataclass(frozen=True, slots=True)
class StepSize:
    """num_seqs: its sequences; a decode counts once for each of its tokens. num_context_tokens: the context of all
    decodes. num_prompt_tokens: of all other chunks. num_prompt_pairs: summed over these chunks, the number of tokens
    times the number of tokens that the last one attends to."""

    num_seqs: int
    num_context_tokens: int
    num_prompt_tokens: int = 0
    num_prompt_pairs: int = 0

    @classmethod
    def of(cls, chunks: Iterable[Chunk]) -> StepSize:
        num_seqs = num_context_tokens = num_prompt_tokens = num_prompt_pairs = 0
        for chunk in chunks:
            if chunk.is_decode:
                num_seqs += chunk.length
                num_context_tokens += chunk.end
            else:
                num_seqs += 1
                num_prompt_tokens += chunk.length
                num_prompt_pairs += chunk.length * chunk.end
        return cls(num_seqs, num_context_tokens, num_prompt_tokens, num_prompt_pairs)

    @property
    def has_prompts(self) -> bool:
        return self.num_prompt_tokens > 0

    def least_share(self, other: StepSize) -> float:
        """A lower bound of this step's time as a share of the other's, whatever each of these numbers costs: a step's
        time is a constant plus a multiple of each number, none of them negative."""
        return min(1.0, *(a / b for a, b in zip(self._numbers, other._numbers, strict=True) if b))

    @property
    def _numbers(self) -> tuple[int, ...]:
        """Like `dataclasses.astuple`, which would take 15 us, ten times a turn."""
        return self.num_seqs, self.num_context_tokens, self.num_prompt_tokens, self.num_prompt_pairs


EMPTY = StepSize(0, 0)
