"""What compiles grammars (`guidance_states`, `xgrammar_states`), and where an output stands in one."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from baton.structured_output.constraint import StructuredOutput

NO_TOKEN_LEFT = (
    "no token that may come next can be chosen: allowed_token_ids, min_tokens and logits_processors forbid tokens, "
    "and a text that must come cannot have that of a special token"
)
"""The error of a state that gets a token which it does not accept: one is chosen even if all of them are forbidden."""


class GrammarState(Protocol):
    """Where an output stands in its grammar. Belongs to one thread at a time."""

    @property
    def num_bytes(self) -> int:
        """The size of the compiled grammar, which all its states share, as far as it is known: it may grow."""

    @property
    def error(self) -> str | None:
        """Why no token can follow."""

    @property
    def finished(self) -> bool:
        """Whether nothing but EOS may follow. Of use only without an error."""

    def accept(self, tokens: list[int]) -> None:
        """The next tokens of the output."""

    def forced(self) -> list[int]:
        """The tokens that must come next: at each of them the mask leaves no other."""

    def copy(self) -> GrammarState:
        """Another one in the same state."""

    def fill(self, mask: NDArray[np.int32]) -> None:
        """See `TokenMatcher.fill`."""


class Backend(Protocol):
    """Compiles for one tokenizer."""

    def compile(self, structured: StructuredOutput) -> GrammarState:
        """The initial state. Raises ValueError or InvalidRequest, readable for clients. On any thread."""
