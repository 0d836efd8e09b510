"""Outputs in grammars that llguidance compiled (https://github.com/guidance-ai/llguidance)."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from numpy.typing import NDArray

from baton.structured_output.constraint import StructuredOutput
from baton.structured_output.guidance import LIMITS, guidance_grammar
from baton.tokenizer_decoder import replace_metaspace
from node.structured_output.grammar_state import NO_TOKEN_LEFT

_NOT_VERBOSE = "\n<non-verbose/>"
"""The end of the library's error message; after it, the library would add its inner state."""
_NOTHING_MATCHES = "NoExtensionBias"
_FORCED_TOKEN_BYTES = 1600
"""What all states of a grammar together keep for each token of a text that must come next: the lexer's states, about
400 bytes for each character. A regular expression like a{190000} takes 60 MB, which the library does not limit."""


class GuidanceBackend:
    """Implements `node.structured_output.grammar_state.Backend`."""

    def __init__(self, tokenizer: str, vocab_size: int, eos_token_ids: list[int]) -> None:
        """Takes a second for a large vocabulary. Raises InvalidRequest for a tokenizer that has none."""
        read = json.loads(tokenizer)
        if replace_metaspace(read) | _drop_tokens_from(vocab_size, read):
            tokenizer = json.dumps(read)
        known = LLTokenizer(tokenizer, n_vocab=vocab_size, eos_token=eos_token_ids or None)
        # The library takes all added tokens in angle brackets for special ones: it never matches them by their text.
        added = {token["content"]: token["id"] for token in read.get("added_tokens") or ()}
        self._special_tokens = {text: token for text, token in added.items() if known.is_special_token(token)}
        self._tokenizer = known

    def compile(self, structured: StructuredOutput) -> GuidanceState:
        grammar = guidance_grammar(structured, self._special_tokens)
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=LIMITS)
        if error := matcher.get_error():
            raise ValueError(error)
        return GuidanceState(matcher)


def _drop_tokens_from(vocab_size: int, tokenizer: dict[str, Any]) -> bool:
    """Drop the tokens that have no logit, with which the library would refuse the tokenizer: those of images, for
    Gemma 3 without images. Whether there are any."""
    vocab, added = tokenizer["model"].get("vocab"), tokenizer.get("added_tokens") or []
    kept = [token for token in added if token["id"] < vocab_size]
    without = [text for text, token in vocab.items() if token >= vocab_size] if isinstance(vocab, dict) else []
    for text in without:
        del vocab[text]
    tokenizer["added_tokens"] = kept
    return bool(without) or len(kept) < len(added)


class GuidanceState:
    """Implements `node.structured_output.grammar_state.GrammarState`."""

    def __init__(self, matcher: LLMatcher, no_token_left: bool = False, longest_run: list[int] | None = None) -> None:
        """longest_run: the number of tokens in the longest run that was forced, which all states of a grammar share."""
        self._matcher = matcher
        self._no_token_left = no_token_left
        self._longest_run = [0] if longest_run is None else longest_run

    @property
    def num_bytes(self) -> int:
        return self._longest_run[0] * _FORCED_TOKEN_BYTES

    @property
    def error(self) -> str | None:
        if self._no_token_left:
            return NO_TOKEN_LEFT
        reason = self._matcher.get_error().partition(_NOT_VERBOSE)[0]
        return "no output matches" if reason == _NOTHING_MATCHES else reason or None

    @property
    def finished(self) -> bool:
        return self._matcher.is_stopped()

    def accept(self, tokens: list[int]) -> None:
        if not self._no_token_left:
            num_taken = self._matcher.try_consume_tokens(tokens)
            self._no_token_left = num_taken < len(tokens) and not self._matcher.is_error()

    def forced(self) -> list[int]:
        run = self._matcher.compute_ff_tokens()
        self._longest_run[0] = max(self._longest_run[0], len(run))
        return run

    def copy(self) -> GuidanceState:
        return GuidanceState(self._matcher.deep_copy(), self._no_token_left, self._longest_run)

    def fill(self, mask: NDArray[np.int32]) -> None:
        self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
