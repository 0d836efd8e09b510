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
