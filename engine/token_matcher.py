"""The interface of constraints on a sequence's output: a matcher follows the tokens, and says which may come next."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class TokenMatcher(Protocol):
    """The state of one sample's output in what it must match. The state depends on the output's tokens alone, so that
    any node can rebuild it. Engine's thread only.

    It may be compiled on another thread, which may end at any time; until it is `ready`, its sequence is in no step.
    Once `error` is set, the request must end: no token can follow.
    """

    @property
    def ready(self) -> bool:
        """Whether it was compiled: never, if that has failed."""

    @property
    def error(self) -> str | None:
        """Why no token can follow: it could not be compiled, or a limit was reached."""

    @property
    def finished(self) -> bool:
        """Whether the output is complete: nothing but EOS may follow."""

    def accept(self, token: int) -> None:
        """Advance by the next token of the output."""

    def forced(self) -> list[int]:
        """Tokens that must come next, in order: at each of them, the mask would allow only that token. They follow the
        token accepted last, as far as they were known from the mask before it."""

    def fork(self, tokens: Seq[int] = ()) -> TokenMatcher:
        """Another matcher in the same state, which then accepts these tokens."""

    def fill(self, mask: NDArray[np.int32]) -> None:
        """Write the tokens that may come next. mask: [ceil(vocab_size / 32)], zeros; bit b of word w stands for token
        32 w + b. `ready` must hold."""
