"""Compiles the grammars that answers must match, on threads beside the engine's, and keeps the most recent ones.

matcher(structured, output) -> GrammarMatcher: at once; when a thread has compiled it, it is `ready` or has an `error`,
and the loop is woken
"""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from time import thread_time
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from baton.structured_output.constraint import COMPILE_STACK_BYTES, StructuredBackend, StructuredOutput
from node.structured_output.grammar_state import Backend, GrammarState

T = TypeVar("T")

_NUM_THREADS = 2
_NUM_KEPT = 256
"""Compiled grammars that are kept for the next request with the same one."""
_BYTES_KEPT = 512 * 2**20
"""The total of these, as far as their sizes are known."""

_MAX_DEBT_S = 2.0
_TOKEN_S = 0.005
"""How long one matcher may keep the engine's thread, on which all sequences wait for it: this long in all, and this
long again for each token. Of 1,000 schemas the worst came to 20 ms beyond that (llguidance); of `s: s s s | "a" | "b" |
""` the 100th token takes 30 ms and the 200th 200 ms."""
TOO_SLOW = "it takes too long to find the tokens that may come next, which ambiguous grammars are known for"


class Grammars:
    """Compiles for one tokenizer. `wake` is called, on any thread, when a matcher has become ready, or never will.

    tokenizer: a tokenizer.json. vocab_size: of the logits. Other methods on the engine's thread only.
    """

    def __init__(
        self,
        tokenizer: bytes,
        vocab_size: int,
        eos_token_ids: Iterable[int],
        wake: Callable[[], None],
        backend: StructuredBackend = StructuredBackend.GUIDANCE,
    ) -> None:
        self._tokenizer = tokenizer.decode()
        self._vocab_size = vocab_size
        self._eos_token_ids = list(eos_token_ids)
        self._wake = wake
        self._name = backend
        self._threads = ThreadPoolExecutor(_NUM_THREADS, "grammar")
        self._kept: OrderedDict[bytes, _Kept] = OrderedDict()  # by digest
        self._backend: Future[Backend] | None = None

    def matcher(self, structured: StructuredOutput, output_tokens: Iterable[int] = ()) -> GrammarMatcher:
        """A matcher that has accepted the output so far."""
        digest = structured.digest
        if digest not in self._kept:
            self._kept[digest] = _Kept(self._compile(structured), len(structured.text))
            self._drop_oldest()
        self._kept.move_to_end(digest)
        return GrammarMatcher(self._kept[digest].compiled, output_tokens)

    @property
    def num_mask_words(self) -> int:
        """The number of words in a mask: a word has 32 tokens."""
        return -(-self._vocab_size // 32)

    def _compile(self, structured: StructuredOutput) -> Future[GrammarState]:
        if self._backend is None:
            self._backend = self._submit(self._make_backend)
        backend = self._backend
        compiled = self._submit(lambda: backend.result().compile(structured))
        compiled.add_done_callback(lambda _: self._wake())
        return compiled

    def _submit(self, work: Callable[[], T]) -> Future[T]:
        """Run the work on one of the threads, which may be started for it."""
        others = threading.stack_size(COMPILE_STACK_BYTES)
        try:
            return self._threads.submit(work)
        finally:
            threading.stack_size(others)

    def _drop_oldest(self) -> None:
        """Drop grammars until the limits are kept, but never the newest one."""
        num_bytes = sum(kept.num_bytes for kept in self._kept.values())
        while len(self._kept) > _NUM_KEPT or (num_bytes > _BYTES_KEPT and len(self._kept) > 1):
            _, dropped = self._kept.popitem(last=False)
            num_bytes -= dropped.num_bytes

    def _make_backend(self) -> Backend:
        if self._name is StructuredBackend.XGRAMMAR:
            from node.structured_output.xgrammar_states import XgrammarBackend  # an extra

            return XgrammarBackend(self._tokenizer, self._vocab_size, self._eos_token_ids)
        from node.structured_output.guidance_states import GuidanceBackend

        return GuidanceBackend(self._tokenizer, self._vocab_size, self._eos_token_ids)


@dataclass(frozen=True, slots=True)
class _Kept:
    compiled: Future[GrammarState]
    num_chars: int

    @property
    def num_bytes(self) -> int:
        known = self.compiled.done() and self.compiled.exception() is None
        return max(self.num_chars, self.compiled.result().num_bytes if known else 0)


class GrammarMatcher:
    """Implements `engine.token_matcher.TokenMatcher`. Keeps the output's tokens until it is compiled."""

    def __init__(
        self,
        compiled: Future[GrammarState],
        tokens: Iterable[int],
        state: GrammarState | None = None,
        debt_s: float = 0.0,
    ) -> None:
        """state: that of the matcher, which has accepted all but `tokens`. debt_s: the CPU time that it has taken
        beyond that of its tokens."""
        self._compiled = compiled
        self._pending = list(tokens)
        self._state = state
        self._debt_s = debt_s
        self._run = deque[int]()  # the tokens that must come next, as far as they are known; there may be 60,000

    @property
    def ready(self) -> bool:
        return self._state is not None or (self._compiled.done() and self._compiled.exception() is None)

    @property
    def error(self) -> str | None:
        if self._state is None:
            if not self._compiled.done():
                return None
            if (error := self._compiled.exception()) is not None:
                return f"structured_outputs: {error}"
        reason = self._current().error
        if reason is None and self._debt_s > _MAX_DEBT_S:
            reason = TOO_SLOW
        return f"structured_outputs: {reason}" if reason else None

    @property
    def finished(self) -> bool:
        return self.error is None and self.ready and self._current().finished

    def accept(self, token: int) -> None:
        self._pending.append(token)
        if self._run and self._run.popleft() != token:
            self._run.clear()

    def forced(self) -> list[int]:
        return list(self._run)

    def fork(self, tokens: Iterable[int] = ()) -> GrammarMatcher:
        state = self._state.copy() if self._state is not None else None
        return GrammarMatcher(self._compiled, itertools.chain(self._pending, tokens), state, self._debt_s)

    def fill(self, mask: NDArray[np.int32]) -> None:
        """Also finds forced tokens, if there are any. That takes longer than a mask (20 us instead of 5), and a GPU
        computes the forward pass meanwhile."""
        state = self._current()
        began = thread_time()
        state.fill(mask)
        self._run = deque(state.forced() if _has_one_token(mask) else ())
        self._debt_s += thread_time() - began

    def _current(self) -> GrammarState:
        """The state after all tokens. Raises what compiling raised."""
        if self._state is None:
            self._state = self._compiled.result().copy()
        if self._pending:
            pending, self._pending = self._pending, []
            began = thread_time()
            self._state.accept(pending)
            self._debt_s = max(0.0, self._debt_s + thread_time() - began - len(pending) * _TOKEN_S)
        return self._state


def _has_one_token(mask: NDArray[np.int32]) -> bool:
    return np.count_nonzero(mask) == 1 and int(mask.view(np.uint32).max()).bit_count() == 1
