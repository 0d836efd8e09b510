"""Whether texts match a constraint, as a node with the tiny tokenizer would say."""

import functools

from llguidance import LLMatcher, LLTokenizer

from baton.structured_output.constraint import StructuredOutput
from baton.structured_output.guidance import LIMITS, guidance_grammar, why_invalid
from tests.router.tiny_tokenizer import IM_END, SPECIAL, tiny_tokenizer, tokenizer_json, vocab_size


@functools.cache
def _tokens() -> LLTokenizer:
    return LLTokenizer(tokenizer_json().decode(), n_vocab=vocab_size(), eos_token=[IM_END])


def matches(structured: StructuredOutput, text: str) -> bool:
    """Also checks that the router accepts the constraint, which knows no tokens."""
    assert why_invalid(structured) is None
    special_tokens = {token: index for index, token in enumerate(SPECIAL)}
    matcher = LLMatcher(_tokens(), guidance_grammar(structured, special_tokens), log_level=0, limits=LIMITS)
    assert not matcher.get_error(), matcher.get_error()
    ids = list(tiny_tokenizer().encode(text, False))
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()
