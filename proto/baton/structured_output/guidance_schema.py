"""A JSON schema as llguidance is to compile it, with options of its own in `x-guidance`."""

from __future__ import annotations

import json
from typing import Any

from baton.errors import InvalidRequest
from baton.structured_output.constraint import MAX_JSON_WHITESPACE
from baton.structured_output.json_pattern import for_json
from baton.structured_output.subschemas import subschemas

_OPTIONS = {"whitespace_pattern": rf"[\x20\x0A\x0D\x09]{{1,{MAX_JSON_WHITESPACE}}}"}


def guidance_schema(schema: Any) -> Any:
    """The schema, which is not changed, with limited whitespace, and patterns as the library needs them. One with
    options of its own keeps these alone. Raises InvalidRequest for what the library (1.9) would ignore, so that answers
    could break the schema."""
    if any("additionalItems" in found and "prefixItems" in found for found in subschemas(schema)):
        raise InvalidRequest(
            "`additionalItems` beside `prefixItems`: no draft of JSON schema has both; beside `prefixItems`, `items` "
            "says what follows them",
            "structured_outputs",
        )
    schema = _with_patterns(schema)
    if isinstance(schema, bool):
        schema = {} if schema else {"not": {}}
    if not isinstance(schema, dict) or "x-guidance" in schema:
        return schema
    return {**schema, "x-guidance": _OPTIONS}


def _with_patterns(schema: Any) -> Any:
    own = json.loads(json.dumps(schema))
    for found in subschemas(own):
        if isinstance(found.get("pattern"), str):
            found["pattern"] = for_json(found["pattern"])
        if isinstance(named := found.get("patternProperties"), dict):
            found["patternProperties"] = {for_json(pattern): child for pattern, child in named.items()}
    return own
