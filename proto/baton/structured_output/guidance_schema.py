"""A JSON schema as llguidance is to compile it, with options of its own in `x-guidance`."""

from __future__ import annotations

import json
import re
from typing import Any

from baton.errors import InvalidRequest
from baton.structured_output.constraint import MAX_JSON_WHITESPACE
from baton.structured_output.json_pattern import for_json
from baton.structured_output.subschemas import subschemas

_FORMATS = frozenset(
    {
        *("date", "date-time", "duration", "time"),
        *("email", "hostname", "idn-email", "idn-hostname", "ipv4", "ipv6"),
        *("iri", "iri-reference", "uri", "uri-reference", "uri-template", "uuid"),
        *("json-pointer", "regex", "relative-json-pointer"),
    }
)
"""Those that JSON schema defines. Any other one is a remark, which answers cannot break."""
_REMARKS = ("$comment", "default", "deprecated", "description", "examples", "title")
_OPTIONS = {"whitespace_pattern": rf"[\x20\x0A\x0D\x09]{{1,{MAX_JSON_WHITESPACE}}}"}


def guidance_schema(schema: Any) -> Any:
    """The schema, which is not changed, with limited whitespace, and as the library (1.9) needs it: patterns, formats
    and names of properties. One with options of its own keeps these alone. Raises InvalidRequest for what the library
    would ignore, so that answers could break the schema."""
    if any("additionalItems" in found and "prefixItems" in found for found in subschemas(schema)):
        raise InvalidRequest(
            "`additionalItems` beside `prefixItems`: no draft of JSON schema has both; beside `prefixItems`, `items` "
            "says what follows them",
            "structured_outputs",
        )
    schema = _rewritten(schema)
    if isinstance(schema, bool):
        schema = {} if schema else {"not": {}}
    if not isinstance(schema, dict) or "x-guidance" in schema:
        return schema
    return {**schema, "x-guidance": _OPTIONS}


def _rewritten(schema: Any) -> Any:
    own = json.loads(json.dumps(schema))
    for found in subschemas(own):
        if "propertyNames" in found:
            _state_names(found)
        if isinstance(found.get("pattern"), str):
            found["pattern"] = for_json(found["pattern"])
        if isinstance(named := found.get("patternProperties"), dict):
            found["patternProperties"] = {for_json(pattern): child for pattern, child in named.items()}
        if isinstance(name := found.get("format"), str) and name not in _FORMATS:
            del found["format"]
    return own


def _state_names(schema: dict[str, Any]) -> None:
    """Say without `propertyNames`, which the library does not know, what it says, in the forms that clients write for a
    map from names to values."""
    names = schema["propertyNames"]
    if names is True:
        names = {}
    if not isinstance(names, dict):
        return
    rules = {name: rule for name, rule in names.items() if (name, rule) != ("type", "string") and name not in _REMARKS}
    if not rules:
        del schema["propertyNames"]
        return
    if "properties" in schema or "patternProperties" in schema:
        return
    match rules:
        case {"enum": [_, *_] as listed, **other} if not other and all(isinstance(name, str) for name in listed):
            pattern = f"^({'|'.join(map(re.escape, listed))})$"
        case {"pattern": str(pattern), **other} if not other:
            pass
        case _:
            return
    del schema["propertyNames"]
    schema["patternProperties"] = {pattern: schema.get("additionalProperties", True)}
    schema["additionalProperties"] = False
