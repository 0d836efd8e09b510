"""What XGrammar would leave out of a schema is refused, and what is let through it enforces."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest

from baton.structured_output import xgrammar_schema
from baton.structured_output.constraint import StructuredKind, StructuredOutput
from baton.structured_output.xgrammar_compiler import XgrammarCompiler
from baton.structured_output.xgrammar_schema import why_unsupported, why_unsupported_regex

S = {"type": "string"}
I = {"type": "integer"}  # noqa: E741
A = {"type": "object", "properties": {"a": I, "b": I}}

REFUSED: list[tuple[Any, str]] = [
    ({"type": "array", "uniqueItems": True}, "`uniqueItems`"),
    ({"type": "array", "contains": I}, "`contains`"),
    ({**A, "dependentRequired": {"a": ["b"]}}, "`dependentRequired`"),
    ({**A, "dependencies": {"a": ["b"]}}, "`dependencies`"),
    ({**A, "dependentSchemas": {"a": {"required": ["b"]}}}, "`dependentSchemas`"),
    ({**A, "not": {"required": ["a"]}}, "`not`"),
    ({**A, "if": {"required": ["a"]}, "then": {"required": ["b"]}}, "`if`"),
    ({**A, "unevaluatedProperties": S}, "`unevaluatedProperties` with a schema"),
    ({"$dynamicRef": "#x"}, "`$dynamicRef`"),
    ({"$ref": "http://a.b/c"}, "`$ref` to anything but"),
    ({"$ref": "#/$defs/x", "minimum": 5, "$defs": {"x": I}}, "`minimum` beside `$ref`"),
    ({"type": "number", "multipleOf": 0.5}, "`multipleOf`"),
    ({"type": "integer", "multipleOf": 7, "minimum": 10}, "`minimum` beside `multipleOf`"),
    ({"minimum": 5}, "`minimum` without `type`"),
    ({"maxLength": 5}, "`maxLength` without `type`"),
    ({"minItems": 1}, "`minItems` without `type`"),
    ({"type": "string", "pattern": "^a+$", "minLength": 3}, "`minLength` beside `pattern`"),
    ({"type": "string", "format": "date", "minLength": 11}, "`minLength` beside `format`"),
    ({"type": "string", "format": "regex"}, "`format` 'regex'"),
    ({"type": "string", "pattern": "^(?!a).*$"}, "look-around"),
    ({"type": "object", "patternProperties": {"^(?!a)b$": I}}, "look-around"),
    ({"type": "object", "required": ["b"]}, "`required` of 'b'"),
    ({**A, "patternProperties": {"^c": I}}, "`patternProperties` beside `properties`"),
    ({"type": "string", "enum": ["a", 1]}, "`type` beside `enum`"),
    ({"type": "integer", "const": 3, "minimum": 5}, "`minimum` beside `const`"),
    ({**A, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]}, "`properties` beside `anyOf`"),
    ({"type": "string", "anyOf": [S, I]}, "`type` beside `anyOf`"),
    ({"oneOf": [{"type": "number"}, I]}, "`oneOf`"),
    ({"oneOf": [A, A]}, "`oneOf`"),
    ({"allOf": [A, A]}, "`allOf` of several"),
]


@pytest.mark.parametrize(("schema", "reason"), REFUSED, ids=lambda value: value if isinstance(value, str) else "")
def test_what_is_not_enforced_is_named_wherever_it_is(schema: Any, reason: str) -> None:
    for nested in (
        schema,
        {"type": "object", "properties": {"x": schema}},
        {"type": "array", "items": schema},
        {"anyOf": [S, schema]},
        {"$ref": "#/$defs/y", "$defs": {"y": schema}},
        {"type": "object", "additionalProperties": schema},
        {"type": "array", "prefixItems": [schema]},
    ):
        assert reason in (why_unsupported(nested) or "")


def test_keywords_may_have_values_of_any_type() -> None:
    """The library then says what is wrong, or nothing. An exception would end the router's process that checks."""
    values = (None, True, 1, 1.5, "a", "#", [], [1], ["a"], [[]], [{}], {}, {"a": 1}, {"a": {}})
    keywords = sorted(xgrammar_schema._CONSTRAINING | {"type", "$defs", "uniqueItems", "unevaluatedItems"})
    for keyword, value, kind in itertools.product(keywords, values, (None, "string", "object", ["array", {}])):
        schema = {"type": kind, keyword: value} if kind else {keyword: value}
        assert isinstance(why_unsupported(schema), str | None), schema


@pytest.mark.parametrize(
    ("regex", "reason"),
    [
        ("a(?=b)", "look-around"),
        ("(?<!b)a", "look-around"),
        ("a^b", "^ and $"),
        ("a$b", "^ and $"),
        ("^a$", None),
        (r"a\$b[^c$][]^]", None),
        ("(?:a|b)+", None),
    ],
)
def test_regular_expressions(regex: str, reason: str | None) -> None:
    found = why_unsupported_regex(regex)
    assert found is None if reason is None else reason in (found or "")


ENFORCED: list[tuple[Any, Any, Any]] = [
    ({"type": "integer", "multipleOf": 7}, 14, 15),
    ({"type": "number", "exclusiveMinimum": 7, "maximum": 9.5}, 7.25, 7),
    ({"type": "string", "minLength": 2, "maxLength": 3}, "abc", "a"),
    ({"type": "string", "pattern": "^a+$"}, "aa", "ab"),
    ({"type": "string", "pattern": "a+"}, "a", "b"),
    *(
        ({"type": "string", "format": name}, good, "x y")
        for name, good in (
            ("date", "2020-01-01"),
            ("date-time", "2020-01-01T00:00:00Z"),
            ("duration", "P1D"),
            ("email", "a@b.co"),
            ("hostname", "a.b"),
            ("ipv4", "1.2.3.4"),
            ("ipv6", "::1"),
            ("json-pointer", "/a"),
            ("relative-json-pointer", "1/a"),
            ("time", "10:00:00Z"),
            ("uri", "http://a.b"),
            ("uri-reference", "/a"),
            ("uri-template", "http://a.b"),
            ("uuid", "123e4567-e89b-12d3-a456-426614174000"),
        )
    ),
    ({"type": "array", "items": I, "minItems": 1, "maxItems": 2}, [1, 2], [1, 2, 3]),
    ({"type": "array", "prefixItems": [I, S], "items": False}, [1, "a"], ["a", 1]),
    ({**A, "required": ["a"]}, {"a": 1}, {"b": 1}),
    ({**A, "unevaluatedProperties": False}, {"a": 1}, {"c": 1}),
    ({**A, "additionalProperties": S}, {"a": 1, "c": "x"}, {"c": 1}),
    ({**A, "minProperties": 2}, {"a": 1, "b": 1}, {"a": 1}),
    ({"type": "object", "patternProperties": {"^a$": I}}, {"a": 1}, {"a": "x"}),
    ({"type": "object", "propertyNames": {"pattern": "^a$"}, "additionalProperties": I}, {"a": 1}, {"b": 1}),
    ({"type": ["string", "null"], "enum": ["a", None]}, None, "b"),
    ({"const": {"a": [1]}}, {"a": [1]}, {"a": [2]}),
    ({"anyOf": [S, I]}, 1, None),
    ({"oneOf": [S, I]}, 1, None),
    ({"allOf": [S]}, "a", 1),
    ({"$ref": "#/definitions/x", "description": "d", "definitions": {"x": I}}, 1, "a"),
    ({"type": "object", "properties": {"n": {"$ref": "#"}}}, {"n": {"n": {}}}, {"n": 1}),
    ({"type": ["integer", "string"], "minimum": 3, "minLength": 2}, 4, 1),
    ({"properties": {"a": I}, "required": ["a"]}, {"a": 1}, {"a": "x"}),
]


@pytest.fixture(scope="module")
def compiler() -> XgrammarCompiler:
    pytest.importorskip("xgrammar", reason="the extra [xgrammar] is not installed")
    characters = {chr(code): code for code in range(256)}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False}
    model = {"type": "BPE", "vocab": characters, "merges": []}
    tokenizer = {"model": model, "pre_tokenizer": byte_level, "decoder": byte_level}
    return XgrammarCompiler(json.dumps(tokenizer), 257, [256])


@pytest.mark.parametrize(("schema", "good", "bad"), ENFORCED, ids=lambda value: json.dumps(value)[:60])
def test_what_is_let_through_is_enforced(compiler: XgrammarCompiler, schema: Any, good: Any, bad: Any) -> None:
    from xgrammar import GrammarMatcher

    compiled = compiler.compile(StructuredOutput(StructuredKind.JSON, json.dumps(schema)))

    def takes(value: Any) -> bool:
        matcher = GrammarMatcher(compiled)
        return bool(matcher.accept_string(json.dumps(value, separators=(",", ":"))) and matcher.is_completed())

    assert takes(good)
    assert not takes(bad)
