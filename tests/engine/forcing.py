"""A matcher of the model's own tokens."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from tests.protocol.fake_model import next_token


@dataclass
class Compiling:
    """What another thread compiles, for all matchers of it. `ends`: asked as often as it is: whether it is done now.
    `fails`: it will never be."""

    is_done: bool = False
    ends: Callable[[], bool] = lambda: False
    fails: bool = False

    def finish(self) -> None:
        self.is_done = True

    def ask(self) -> bool:
        self.is_done = self.is_done or self.ends()
        return self.is_done


@dataclass
class Forcing:
    """A matcher that leaves no alternative, now and then, to what the model says anyway. `seed`: of the sample; None:
    it forces nothing. `tokens`: the output that it has accepted. `finishes_at`, `fails_at`: after so many tokens; None:
    never. `compiling`: until that is done, it is not ready."""

    random: random.Random
    prompt: tuple[int, ...]
    seed: int | None
    tokens: list[int] = field(default_factory=list)
    finishes_at: int | None = None
    fails_at: int | None = None
    compiling: Compiling = field(default_factory=lambda: Compiling(is_done=True))

    @property
    def ready(self) -> bool:
        return self.compiling.ask() and not self.compiling.fails

    @property
    def finished(self) -> bool:
        return self.finishes_at is not None and len(self.tokens) >= self.finishes_at

    @property
    def error(self) -> str | None:
        if self.compiling.is_done and self.compiling.fails:
            return "not to be compiled"
        return "no more" if self.fails_at is not None and len(self.tokens) >= self.fails_at else None

    def accept(self, token: int) -> None:
        assert self.ready
        assert not self.finished
        assert self.error is None
        self.tokens.append(token)

    def forced(self) -> list[int]:
        if self.finished or self.error or self.seed is None:
            return []
        tokens = [*self.prompt, *self.tokens]
        for _ in range(self.random.choice([0, 0, 1, 2, 6])):
            tokens.append(next_token(tokens, self.seed))
        forced = tokens[len(self.prompt) + len(self.tokens) :]
        left = [end - len(self.tokens) for end in (self.finishes_at, self.fails_at) if end is not None]
        return forced[: min(left, default=None)]

    def fork(self, tokens: Iterable[int] = ()) -> Forcing:
        return replace(self, tokens=[*self.tokens, *tokens])

    def fill(self, mask: object) -> None:
        raise AssertionError("the model asks nobody")
