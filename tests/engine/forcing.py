"""A matcher of the model's own tokens."""

from __future__ import annotations

import random
from collections.abc import Iterable

from engine.sequence import Sequence
from tests.protocol.fake_model import next_token


class Forcing:
    """A matcher that leaves no alternative, now and then, to what the model says anyway."""

    ready, error, finished = True, None, False

    def __init__(self, seq: Sequence, draw: random.Random, tokens: Iterable[int]) -> None:
        self.seq, self.random, self.tokens = seq, draw, list(tokens)

    def accept(self, token: int) -> None:
        self.tokens.append(token)

    def forced(self) -> list[int]:
        tokens = [*self.seq.prompt_tokens, *self.tokens]
        for _ in range(self.random.choice([0, 0, 1, 2, 6])):
            tokens.append(next_token(tokens, self.seq.sampling.seed))
        return tokens[len(self.seq.prompt_tokens) + len(self.tokens) :]

    def fork(self, tokens: Iterable[int] = ()) -> Forcing:
        return Forcing(self.seq, self.random, [*self.tokens, *tokens])

    def fill(self, mask: object) -> None:
        raise AssertionError("the model asks nobody")
