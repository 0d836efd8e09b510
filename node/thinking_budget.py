"""Ends reasoning that has had its tokens: the logits processor of `thinking_token_budget`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

_MOST_BEFORE = 4
"""Tokens, of blanks, that may come before the mark with which an answer begins to reason."""


class ThinkingBudget:
    """Chooses the first of `ends` as soon as there are `budget` tokens of reasoning without any of these.

    The reasoning begins behind the tokens `opening`, near the answer's begin, or with the answer if it `begins_open`.
    The tokens alone decide, as other nodes may have chosen the first of them.
    """

    def __init__(self, budget: int, ends: Sequence[int], opening: Sequence[int], begins_open: bool) -> None:
        self._budget = budget
        self._end = ends[0]
        self._ends = frozenset(ends)
        self._opening = list(opening)
        self._begins_open = begins_open

    def __call__(self, output_token_ids: list[int], logits: Any) -> Any:
        """logits: [vocab_size], which is changed in place."""
        begin = self._begin(output_token_ids)
        if begin is None or len(output_token_ids) - begin < self._budget:
            return logits
        if self._ends.isdisjoint(output_token_ids[begin:]):
            logits.fill_(-math.inf)
            logits[self._end] = 0.0
        return logits

    def _begin(self, output: list[int]) -> int | None:
        size = len(self._opening)
        behind = (at + size for at in range(_MOST_BEFORE + 1) if output[at : at + size] == self._opening)
        return next(behind, 0 if self._begins_open else None)
