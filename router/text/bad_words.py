"""The tokens of a request's `bad_words`."""

from __future__ import annotations

from collections.abc import Sequence

from baton.errors import InvalidRequest
from router.limits import MAX_BAD_WORD_CHARS, MAX_BAD_WORDS
from router.text.tokenizer import Tokenizer


def check_bad_words(words: Sequence[str]) -> None:
    """Raises InvalidRequest for too many or too long ones, and for blank ones."""
    if len(words) > MAX_BAD_WORDS:
        raise InvalidRequest(f"bad_words must have at most {MAX_BAD_WORDS} strings, not {len(words)}", "bad_words")
    num_chars = sum(map(len, words))
    if num_chars > MAX_BAD_WORD_CHARS:
        text = f"bad_words must have at most {MAX_BAD_WORD_CHARS} characters together, not {num_chars}"
        raise InvalidRequest(text, "bad_words")
    if any(not word.strip() for word in words):
        raise InvalidRequest("bad_words must not contain an empty or blank string", "bad_words")


def bad_words_token_ids(words: Sequence[str], tokenizer: Tokenizer, vocab_size: int) -> tuple[tuple[int, ...], ...]:
    """Token sequences that the output must not contain, as in vLLM: each word as it is at the beginning of a text, and
    after a space if that has as many tokens and begins with another one. Sequences that a model of `vocab_size` tokens
    cannot say are left out."""
    found: list[tuple[int, ...]] = []
    for word in words:
        first = tokenizer.encode(word.lstrip(), add_special_tokens=False)
        within = tokenizer.encode(" " + word.lstrip(), add_special_tokens=False)
        found.append(first)
        if len(within) == len(first) and within[:1] != first[:1]:
            found.append(within)
    return tuple(dict.fromkeys(tokens for tokens in found if tokens and max(tokens) < vocab_size))
