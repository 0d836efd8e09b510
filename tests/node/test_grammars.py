"""Matchers of both backends: masks, states that any node can rebuild, and compiling beside the engine."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders
from tokenizers.decoders import Decoder
from tokenizers.models import Unigram
from tokenizers.pre_tokenizers import Metaspace

from baton.structured_output.constraint import (
    CHECK_STACK_BYTES,
    COMPILE_STACK_BYTES,
    StructuredBackend,
    StructuredKind,
    StructuredOutput,
)
from node.structured_output import grammars
from node.structured_output.grammar_state import NO_TOKEN_LEFT, GrammarState
from node.structured_output.grammars import GrammarMatcher, Grammars

CHECKPOINT = Path(__file__).parents[2] / "engine" / "checkpoints" / "baton-tiny"
VOCAB_SIZE = 4096
EOS = json.loads((CHECKPOINT / "generation_config.json").read_text())["eos_token_id"]
EOS_IDS = [EOS] if isinstance(EOS, int) else EOS
WAIT_S = 30.0

DIGITS = StructuredOutput(StructuredKind.REGEX, "[0-9]{2,4}")
WORDS = StructuredOutput(StructuredKind.CHOICE, '["ab", "abc", "d\\n\\""]')
RECORD = StructuredOutput(
    StructuredKind.JSON,
    '{"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}, "required": ["a"]}',
)
OBJECT = StructuredOutput(StructuredKind.JSON_OBJECT)
TAG = StructuredOutput(
    StructuredKind.STRUCTURAL_TAG,
    json.dumps(
        {
            "type": "structural_tag",
            "format": {
                "type": "sequence",
                "elements": [
                    {"type": "tag", "begin": "<a>", "content": {"type": "regex", "pattern": "[0-9]+"}, "end": "</a>"},
                    {"type": "json_schema", "json_schema": json.loads(RECORD.text)},
                ],
            },
        }
    ),
)
LARK = StructuredOutput(StructuredKind.GRAMMAR, 'start: "x" D+\nD: /[0-9]/')
GBNF = StructuredOutput(StructuredKind.GRAMMAR, 'root ::= "x" d+\nd ::= [0-9]')


class Compiler:
    def __init__(self, backend: StructuredBackend, tokenizer: Any = None, vocab_size: int = VOCAB_SIZE) -> None:
        """tokenizer: the object of a tokenizer.json; None: that of the checkpoint."""
        self.woken = threading.Event()
        text = json.dumps(tokenizer) if tokenizer else (CHECKPOINT / "tokenizer.json").read_text()
        self.tokenizer = Tokenizer.from_str(text)
        self.vocab_size = vocab_size
        self.grammars = Grammars(text.encode(), vocab_size, EOS_IDS, self.woken.set, backend)
        self.backend = backend

    def __call__(self, structured: StructuredOutput, text: str = "") -> GrammarMatcher:
        """A matcher that is ready or has an error, and has accepted the text."""
        matcher = self.grammars.matcher(structured, self.ids(text))
        while not matcher.ready and matcher.error is None:
            assert self.woken.wait(WAIT_S), "no wake-up came"
            self.woken.clear()
        return matcher

    def ids(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def allowed(self, matcher: GrammarMatcher) -> set[int]:
        mask = np.zeros(-(-self.vocab_size // 32), np.int32)
        matcher.fill(mask)
        return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())

    def texts(self, matcher: GrammarMatcher) -> set[str]:
        return {self.tokenizer.decode([token], skip_special_tokens=False) for token in self.allowed(matcher)}


@pytest.fixture(scope="module", params=list(StructuredBackend), ids=lambda backend: backend.value)
def compiler(request: pytest.FixtureRequest) -> Compiler:
    if request.param is StructuredBackend.XGRAMMAR:
        pytest.importorskip("xgrammar", reason="the extra [xgrammar] is not installed")
    return Compiler(request.param)


def test_a_mask_has_exactly_what_may_follow(compiler: Compiler) -> None:
    texts = compiler.texts(compiler(DIGITS))
    assert texts >= set("0123456789")
    assert all(text.isdecimal() and len(text) <= 4 for text in texts)
    after_three = compiler.texts(compiler(DIGITS, "123"))
    assert {text for text in after_three if text.isdecimal()} == set("0123456789")


def test_an_end_is_allowed_where_the_output_may_end_and_no_special_token_anywhere(compiler: Compiler) -> None:
    special = {t for t, added in compiler.tokenizer.get_added_tokens_decoder().items() if added.special}
    for text, may_end in (("", False), ("1", False), ("12", True), ("123", True)):
        allowed = compiler.allowed(compiler(DIGITS, text))
        assert allowed & special == (set(EOS_IDS) if may_end else set()), text
    inside = compiler.allowed(compiler(OBJECT, '{"a": "'))
    assert len(inside) > 1000
    assert not inside & special


def test_it_is_finished_when_nothing_may_follow(compiler: Compiler) -> None:
    assert not compiler(DIGITS, "12").finished
    assert compiler(DIGITS, "1234").finished
    assert compiler(WORDS, "abc").finished
    assert not compiler(WORDS, "ab").finished
    assert compiler(WORDS, 'd\n"').finished


def test_it_is_finished_by_an_end_where_more_could_follow(compiler: Compiler) -> None:
    matcher = compiler(DIGITS, "12")
    matcher.accept(EOS_IDS[0])
    assert matcher.error is None
    assert matcher.finished


@pytest.mark.parametrize(
    ("structured", "text", "also"),
    [
        (RECORD, '{"a": 12, "b": "c d"}', {"}", ","}),
        (OBJECT, '{"k": [1, {"l": null}]}', {"}", ","}),
        (DIGITS, "12", {"3"}),
        (WORDS, "ab", {"c"}),
        (TAG, '<a>12</a>{"a": 12, "b": "c d"', {"}"}),
    ],
)
def test_a_rebuilt_or_forked_matcher_is_where_the_first_one_is(
    compiler: Compiler, structured: StructuredOutput, text: str, also: set[str]
) -> None:
    stepped = compiler(structured)
    ids = compiler.ids(text)
    for end, token in enumerate(ids):
        assert token in compiler.allowed(stepped)
        before, had = stepped.fork(), compiler.allowed(stepped)
        stepped.accept(token)
        assert compiler.allowed(before) == had
        rebuilt = compiler.grammars.matcher(structured, ids[: end + 1])
        forked = before.fork([token])
        assert compiler.allowed(rebuilt) == compiler.allowed(stepped) == compiler.allowed(forked)
        assert rebuilt.finished == stepped.finished == forked.finished == (stepped.finished and end + 1 == len(ids))
    assert stepped.error is None


def test_tokens_that_are_forced_are_the_only_ones_that_masks_allow(compiler: Compiler) -> None:
    named = '{"type": "object", "properties": {"long_name": {"const": "and value"}}, "required": ["long_name"]}'
    structured = StructuredOutput(StructuredKind.JSON, named.replace("}}, ", '}}, "additionalProperties": false, '))
    found = []
    for text in ("", "{", '{"', '{"long', '{"long_name"', '{"long_name": "and'):
        matcher = compiler(structured, text)
        assert matcher.forced() == [], "nothing is known before a mask"
        (first, *_) = compiler.allowed(matcher)
        matcher.accept(first)
        found += matcher.forced()
        for token in matcher.forced():
            assert compiler.allowed(matcher) == {token}
            matcher.accept(token)
        assert matcher.error is None
    assert bool(found) == (compiler.backend is StructuredBackend.GUIDANCE)


def test_a_token_that_was_not_forced_ends_the_run(compiler: Compiler) -> None:
    matcher = compiler(StructuredOutput(StructuredKind.REGEX, "abcdefgh 12345678"))
    (first, *_) = compiler.allowed(matcher)
    matcher.accept(first + 1)
    assert matcher.forced() == []
    assert matcher.error


class Runs:
    """A state in which a run of tokens must come next."""

    num_bytes = 0
    error = None
    finished = False

    def __init__(self, run: list[int]) -> None:
        self.run = run

    def accept(self, tokens: list[int]) -> None:
        pass

    def forced(self) -> list[int]:
        return self.run

    def copy(self) -> Runs:
        return self

    def fill(self, mask: NDArray[np.int32]) -> None:
        mask[:] = 0
        mask[0] = 1


def test_a_long_run_of_forced_tokens_is_taken_in_linear_time() -> None:
    """A choice may be of 60,000 tokens, which the engine's thread takes at once."""

    def cost(num_tokens: int) -> float:
        run = list(range(num_tokens))
        compiled = Future[GrammarState]()
        compiled.set_result(Runs(run))
        matcher = GrammarMatcher(compiled, ())
        matcher.fill(np.zeros(1, np.int32))
        assert matcher.forced() == run
        began = time.process_time()
        for token in run:
            matcher.accept(token)
        assert matcher.forced() == []
        return time.process_time() - began

    short = min(cost(3_000) for _ in range(3))
    assert any(cost(30_000) < 35 * short + 0.05 for _ in range(3))


class Slow(Runs):
    """Each mask takes `mask_s` of CPU time, and each token `token_s`."""

    def __init__(self, mask_s: float, token_s: float = 0.0) -> None:
        super().__init__([])
        self.mask_s, self.token_s, self.now_s = mask_s, token_s, 0.0

    def accept(self, tokens: list[int]) -> None:
        self.now_s += self.token_s * len(tokens)

    def fill(self, mask: NDArray[np.int32]) -> None:
        self.now_s += self.mask_s


@pytest.mark.parametrize(
    ("state", "num_tokens"),
    [(Slow(0.3), 7), (Slow(0.0, 0.3), 7), (Slow(0.0305), 79), (Slow(0.0045), None), (Slow(0.0, 0.0045), None)],
)
def test_an_output_that_takes_too_long_to_follow_ends(
    monkeypatch: pytest.MonkeyPatch, state: Slow, num_tokens: int | None
) -> None:
    """All sequences of a node wait while a mask is made, and nothing bounds what a short grammar makes of it."""
    monkeypatch.setattr(grammars, "thread_time", lambda: state.now_s)
    compiled = Future[GrammarState]()
    compiled.set_result(state)
    matcher, taken = GrammarMatcher(compiled, range(1000) if num_tokens is None else ()), 0
    while matcher.error is None and taken < 1000:
        matcher.fill(np.zeros(1, np.int32))
        matcher.accept(taken)
        taken += 1
    assert taken == (num_tokens or 1000)
    expected = f"structured_outputs: {grammars.TOO_SLOW}" if num_tokens else None
    assert (matcher.error, matcher.fork().error) == (expected, expected)
    assert not matcher.finished
    assert GrammarMatcher(compiled, ()).error is None


NESTED = """
from concurrent.futures import wait
from pathlib import Path
import json, sys
from baton.structured_output.constraint import StructuredKind, StructuredOutput
from node.structured_output.grammars import Grammars

def definition(i):
    return {"type": "object", "properties": {"x": {"$ref": f"#/$defs/d{i + 1}"}}}

schema = {"$ref": "#/$defs/d0", "$defs": {**{f"d{i}": definition(i) for i in range(1200)}, "d1200": {}}}
grammars = Grammars(Path(sys.argv[1]).read_bytes(), 4096, [0], lambda: None)
matcher = grammars.matcher(StructuredOutput(StructuredKind.JSON, json.dumps(schema)))
wait([matcher._compiled])
sys.exit(matcher.error)
"""


def test_a_node_compiles_what_is_nested_deeper_than_a_router_lets_pass() -> None:
    """The compiler recurses, and a node whose stack ends is gone. In a process of its own, therefore."""
    assert COMPILE_STACK_BYTES >= 2 * CHECK_STACK_BYTES
    command = [sys.executable, "-c", NESTED, str(CHECKPOINT / "tokenizer.json")]
    subprocess.run(command, check=True, timeout=WAIT_S)


def test_marks_of_tags_are_tokens_and_tokens_without_a_logit_do_no_harm() -> None:
    """As in Qwen3, where `<think>` and `<tool_call>` are added tokens but not special ones, and in Gemma 3 without
    images, whose vocabulary ends before the token that stands for an image."""
    tokenizer = json.loads((CHECKPOINT / "tokenizer.json").read_text())
    plain = {"special": False, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    added = ("</think>", "<call>", "<image>")
    tokenizer["added_tokens"] += [{"id": VOCAB_SIZE + i, "content": text, **plain} for i, text in enumerate(added)]
    thought = {"type": "tag", "begin": "", "content": {"type": "any_text"}, "end": "</think>"}
    called = {"type": "tag", "begin": "<call>", "content": {"type": "regex", "pattern": "x+"}, "end": "</x>"}
    calls = {"type": "triggered_tags", "triggers": ["<call>"], "tags": [called]}
    wanted = json.dumps({"format": {"type": "sequence", "elements": [thought, calls]}})
    compiler = Compiler(StructuredBackend.GUIDANCE, tokenizer, VOCAB_SIZE + 2)
    texts = compiler.texts(compiler(StructuredOutput(StructuredKind.STRUCTURAL_TAG, wanted), "I see"))
    assert "</think>" in texts
    assert not texts & {"<call>", "<image>"}
    after = compiler(StructuredOutput(StructuredKind.STRUCTURAL_TAG, wanted), "I see</think>So")
    assert "<call>" in compiler.texts(after)
    after.accept(VOCAB_SIZE + 1)
    assert compiler.texts(after) <= {"x" * n for n in range(1, 20)}


def with_metaspace(decoder: Decoder, byte_fallback: bool = False) -> dict[str, Any]:
    """A tokenizer.json of single characters, in which a blank is `▁`, as in SentencePiece."""
    pieces = ["<unk>", *["<0x0A>"][: int(byte_fallback)], *map(chr, range(33, 127)), "▁"]
    tokenizer = Tokenizer(Unigram([(piece, -1.0) for piece in pieces], 0, byte_fallback))
    tokenizer.pre_tokenizer = Metaspace(prepend_scheme="never")
    tokenizer.decoder = decoder
    read: dict[str, Any] = json.loads(tokenizer.to_str())
    return read


@pytest.mark.parametrize(
    ("decoder", "byte_fallback"),
    [
        (decoders.Metaspace(), False),
        (decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()]), True),
    ],
    ids=["alone", "after_bytes"],
)
def test_a_token_has_the_blank_that_metaspace_makes(compiler: Compiler, decoder: Decoder, byte_fallback: bool) -> None:
    own = Compiler(compiler.backend, with_metaspace(decoder, byte_fallback), 128)
    choice = StructuredOutput(StructuredKind.CHOICE, '["a b"]')
    assert own.allowed(own(choice, "a")) == set(own.ids(" "))
    assert own(choice, "a b").finished


@pytest.mark.parametrize("decoder", [decoders.WordPiece(), decoders.Sequence([decoders.Fuse()])], ids=["one", "steps"])
def test_a_decoder_that_no_backend_knows_is_refused_by_name(compiler: Compiler, decoder: Decoder) -> None:
    own = Compiler(compiler.backend, with_metaspace(decoder), 128)
    name = "Fuse" if isinstance(decoder, decoders.Sequence) else "WordPiece"
    assert f"the decoder of its tokenizer.json is {name}, and not ByteLevel" in (own(DIGITS).error or "")


def test_schemas_within_structural_tags_are_checked(compiler: Compiler) -> None:
    broken = {"type": "json_schema", "json_schema": {"type": "array", "uniqueItems": True}}
    text = json.dumps({"type": "structural_tag", "format": {"type": "or", "elements": [broken]}})
    assert "uniqueItems" in (compiler(StructuredOutput(StructuredKind.STRUCTURAL_TAG, text)).error or "")


def test_each_backend_has_its_own_form_of_grammars(compiler: Compiler) -> None:
    known, other = (LARK, GBNF) if compiler.backend is StructuredBackend.GUIDANCE else (GBNF, LARK)
    assert compiler.texts(compiler(known)) == {"x"}
    assert compiler(known, "x1").error is None
    form = "Lark" if known is LARK else "GBNF"
    within = json.dumps({"type": "structural_tag", "format": {"type": "grammar", "grammar": other.text}})
    for refused in (other, StructuredOutput(StructuredKind.STRUCTURAL_TAG, within)):  # the latter behind reasoning
        assert form in (compiler(refused).error or "")


def test_what_cannot_be_compiled_is_never_ready_and_says_why(compiler: Compiler) -> None:
    matcher = compiler(StructuredOutput(StructuredKind.JSON, '{"type": "frob"}'))
    assert not matcher.ready
    assert not matcher.fork().ready
    assert "frob" in (matcher.error or "")
    assert not matcher.finished
    assert "frob" in (matcher.fork([1]).error or "")
    for structured in (
        StructuredOutput(StructuredKind.JSON, '{"type": '),
        StructuredOutput(StructuredKind.JSON, '{"const": 1e999}'),
        StructuredOutput(StructuredKind.REGEX, "(a"),
        StructuredOutput(StructuredKind.CHOICE, "[]"),
    ):
        assert compiler(structured).error


def test_what_nothing_matches_and_what_cannot_be_written_say_so(compiler: Compiler) -> None:
    if compiler.backend is not StructuredBackend.GUIDANCE:
        pytest.skip("XGrammar has no such limits")
    matcher = compiler(StructuredOutput(StructuredKind.JSON, '{"$ref": "#"}'))
    compiler.allowed(matcher)
    assert matcher.error == "structured_outputs: no output matches"
    assert not matcher.finished
    matcher = compiler(StructuredOutput(StructuredKind.CHOICE, '["<|im_end|>"]'))
    for token in compiler.allowed(matcher):
        matcher.accept(token)
    assert "special token" in (matcher.error or "")


def test_a_token_that_does_not_match_is_an_error_and_no_end(compiler: Compiler) -> None:
    matcher = compiler(DIGITS)
    assert matcher.error is None
    matcher.accept(compiler.ids("x")[-1])
    assert matcher.error == f"structured_outputs: {NO_TOKEN_LEFT}"
    assert not matcher.finished
    assert matcher.fork([compiler.ids("1")[-1]]).error == matcher.error
    rebuilt = compiler.grammars.matcher(DIGITS, [compiler.ids("1")[-1], compiler.ids("x")[-1], compiler.ids("2")[-1]])
    assert rebuilt.error == matcher.error


def test_the_same_text_of_another_kind_is_another_constraint(compiler: Compiler) -> None:
    text = '["ab"]'
    assert '"' not in compiler.texts(compiler(StructuredOutput(StructuredKind.CHOICE, text)))
    assert '"' in compiler.texts(compiler(StructuredOutput(StructuredKind.REGEX, text)))


def test_one_that_is_known_is_ready_at_once(compiler: Compiler) -> None:
    compiler(WORDS)
    assert compiler.grammars.matcher(WORDS).ready


def test_a_fork_of_one_that_is_not_compiled_yet_has_its_tokens(compiler: Compiler) -> None:
    structured = StructuredOutput(StructuredKind.REGEX, "[0-9]{5}")
    fork = compiler.grammars.matcher(structured, compiler.ids("12")).fork(compiler.ids("345"))
    compiler(structured)
    assert fork.finished


def test_what_is_kept_is_bounded_in_number_and_size(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars, "_NUM_KEPT", 3)
    monkeypatch.setattr(grammars, "_BYTES_KEPT", 2**30)
    for length in range(1, 6):
        compiler(StructuredOutput(StructuredKind.REGEX, "a" * length))
    assert len(compiler.grammars._kept) == 3
    monkeypatch.setattr(grammars, "_BYTES_KEPT", 1)
    newest = StructuredOutput(StructuredKind.REGEX, "a" * 6)
    compiler(newest)
    assert list(compiler.grammars._kept) == [newest.digest]
    assert all(len(digest) == 16 for digest in compiler.grammars._kept)


def test_what_a_long_forced_text_takes_counts_as_kept(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    if compiler.backend is not StructuredBackend.GUIDANCE:
        pytest.skip("XGrammar says what its grammars take")
    monkeypatch.setattr(grammars, "_BYTES_KEPT", 2**20)
    long = StructuredOutput(StructuredKind.REGEX, "y{2000}")
    compiler.allowed(compiler(long))
    compiler(DIGITS)
    assert long.digest not in compiler.grammars._kept


@pytest.mark.parametrize(
    ("words", "one"),
    [([0, 8, 0], True), ([0, -(2**31), 0], True), ([0, 9, 0], False), ([8, 8, 0], False), ([-1, 0, 0], False)],
)
def test_masks_of_one_token(words: list[int], one: bool) -> None:
    assert grammars._has_one_token(np.array(words, np.int32)) == one
