"""Structural tags: which texts match them, and which tags are refused."""

from __future__ import annotations

import functools
import json
from typing import Any

import pytest

from baton.errors import InvalidRequest
from baton.structured_output.constraint import StructuredKind, StructuredOutput
from baton.structured_output.guidance import why_invalid
from baton.structured_output.structural_tag import load_structural_tag
from tests.router.matching import matches

INT: dict[str, Any] = {"type": "json_schema", "json_schema": {"type": "integer"}}
ANY: dict[str, Any] = {"type": "any_text"}


def const(value: str) -> dict[str, Any]:
    return {"type": "const_string", "value": value}


def tag(begin: str, content: Any, end: Any) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def sequence(*elements: Any) -> dict[str, Any]:
    return {"type": "sequence", "elements": list(elements)}


def either(*elements: Any) -> dict[str, Any]:
    return {"type": "or", "elements": list(elements)}


TAGS = [tag("<f>", INT, "</f>"), tag("<g>", const("x"), "</g>")]


def triggered(**more: Any) -> dict[str, Any]:
    return {"type": "triggered_tags", "triggers": ["<f", "<g"], "tags": TAGS, **more}


def separated(**more: Any) -> dict[str, Any]:
    return {"type": "tags_with_separator", "tags": TAGS, "separator": ", ", **more}


def structured(wanted: Any) -> StructuredOutput:
    whole = wanted if "structures" in wanted else {"type": "structural_tag", "format": wanted}
    return StructuredOutput(StructuredKind.STRUCTURAL_TAG, json.dumps(whole))


OLDER = {"structures": [{"begin": "<f>", "schema": {"type": "integer"}, "end": "</f>"}], "triggers": ["<f"]}
THINK = tag("<think>", ANY, "</think>")


@pytest.mark.parametrize(
    ("wanted", "good", "bad"),
    [
        (const('a\n"ä🙂'), ['a\n"ä🙂'], ["a", ""]),
        (const(""), [""], ["a"]),
        (INT, ["12"], ["x", ""]),
        (ANY, ["", "a\nb"], []),
        ({"type": "regex", "pattern": "a/b\\/\\d"}, ["a/b/1"], ["a/b"]),
        ({"type": "regex", "pattern": "a\nb"}, ["a\nb"], ["a"]),
        (sequence(const("x"), {"type": "grammar", "grammar": 'start: "a" start | "b"'}), ["xaab"], ["xa", "aab"]),
        (sequence(INT, const(","), INT), ["1,2"], ["1,"]),
        (either(const("a"), sequence(const("b"), ANY)), ["a", "bcd"], ["ac", ""]),
        (tag("<", INT, ">"), ["<1>"], ["<1", "1>"]),
        (tag("<", INT, ["]", ">>"]), ["<1]", "<1>>"], ["<1>"]),
        (sequence(tag("<", ANY, "/>"), INT), ["<a>b/>1", "</>1"], ["<a/>x/>1", "<a>1"]),
        (sequence(tag("<", sequence(const("a"), ANY), ["/>", "|"]), INT), ["<ab/>1", "<a|2"], ["<a/>|1"]),
        (sequence(either(THINK, const("")), INT), ["1", "<think>2 </think>3"], ["<think>2", "x1"]),
        (tag("a", tag("b", ANY, "c"), "d"), ["abxcd", "abccd"], ["abxc", "abxcdcd"]),
        (triggered(), ["", "a < b", "a<f>1</f> b <g>x</g>", "<f>1</f><f>2</f>"], ["<f", "a<f>x</f>", "<g>1</g>"]),
        (triggered(at_least_one=True), ["<f>1</f>", "<g>x</g>b<f>1</f>"], ["", "a<f>1</f>"]),
        (triggered(stop_after_first=True), ["", "a<f>1</f>"], ["<f>1</f>b", "<f>1</f><f>1</f>"]),
        (triggered(at_least_one=True, stop_after_first=True), ["<f>1</f>"], ["", "<f>1</f>b"]),
        (tag("(", triggered(), ")"), ["()", "(a<f>1</f>b)"], ["(a<f>1</f>b", "(<f>)", "()b"]),
        (separated(), ["", "<f>1</f>", "<f>1</f>, <g>x</g>"], ["<f>1</f><g>x</g>", "a"]),
        (separated(at_least_one=True), ["<f>1</f>, <f>2</f>"], ["", "<f>1</f>, "]),
        (separated(at_least_one=True, stop_after_first=True), ["<f>1</f>"], ["<f>1</f>, <f>2</f>", ""]),
        (OLDER, ["", "a<f>1</f>b"], ["a<f>x</f>"]),
        # special tokens
        (const("a<|im_start|>b"), ["a<|im_start|>b"], ["ab"]),
        (sequence(tag("", ANY, "<|im_start|>x"), INT), ["ab<|im_start|>x1"], ["ab<|im_start|>1", "ab1"]),
        (
            {"type": "triggered_tags", "triggers": ["<|im_start|>"], "tags": [tag("<|im_start|>f", INT, "")]},
            ["a", "a<|im_start|>f1", "<|im_start|>f1<|im_start|>f2"],
            ["<|im_start|>g"],
        ),
    ],
)
def test_texts_match_or_do_not(wanted: Any, good: list[str], bad: list[str]) -> None:
    assert {text: matches(structured(wanted), text) for text in [*good, *bad]} == {t: t in good for t in [*good, *bad]}


def test_each_schema_has_definitions_of_its_own() -> None:
    schemas = [{"$ref": "#/$defs/x", "$defs": {"x": {"const": value}}} for value in (1, 2)]
    both = sequence(*({"type": "json_schema", "json_schema": schema} for schema in schemas))
    assert matches(structured(both), "12")
    assert not matches(structured(both), "11")


def nested(depth: int) -> dict[str, Any]:
    return sequence(nested(depth - 1)) if depth else ANY


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[", "must be a JSON object"),
        ("[" * 100_000, "must be a JSON object"),
        ("[]", "must be a JSON object"),
        ('{"format": {"type": "regex", "pattern": "\\ud800"}}', "must be a JSON object"),
        ({}, "needs `format`, or `structures`"),
        ({"format": ANY, "x": 1}, "`x` of the object"),
        ({"structures": [1], "triggers": ["a"]}, "list of objects"),
        ({"structures": [{"begin": "b", "schema": {}, "end": ""}], "triggers": ["a"]}, "none of the triggers"),
        ({"structures": [{"begin": "a", "schema": 3, "end": ""}], "triggers": ["a"]}, "a JSON schema"),
        ({"structures": [], "triggers": ["a"]}, "`tags` of a format of type triggered_tags must be a list"),
        ({"format": 3}, "type unknown is not supported: const_string"),
        ({"format": {"type": "qwen_xml_parameter"}}, "'qwen_xml_parameter' is not supported"),
        ({"format": {**ANY, "excludes": ["a"]}}, "`excludes` of a format of type any_text"),
        ({"format": tag("a", 3, "b")}, "`content` of a format of type tag must be a format"),
        ({"format": tag("a", ANY, [])}, "a string or a list of strings"),
        ({"format": {"type": "or", "elements": []}}, "not empty"),
        ({"format": {**separated(), "tags": [ANY]}}, "must be formats of type tag"),
        ({"format": triggered(at_least_one=1)}, "must be a boolean"),
        ({"format": nested(33)}, "nested at most 32 deep"),
        ({"format": sequence(*[ANY] * 4097)}, "at most 4096 formats"),
    ],
)
def test_mistakes_are_named(text: Any, says: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        load_structural_tag(text if isinstance(text, str) else json.dumps(text))
    assert says in refused.value.message
    assert refused.value.param == "structured_outputs"


def test_what_cannot_be_a_grammar_is_named() -> None:
    many = functools.reduce(lambda inner, _: tag("(", inner, [")", "]"]), range(8), ANY)
    for wanted, says in (
        (sequence(ANY, INT), "must be the last of a sequence"),
        (many, "over 64 ends"),
        ({"type": "json_schema", "json_schema": {"type": "frob"}}, "frob"),
    ):
        assert says in (why_invalid(structured(wanted)) or "")
