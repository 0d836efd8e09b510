"""Compiles what answers must match, on threads beside the engine's, and keeps what was compiled last.

matcher(structured, output) -> GuidanceMatcher: at once; `ready` when a thread has compiled it, and the loop is woken
"""

from __future__ import annotations

import itertools
import json
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from numpy.typing import NDArray

from baton.guidance import LIMITS, guidance_grammar
from baton.structured_output import StructuredOutput

_NUM_THREADS = 2
_NUM_KEPT = 256
"""Compiled grammars that are kept for the next request with the same one."""


class _Tokenizer(NamedTuple):
    tokens: LLTokenizer
    special_tokens: Mapping[str, int]


class Grammars:
    """Compiles for one tokenizer. `wake` is called, on any thread, when a matcher has become ready.

    tokenizer: a tokenizer.json. vocab_size: of the logits. Other methods on the engine's thread only.
    """

    def __init__(
        self, tokenizer: bytes, vocab_size: int, eos_token_ids: Iterable[int], wake: Callable[[], None]
    ) -> None:
        self._tokenizer = tokenizer.decode()
        self._vocab_size = vocab_size
        self._eos_token_ids = list(eos_token_ids)
        self._wake = wake
        self._threads = ThreadPoolExecutor(_NUM_THREADS, "grammar")
        self._compiled: OrderedDict[StructuredOutput, Future[LLMatcher]] = OrderedDict()
        self._known: Future[_Tokenizer] | None = None

    def matcher(self, structured: StructuredOutput, output_tokens: Iterable[int] = ()) -> GuidanceMatcher:
        """A matcher that has accepted the output so far."""
        compiled = self._compiled.get(structured)
        if compiled is None:
            if self._known is None:
                self._known = self._threads.submit(self._make_tokenizer)
            compiled = self._threads.submit(_compile, structured, self._known)
            compiled.add_done_callback(lambda _: self._wake())
            self._compiled[structured] = compiled
            while len(self._compiled) > _NUM_KEPT:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(structured)
        return GuidanceMatcher(compiled, output_tokens)

    @property
    def num_mask_words(self) -> int:
        """Of a mask: a word has 32 tokens."""
        return -(-self._vocab_size // 32)

    def _make_tokenizer(self) -> _Tokenizer:
        added = json.loads(self._tokenizer).get("added_tokens") or []
        special_tokens = {token["content"]: token["id"] for token in added if token.get("special")}
        eos = self._eos_token_ids or None
        return _Tokenizer(LLTokenizer(self._tokenizer, n_vocab=self._vocab_size, eos_token=eos), special_tokens)


def _compile(structured: StructuredOutput, tokenizer: Future[_Tokenizer]) -> LLMatcher:
    """In its initial state. Raises ValueError, and InvalidRequest."""
    known = tokenizer.result()
    grammar = guidance_grammar(structured, known.special_tokens)
    matcher = LLMatcher(known.tokens, grammar, log_level=0, limits=LIMITS)
    if error := matcher.get_error():
        raise ValueError(error)
    return matcher


class GuidanceMatcher:
    """Implements `engine.token_matcher.TokenMatcher`. Keeps the output's tokens until it is compiled."""

    def __init__(self, compiled: Future[LLMatcher], tokens: Iterable[int], state: LLMatcher | None = None) -> None:
        """state: that of the matcher, which has accepted all but `tokens`."""
        self._compiled = compiled
        self._pending = list(tokens)
        self._state = state

    @property
    def ready(self) -> bool:
        return self._state is not None or self._compiled.done()

    @property
    def error(self) -> str | None:
        if not self.ready:
            return None
        if self._state is None and (error := self._compiled.exception()) is not None:
            return f"structured_outputs: {error}"
        reason = self._current().get_error()
        return f"structured_outputs: {reason}" if reason else None

    @property
    def finished(self) -> bool:
        return self.error is None and self.ready and self._current().is_stopped()

    def accept(self, token: int) -> None:
        self._pending.append(token)

    def fork(self, tokens: Iterable[int] = ()) -> GuidanceMatcher:
        state = self._state.deep_copy() if self._state is not None else None
        return GuidanceMatcher(self._compiled, itertools.chain(self._pending, tokens), state)

    def fill(self, mask: NDArray[np.int32]) -> None:
        self._current().unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)

    def _current(self) -> LLMatcher:
        """The state after all tokens. Raises what compiling raised."""
        if self._state is None:
            self._state = self._compiled.result().deep_copy()
        if self._pending:
            pending, self._pending = self._pending, []
            self._state.consume_tokens(pending)
        return self._state
