"""Which token sequences a bad word stands for."""

from __future__ import annotations

import functools

import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import models, pre_tokenizers

from router.text.bad_words import bad_words_token_ids
from router.text.tokenizer import Tokenizer
from tests.router.tiny_tokenizer import tiny_tokenizer, vocab_size


@functools.cache
def with_marked_spaces() -> Tokenizer:
    vocab = {piece: i for i, piece in enumerate(["<unk>", "cat", "Ġcat", "s", "Ġ", "dog"])}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab, [], unk_token="<unk>", ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return Tokenizer(tokenizer.to_str().encode())


def test_a_word_is_forbidden_at_the_beginning_and_within_a_text() -> None:
    assert bad_words_token_ids(["cat", "  cat"], with_marked_spaces(), 6) == ((1,), (2,))
    assert bad_words_token_ids(["cat"], with_marked_spaces(), 2) == ((1,),), "the model has no token 2"
    first = with_marked_spaces().encode("dog", False)
    assert len(with_marked_spaces().encode(" dog", False)) != len(first)
    assert bad_words_token_ids(["dog"], with_marked_spaces(), 6) == (first,)


@settings(deadline=None, derandomize=True)
@given(st.lists(st.text(min_size=1, max_size=8).filter(str.strip), max_size=4))
def test_the_sequences_are_those_of_vllm(words: list[str]) -> None:
    tokenizer, expected = tiny_tokenizer(), list[tuple[int, ...]]()
    for word in words:
        for prefix in ("", " "):
            tokens = tokenizer.encode(prefix + word.lstrip(), False)
            if not prefix or (tokens[0] != expected[-1][0] and len(tokens) == len(expected[-1])):
                expected.append(tokens)
    assert bad_words_token_ids(words, tokenizer, vocab_size()) == tuple(dict.fromkeys(expected))
