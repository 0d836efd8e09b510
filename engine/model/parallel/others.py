"""The ranks besides the one that decides, as it sees them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from engine.model.rank_step import RankStep


class OtherRanks(Protocol):
    """Each call is passed on to all other ranks, which make it on their RankModel; this one makes it itself, too. None
    waits for them, except for room for the message."""

    def compute(self, step: RankStep) -> None: ...

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None: ...

    def warm_up(self) -> None: ...

    def capture(self, decode_sizes: Sequence[int], most_prompt_tokens: int) -> None: ...


class NoOthers:
    """Of a node of one rank."""

    def compute(self, step: RankStep) -> None:
        """Nothing to do."""

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        """Nothing to do."""

    def warm_up(self) -> None:
        """Nothing to do."""

    def capture(self, decode_sizes: Sequence[int], most_prompt_tokens: int) -> None:
        """Nothing to do."""


NO_OTHERS = NoOthers()
