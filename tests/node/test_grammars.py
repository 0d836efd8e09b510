"""Matchers of llguidance: masks, states that any node can rebuild, and compiling beside the engine."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from baton.structured_output import StructuredKind, StructuredOutput
from node.grammars import Grammars, GuidanceMatcher

CHECKPOINT = Path(__file__).parents[2] / "engine" / "checkpoints" / "baton-tiny"
VOCAB_SIZE = 4096
EOS = json.loads((CHECKPOINT / "generation_config.json").read_text())["eos_token_id"]
WAIT_S = 30.0

DIGITS = StructuredOutput(StructuredKind.REGEX, "[0-9]{2,4}")
WORDS = StructuredOutput(StructuredKind.CHOICE, '["ab", "abc", "d\\n\\""]')


class Compiler:
    def __init__(self) -> None:
        self.woken = threading.Event()
        tokenizer = (CHECKPOINT / "tokenizer.json").read_bytes()
        self.tokenizer = Tokenizer.from_str(tokenizer.decode())
        self.grammars = Grammars(tokenizer, VOCAB_SIZE, [EOS] if isinstance(EOS, int) else EOS, self.woken.set)

    def __call__(self, structured: StructuredOutput, text: str = "") -> GuidanceMatcher:
        """A matcher that is ready, and has accepted the text."""
        matcher = self.grammars.matcher(structured, self.ids(text))
        while not matcher.ready:
            assert self.woken.wait(WAIT_S), "no wake-up came"
            self.woken.clear()
        return matcher

    def ids(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def allowed(self, matcher: GuidanceMatcher) -> set[int]:
        mask = np.zeros(-(-VOCAB_SIZE // 32), np.int32)
        matcher.fill(mask)
        return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())

    def texts(self, matcher: GuidanceMatcher) -> set[str]:
        return {self.tokenizer.decode([token], skip_special_tokens=False) for token in self.allowed(matcher)}


@pytest.fixture(scope="module")
def compiler() -> Compiler:
    return Compiler()


def test_a_mask_has_exactly_what_may_follow(compiler: Compiler) -> None:
    texts = compiler.texts(compiler(DIGITS))
    assert texts >= set("0123456789")
    assert all(text.isdecimal() and len(text) <= 4 for text in texts)
    after_three = compiler.texts(compiler(DIGITS, "123"))
    assert {text for text in after_three if text.isdecimal()} == set("0123456789")


def test_it_is_finished_when_nothing_may_follow(compiler: Compiler) -> None:
    assert not compiler(DIGITS, "12").finished
    assert compiler(DIGITS, "1234").finished
    assert compiler(WORDS, "abc").finished
    assert not compiler(WORDS, "ab").finished
    assert compiler(WORDS, 'd\n"').finished


def test_a_rebuilt_or_forked_matcher_is_where_the_first_one_is(compiler: Compiler) -> None:
    structured = StructuredOutput(StructuredKind.JSON, '{"type": "object", "properties": {"a": {"type": "integer"}}}')
    text = '{"a": 12'
    stepped = compiler(structured)
    for end, token in enumerate(compiler.ids(text)):
        assert token in compiler.allowed(stepped)
        before, had = stepped.fork(), compiler.allowed(stepped)
        stepped.accept(token)
        assert compiler.allowed(before) == had
        rebuilt = compiler.grammars.matcher(structured, compiler.ids(text)[: end + 1])
        assert compiler.allowed(rebuilt) == compiler.allowed(stepped) == compiler.allowed(before.fork([token]))


def test_what_cannot_be_compiled_is_ready_and_says_why(compiler: Compiler) -> None:
    matcher = compiler(StructuredOutput(StructuredKind.JSON, '{"type": "frob"}'))
    assert "frob" in (matcher.error or "")
    assert not matcher.finished
    assert "frob" in (matcher.fork([1]).error or "")


def test_a_token_that_does_not_match_is_an_error_and_no_end(compiler: Compiler) -> None:
    matcher = compiler(DIGITS)
    assert matcher.error is None
    matcher.accept(compiler.ids("x")[-1])
    assert matcher.error is not None
    assert not matcher.finished


def test_one_that_is_known_is_ready_at_once(compiler: Compiler) -> None:
    compiler(WORDS)
    assert compiler.grammars.matcher(WORDS).ready


def test_a_fork_of_one_that_is_not_compiled_yet_has_its_tokens(compiler: Compiler) -> None:
    structured = StructuredOutput(StructuredKind.REGEX, "[0-9]{5}")
    fork = compiler.grammars.matcher(structured, compiler.ids("12")).fork(compiler.ids("345"))
    compiler(structured)
    assert fork.finished
