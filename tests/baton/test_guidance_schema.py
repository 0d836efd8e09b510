"""What llguidance would ignore of a schema is refused, and what stands alone is enforced."""

from __future__ import annotations

import json
from typing import Any

import pytest

from baton.errors import InvalidRequest
from baton.structured_output.constraint import StructuredKind, StructuredOutput
from baton.structured_output.guidance import guidance_grammar, why_invalid
from tests.router.matching import matches

MIXED = {"type": "array", "prefixItems": [{"type": "string"}], "additionalItems": False}
"""Of which the library (1.9) drops `prefixItems`: it takes [1]."""


@pytest.mark.parametrize(
    "schema",
    [
        MIXED,
        {"type": "object", "properties": {"a": MIXED}},
        {"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"type": "null"}, MIXED]}}},
        {"type": "array", "items": [MIXED]},
    ],
    ids=["alone", "of a property", "defined", "of an item"],
)
@pytest.mark.parametrize("kind", [StructuredKind.JSON, StructuredKind.STRUCTURAL_TAG], ids=lambda kind: kind.value)
def test_keywords_of_two_drafts_are_refused_by_name(schema: dict[str, Any], kind: StructuredKind) -> None:
    tag = {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": schema}}
    structured = StructuredOutput(kind, json.dumps(schema if kind is StructuredKind.JSON else tag))
    with pytest.raises(InvalidRequest, match="`additionalItems` beside `prefixItems`"):
        guidance_grammar(structured)
    assert "`additionalItems`" in (why_invalid(structured) or "")


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array", "items": [{"type": "string"}], "additionalItems": False},
        {"type": "array", "prefixItems": [{"type": "string"}], "items": False},
        {"type": "object", "properties": {"additionalItems": {"type": "string"}, "prefixItems": {"type": "string"}}},
        {"enum": [MIXED]},
    ],
    ids=["older", "newer", "names of properties", "values"],
)
def test_keywords_of_one_draft_and_other_texts_are_not(schema: dict[str, Any]) -> None:
    assert why_invalid(StructuredOutput(StructuredKind.JSON, json.dumps(schema))) is None


@pytest.mark.parametrize(("pattern", "good", "bad"), [('^[^"]*$', "a\n", 'a"b'), ("^<[^\\\\>]*>$", '<">', "<\\>")])
def test_negated_classes_are_enforced(pattern: str, good: str, bad: str) -> None:
    """To the library (1.9), a class that has all control characters has quotes and backslashes, too."""
    schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": pattern}}, "required": ["a"]}
    structured = StructuredOutput(StructuredKind.JSON, json.dumps(schema))
    assert matches(structured, json.dumps({"a": good}))
    assert not matches(structured, json.dumps({"a": bad}))
    names = {"type": "object", "patternProperties": {pattern: {"type": "integer"}}, "additionalProperties": False}
    structured = StructuredOutput(StructuredKind.JSON, json.dumps(names))
    assert matches(structured, json.dumps({good: 1}))
    assert not matches(structured, json.dumps({bad: 1}))


MAP = {"type": "object", "additionalProperties": {"type": "integer"}}
ODD_NAME = "".join(map(chr, range(0x20, 0x7F))) + "ä\n\u212a\U0001f600"
P_OR_Q = {"type": "string", "enum": ["p", "q"]}


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        (MAP | {"propertyNames": {"type": "string"}}, {"a": 1}, {"a": "x"}),
        (MAP | {"propertyNames": True, "properties": {"a": {"type": "string"}}}, {"a": "x", "b": 1}, {"b": "x"}),
        (MAP | {"propertyNames": {"type": "string", "title": "x"}}, {"a": 1}, {"a": "x"}),  # LangChain's
        (MAP | {"propertyNames": {**P_OR_Q, "title": "x"}}, {"q": 1}, {"r": 1}),
        (MAP | {"propertyNames": P_OR_Q, "required": ["p", "q"]}, {"p": 1, "q": 1}, {"p": 1}),
        (MAP | {"propertyNames": {"enum": [ODD_NAME, "q"]}}, {ODD_NAME: 1, "q": 1}, {ODD_NAME[:-1]: 1}),
        (MAP | {"propertyNames": {"pattern": "^a[^b]$"}}, {"a\n": 1}, {"ab": 1}),
        ({"type": "object", "propertyNames": {"pattern": "^a"}}, {"ab": "x"}, {"b": "x"}),
        ({"type": "object", "propertyNames": P_OR_Q, "additionalProperties": False}, {}, {"p": 1}),
    ],
)
def test_maps_of_names_to_values(schema: dict[str, Any], good: Any, bad: Any) -> None:
    """As zod makes them of its records."""
    structured = StructuredOutput(StructuredKind.JSON, json.dumps({"type": "array", "items": schema}))
    assert matches(structured, json.dumps([good], ensure_ascii=False))
    assert not matches(structured, json.dumps([bad], ensure_ascii=False))


@pytest.mark.parametrize(
    "more",
    [
        {"propertyNames": {"minLength": 2}},
        {"propertyNames": {"pattern": "^a", "minLength": 2}},
        {"propertyNames": {"enum": ["p", 1]}},
        {"propertyNames": {"enum": []}},
        {"propertyNames": P_OR_Q, "properties": {"r": {"type": "string"}}},
        {"propertyNames": False},
    ],
)
def test_other_rules_for_names_are_refused_by_name(more: dict[str, Any]) -> None:
    assert "propertyNames" in (why_invalid(StructuredOutput(StructuredKind.JSON, json.dumps(MAP | more))) or "")


def test_formats_that_json_schema_does_not_define_say_nothing() -> None:
    def text(**more: str) -> StructuredOutput:
        return StructuredOutput(StructuredKind.JSON, json.dumps({"type": "string", **more}))

    assert matches(text(format="path"), '"a b"')
    assert matches(text(format="cuid", pattern="^c[0-9]$"), '"c1"')
    assert not matches(text(format="cuid", pattern="^c[0-9]$"), '"d1"')
    assert not matches(text(format="date"), '"a b"')
    assert "Unknown format: idn-email" in (why_invalid(text(format="idn-email")) or "")
    schema = {"type": "object", "properties": {"format": {"const": 1}}}
    named = StructuredOutput(StructuredKind.JSON, json.dumps(schema))
    assert matches(named, '{"format": 1}')
    assert not matches(named, '{"format": 2}')
