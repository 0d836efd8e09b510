"""`best_of`: of the answers to a prompt, the client gets the likeliest ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from router.generation import Generation
from router.http.responses import WholeShape
from router.text.answer import Delta


def likeliest(answers: Sequence[Delta], num_drawn: int, num_kept: int) -> list[Delta]:
    """Of every `num_drawn` answers, those to one prompt, the `num_kept` with the highest mean logprob of a token, as
    OpenAI defines `best_of`; the likeliest first. The answers are numbered anew. Each needs its tokens' logprobs."""
    kept: list[Delta] = []
    for start in range(0, len(answers), num_drawn):
        group = answers[start : start + num_drawn]
        kept += sorted(group, key=_mean_logprob, reverse=True)[:num_kept]
    return [answer._replace(index=index) for index, answer in enumerate(kept)]


def _mean_logprob(answer: Delta) -> float:
    return sum(token.logprob for token in answer.logprobs) / max(1, len(answer.logprobs))


@dataclass(frozen=True, slots=True)
class BestOfShape:
    """`shape` of the likeliest answers alone."""

    shape: WholeShape
    num_drawn: int
    num_kept: int

    def whole(self, generation: Generation, answers: Sequence[Delta]) -> dict[str, Any]:
        return self.shape.whole(generation, likeliest(answers, self.num_drawn, self.num_kept))
