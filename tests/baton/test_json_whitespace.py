"""Between two tokens of JSON there is some whitespace, and an end to it."""

from __future__ import annotations

import json

import pytest
from llguidance import LLMatcher, LLTokenizer

from baton.structured_output.constraint import MAX_JSON_WHITESPACE, StructuredKind, StructuredOutput
from baton.structured_output.guidance import guidance_grammar

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
ALL = MAX_JSON_WHITESPACE


def tag_of(schema: object) -> str:
    tag = {"type": "tag", "begin": "<", "content": {"type": "json_schema", "json_schema": schema}, "end": ">"}
    return json.dumps({"type": "structural_tag", "format": tag})


@pytest.fixture(scope="module")
def tokenizer() -> LLTokenizer:
    return LLTokenizer("byte")


@pytest.mark.parametrize(
    ("kind", "text", "ends"),
    [
        (StructuredKind.JSON_OBJECT, "", ("", "")),
        (StructuredKind.JSON, json.dumps(SCHEMA), ("", "")),
        (StructuredKind.STRUCTURAL_TAG, tag_of(SCHEMA), ("<", ">")),
        (StructuredKind.STRUCTURAL_TAG, tag_of(True), ("<", ">")),
    ],
)
@pytest.mark.parametrize(
    ("body", "is_json"),
    [
        ('{"a":1}', True),
        ('{\n  "a": 1\n}', True),
        ("{" + " " * ALL + '"a":1}', True),
        ("{" + " \n" * (ALL // 2) + ' "a":1}', False),
        ('{"a":' + "\t" * (ALL + 1) + "1}", False),
    ],
)
def test_whitespace_is_limited(
    tokenizer: LLTokenizer, kind: StructuredKind, text: str, ends: tuple[str, str], body: str, is_json: bool
) -> None:
    grammar = guidance_grammar(StructuredOutput(kind, text), {})
    matcher = LLMatcher(tokenizer, grammar)
    tokens = tokenizer.tokenize_str(ends[0] + body + ends[1])
    assert not matcher.is_error(), matcher.get_error()
    assert (matcher.validate_tokens(tokens) == len(tokens)) is is_json


def test_a_schema_may_have_its_own_rule(tokenizer: LLTokenizer) -> None:
    schema = {**SCHEMA, "x-guidance": {"whitespace_flexible": False}}
    for kind, text, begin in (
        (StructuredKind.JSON, json.dumps(schema), ""),
        (StructuredKind.STRUCTURAL_TAG, tag_of(schema), "<"),
    ):
        matcher = LLMatcher(tokenizer, guidance_grammar(StructuredOutput(kind, text), {}))
        compact, spaced = (tokenizer.tokenize_str(begin + body) for body in ('{"a":1}', '{ "a":1}'))
        assert matcher.validate_tokens(compact) == len(compact)
        assert matcher.validate_tokens(spaced) < len(spaced)
