"""`best_of`: of the answers to a prompt, the client gets the likeliest ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from router.generation import Generation
from router.http.responses import Whole, WholeShape
from router.text.answer import Delta


def likeliest(answers: Sequence[Sequence[Delta]], num_drawn: int, num_kept: int) -> list[list[Delta]]:
    """Of every `num_drawn` answers, those to one prompt, the `num_kept` with the highest mean logprob of a token, as
    OpenAI defines `best_of`; the likeliest first. The answers are numbered anew. Each needs its tokens' logprobs."""
    kept: list[Sequence[Delta]] = []
    for start in range(0, len(answers), num_drawn):
        group = answers[start : start + num_drawn]
        kept += sorted(group, key=_mean_logprob, reverse=True)[:num_kept]
    return [[delta._replace(index=index) for delta in answer] for index, answer in enumerate(kept)]


def _mean_logprob(answer: Sequence[Delta]) -> float:
    logprobs = [token.logprob for delta in answer for token in delta.logprobs]
    return sum(logprobs) / max(1, len(logprobs))


@dataclass(frozen=True, slots=True)
class BestOfShape:
    """`shape` of the likeliest answers alone."""

    shape: WholeShape
    num_drawn: int
    num_kept: int

    @property
    def reads_pieces(self) -> bool:
        return self.shape.reads_pieces

    def whole(self, generation: Generation, answers: Sequence[Sequence[Delta]]) -> Whole:
        return self.shape.whole(generation, likeliest(answers, self.num_drawn, self.num_kept))
