"""A JSON schema and the schemas within it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_SCHEMAS = ("additionalProperties", "items", "additionalItems")
_LISTS = ("allOf", "anyOf", "oneOf", "items", "prefixItems")
_MAPS = ("properties", "patternProperties", "$defs", "definitions")


def subschemas(schema: Any) -> Iterator[dict[str, Any]]:
    """All that are objects, the whole one first."""
    waiting = [schema]
    while waiting:
        found = waiting.pop()
        if isinstance(found, dict):
            yield found
            waiting += _children(found)


def _children(schema: Mapping[str, Any]) -> Iterator[Any]:
    yield from (schema[name] for name in _SCHEMAS if name in schema)
    if isinstance(names := schema.get("propertyNames"), dict):
        yield {"type": "string", **names}
    yield from (child for name in _LISTS if isinstance(schema.get(name), list) for child in schema[name])
    yield from (child for name in _MAPS if isinstance(schema.get(name), dict) for child in schema[name].values())
