"""Bad words against the definition: a token is forbidden if the output so far ends with the rest of a word."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine.model.bad_words import ANY_TOKEN, BadWords

TOKENS = st.integers(0, 2)
WORDS = st.lists(st.lists(TOKENS, min_size=1, max_size=4).map(tuple), max_size=8)


def forbidden_after(words: list[tuple[int, ...]], output: list[int]) -> set[int]:
    """As vLLM computes it."""
    found = set()
    for word in words:
        length = len(word) - 1
        if length <= len(output) and tuple(output[len(output) - length :]) == word[:-1]:
            found.add(word[-1])
    return found


@given(words=WORDS, prompt=st.lists(TOKENS, max_size=3), output=st.lists(TOKENS, max_size=6))
def test_the_same_whether_the_last_token_is_known_or_compared_later(
    words: list[tuple[int, ...]], prompt: list[int], output: list[int]
) -> None:
    bad, expected = BadWords(words), forbidden_after(words, output)
    found = bad.forbidden([*prompt, *output], len(prompt), 0)
    assert {token for token, _ in found} == expected
    assert all(before == ANY_TOKEN for _, before in found)
    if output:
        found = bad.forbidden([*prompt, *output[:-1]], len(prompt), 1)
        assert {token for token, before in found if before in (ANY_TOKEN, output[-1])} == expected
