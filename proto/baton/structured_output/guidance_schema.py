"""A JSON schema as llguidance is to compile it, with options of its own in `x-guidance`."""

from __future__ import annotations

from typing import Any

from baton.errors import InvalidRequest
from baton.structured_output.constraint import MAX_JSON_WHITESPACE
from baton.structured_output.subschemas import subschemas

_OPTIONS = {"whitespace_pattern": rf"[\x20\x0A\x0D\x09]{{1,{MAX_JSON_WHITESPACE}}}"}


def guidance_schema(schema: Any) -> Any:
    """The schema, which must not be changed, with limited whitespace. One that brings options of its own keeps them
    alone. Raises InvalidRequest for what the library (1.9) would ignore, so that answers could break the schema."""
    if any("additionalItems" in found and "prefixItems" in found for found in subschemas(schema)):
        raise InvalidRequest(
            "`additionalItems` beside `prefixItems`: no draft of JSON schema has both; beside `prefixItems`, `items` "
            "says what follows them",
            "structured_outputs",
        )
    if isinstance(schema, bool):
        schema = {} if schema else {"not": {}}
    if not isinstance(schema, dict) or "x-guidance" in schema:
        return schema
    return {**schema, "x-guidance": _OPTIONS}
