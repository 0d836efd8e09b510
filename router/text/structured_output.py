"""What an answer must match, in the forms in which clients say it: OpenAI's and vLLM's, the older ones included."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from baton.errors import InvalidRequest
from baton.structured_output.constraint import StructuredKind, StructuredOutput
from baton.structured_output.structural_tag import load_structural_tag

GUIDED = {
    "guided_json": StructuredKind.JSON,
    "guided_regex": StructuredKind.REGEX,
    "guided_choice": StructuredKind.CHOICE,
    "guided_grammar": StructuredKind.GRAMMAR,
}
_JSON_OBJECT = StructuredOutput(StructuredKind.JSON_OBJECT)


def structured_output_of(
    response_format: Mapping[str, Any] | None,
    structured_outputs: Mapping[str, Any] | None,
    guided: Mapping[str, Any],
) -> StructuredOutput | None:
    """guided: the values of `guided_json` and so on, by name. Raises InvalidRequest, also for more than one."""
    found = dict[str, StructuredOutput]()
    if response_format is not None and (wanted := _of_response_format(response_format)):
        found["response_format"] = wanted
    if structured_outputs is not None and (wanted := _of_structured_outputs(structured_outputs)):
        found["structured_outputs"] = wanted
    for name, value in guided.items():
        if value is not None:
            found[name] = _constraint(GUIDED[name], value, name)
    if len(found) > 1:
        names = " and ".join(f"`{name}`" for name in found)
        raise InvalidRequest(f"{names} exclude each other.", next(iter(found)))
    return next(iter(found.values()), None)


def _of_response_format(wanted: Mapping[str, Any]) -> StructuredOutput | None:
    kind = wanted.get("type")
    if kind in (None, "text"):
        return None
    if kind == "json_object":
        return _JSON_OBJECT
    if kind == "json_schema":
        described = wanted.get("json_schema")
        schema = described.get("schema") if isinstance(described, dict) else None
        if not isinstance(schema, dict):
            raise InvalidRequest("`response_format` needs an object in `json_schema.schema`.", "response_format")
        return _constraint(StructuredKind.JSON, schema, "response_format")
    if kind == "structural_tag":
        return _constraint(StructuredKind.STRUCTURAL_TAG, dict(wanted), "response_format")
    shown = repr(kind[:64]) if isinstance(kind, str) else "unknown"
    known = "'text', 'json_object', 'json_schema' and 'structural_tag'"
    raise InvalidRequest(f"`response_format` of type {shown} is not supported: {known} are.", "response_format")


def _of_structured_outputs(wanted: Mapping[str, Any]) -> StructuredOutput | None:
    given = {name: value for name, value in wanted.items() if value is not None and value is not False}
    if not given:
        return None
    known = {kind.value: kind for kind in StructuredKind}
    if len(given) > 1 or (name := next(iter(given))) not in known:
        shown = ", ".join(f"`{name[:64]}`" for name in list(given)[:4])
        text = f"`structured_outputs` must have one of {', '.join(known)}, not {shown}."
        raise InvalidRequest(text, "structured_outputs")
    return _constraint(known[name], given[name], "structured_outputs")


def _constraint(kind: StructuredKind, value: Any, param: str) -> StructuredOutput:
    if kind is StructuredKind.JSON_OBJECT:
        return _JSON_OBJECT
    if kind is StructuredKind.JSON:
        if not isinstance(value, (dict, str)):
            raise InvalidRequest(f"`{param}`: a JSON schema must be an object, or a string that has one.", param)
        return StructuredOutput(kind, value if isinstance(value, str) else json.dumps(value, separators=(",", ":")))
    if kind is StructuredKind.CHOICE:
        structured = StructuredOutput(kind, json.dumps(value))
        structured.choices()
        return structured
    if kind is StructuredKind.STRUCTURAL_TAG:
        return _structural_tag(value, param)
    if not isinstance(value, str) or not value:
        raise InvalidRequest(f"`{param}`: {kind.value} must be a string that is not empty.", param)
    return StructuredOutput(kind, value)


def _structural_tag(value: Any, param: str) -> StructuredOutput:
    if not isinstance(value, (dict, str)):
        raise InvalidRequest(f"`{param}`: a structural tag must be an object, or a string that has one.", param)
    text = value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))
    structured = StructuredOutput(StructuredKind.STRUCTURAL_TAG, text)
    load_structural_tag(structured.text)
    return structured
