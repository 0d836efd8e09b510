"""Structured outputs in the form that llguidance compiles (https://github.com/guidance-ai/llguidance)."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from llguidance import LLMatcher, LLParserLimits

from baton.errors import InvalidRequest
from baton.structured_output.constraint import StructuredKind, StructuredOutput
from baton.structured_output.guidance_schema import guidance_schema
from baton.structured_output.structural_lark import check_lark, structural_grammar
from baton.structured_output.structural_tag import load_structural_tag

LIMITS = LLParserLimits(max_grammar_size=200_000, verbose_errors=False)
"""Of what is compiled, for all processes alike: a router must not accept what a node refuses."""
_NO_TOKENS: Mapping[str, int] = {}
_PLACE = re.compile(r"^(at )?\d+\(\d+\): |\n +\d+ \| .*", re.DOTALL)
"""Of a mistake in a grammar, and the lines around it."""


def guidance_grammar(structured: StructuredOutput, special_tokens: Mapping[str, int] = _NO_TOKENS) -> str:
    """The grammar that llguidance compiles. special_tokens: the tokenizer's, for structural tags. Raises
    InvalidRequest."""
    match structured.kind:
        case StructuredKind.JSON_OBJECT:
            return _json_grammar({"type": "object"})
        case StructuredKind.JSON:
            try:
                return _json_grammar(json.loads(structured.text))
            except (ValueError, RecursionError) as error:
                raise InvalidRequest(str(error), "structured_outputs") from None
        case StructuredKind.REGEX:
            return LLMatcher.grammar_from_regex(structured.text)
        case StructuredKind.CHOICE:
            return LLMatcher.grammar_from_lark("start: " + " | ".join(map(json.dumps, structured.choices())))
        case StructuredKind.GRAMMAR:
            return LLMatcher.grammar_from_lark(check_lark(structured.text))
        case StructuredKind.STRUCTURAL_TAG:
            return structural_grammar(load_structural_tag(structured.text), special_tokens)


def _json_grammar(schema: Any) -> str:
    """Raises ValueError or InvalidRequest."""
    limited = guidance_schema(schema)
    json.dumps(limited, allow_nan=False)  # raises for an infinity, as 1e999 is read, of which the library makes a null
    return LLMatcher.grammar_from_json_schema(limited)


def why_invalid(structured: StructuredOutput) -> str | None:
    """Why it cannot be compiled; quotes no grammar but the client's. May take seconds of CPU for a hostile one, and
    keeps no lock meanwhile."""
    try:
        reason = LLMatcher.validate_grammar(guidance_grammar(structured), None, limits=LIMITS)
    except InvalidRequest as error:
        return error.message
    return (reason if structured.kind is StructuredKind.GRAMMAR else _PLACE.sub("", reason)) or None
