"""Outputs in grammars that XGrammar compiled (https://github.com/mlc-ai/xgrammar). Needs the extra [xgrammar]."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from xgrammar import CompiledGrammar, GrammarMatcher

from baton.structured_output.constraint import StructuredOutput
from baton.structured_output.xgrammar_compiler import XgrammarCompiler
from node.structured_output.grammar_state import NO_TOKEN_LEFT


class XgrammarBackend:
    """Implements `node.structured_output.grammar_state.Backend`."""

    def __init__(self, tokenizer: str, vocab_size: int, eos_token_ids: list[int]) -> None:
        """Takes a second for a large vocabulary."""
        self._compiler = XgrammarCompiler(tokenizer, vocab_size, eos_token_ids)
        self._no_ends = np.zeros(-(-vocab_size // 32), np.int32)
        for token in eos_token_ids:
            self._no_ends.view(np.uint32)[token // 32] |= np.uint32(1 << token % 32)
        np.invert(self._no_ends, out=self._no_ends)

    def compile(self, structured: StructuredOutput) -> XgrammarState:
        compiled = self._compiler.compile(structured)
        return XgrammarState(compiled, GrammarMatcher(compiled), self._no_ends)


class XgrammarState:
    """Implements `node.structured_output.grammar_state.GrammarState`. no_ends: a mask of all tokens but EOS."""

    def __init__(
        self,
        compiled: CompiledGrammar,
        matcher: GrammarMatcher,
        no_ends: NDArray[np.int32],
        error: str | None = None,
    ) -> None:
        self.num_bytes = int(compiled.memory_size_bytes)
        self.error = error
        self._compiled = compiled
        self._matcher = matcher
        self._no_ends = no_ends
        self._finished: bool | None = False if error else None

    @property
    def finished(self) -> bool:
        if self._finished is None:
            self._finished = self._matcher.is_terminated() or (self._matcher.is_completed() and self._only_ends())
        return self._finished

    def accept(self, tokens: list[int]) -> None:
        self._finished = None
        for token in tokens:
            if self.error is None and not self._matcher.accept_token(token):
                self.error = NO_TOKEN_LEFT

    def forced(self) -> list[int]:
        """There are none: if a text must come next, the library's masks allow every way to cut it into tokens."""
        return []

    def copy(self) -> XgrammarState:
        return XgrammarState(self._compiled, self._matcher.fork(), self._no_ends, self.error)

    def fill(self, mask: NDArray[np.int32]) -> None:
        self._matcher.fill_next_token_bitmask(mask[None])

    def _only_ends(self) -> bool:
        """Whether no token but EOS may follow. The library can say only whether the output may end here."""
        mask = np.zeros_like(self._no_ends)
        self.fill(mask)
        return not (mask & self._no_ends).any()
