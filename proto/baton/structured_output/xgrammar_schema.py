"""What of JSON schema XGrammar would silently leave out, so that answers could break the schema.

XGrammar (0.2.8) compiles any schema and ignores what it cannot express. Each rule here was found by a pair of values of
which it took the wrong one; `tests/baton/test_xgrammar_schema.py` has them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from baton.structured_output.subschemas import subschemas

_IGNORED = (
    "contains",
    "dependencies",
    "dependentRequired",
    "dependentSchemas",
    "if",
    "not",
    "$dynamicRef",
    "$recursiveRef",
)
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_TYPED = {
    "string": ("minLength", "maxLength", "pattern", "format"),
    "number": (*_BOUNDS, "multipleOf"),
    "array": ("minItems", "maxItems"),
    "object": ("minProperties", "maxProperties", "propertyNames", "required"),
}
"""Keywords that apply to one type, and are ignored without it."""
_UNEVALUATED = ("unevaluatedItems", "unevaluatedProperties")
"""As false, they hold anyhow; see `XgrammarCompiler`."""
_FORMATS = frozenset(
    {
        *("date", "date-time", "duration", "time"),
        *("email", "hostname", "ipv4", "ipv6", "uuid"),
        *("json-pointer", "relative-json-pointer", "uri", "uri-reference", "uri-template"),
    }
)
_CHOOSING = ("$ref", "allOf", "anyOf", "const", "enum", "oneOf")
"""Of these only the first one counts, and nothing beside it."""
_HARMLESS = frozenset({"items", "prefixItems", "properties", "patternProperties", "additionalProperties"})
_CONSTRAINING = frozenset(name for names in _TYPED.values() for name in names) | _HARMLESS | {*_CHOOSING, *_IGNORED}
_CLASS_OR_ESCAPE = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]", re.DOTALL)
_LOOK_AROUND = re.compile(r"\(\?<?[=!]")


def why_unsupported(schema: Any) -> str | None:
    """The first part of the schema that XGrammar would ignore, or None."""
    reason = next((reason for found in subschemas(schema) for reason in _reasons(found)), None)
    return reason and f"XGrammar does not enforce {reason}"


def why_unsupported_regex(regex: str) -> str | None:
    """What in a regular expression XGrammar would ignore, or None."""
    plain = _CLASS_OR_ESCAPE.sub("x", regex)
    if _LOOK_AROUND.search(plain):
        return "XGrammar does not enforce look-around in regular expressions"
    if "^" in plain[1:] or "$" in plain[:-1]:
        return "XGrammar does not enforce ^ and $ inside of regular expressions"
    return None


def _reasons(schema: Mapping[str, Any]) -> Iterator[str]:
    yield from (f"`{name}`" for name in _IGNORED if name in schema)
    if schema.get("uniqueItems"):
        yield "`uniqueItems`"
    yield from (f"`{name}` with a schema" for name in _UNEVALUATED if isinstance(schema.get(name), dict))
    yield from _of_choosing(schema)
    yield from _of_types(schema)
    yield from _of_numbers(schema)
    yield from _of_strings(schema)
    yield from _of_objects(schema)


def _of_choosing(schema: Mapping[str, Any]) -> Iterator[str]:
    chosen = next((name for name in _CHOOSING if name in schema), None)
    if chosen is None:
        return
    beside = sorted(_CONSTRAINING.intersection(schema) - {chosen})
    if beside:
        yield f"`{beside[0]}` beside `{chosen}`"
    types = _types(schema)
    values = schema["enum"] if chosen == "enum" else [schema["const"]] if chosen == "const" else []
    if types and (chosen not in ("enum", "const") or not isinstance(values, list)):
        if chosen in ("allOf", "oneOf", "anyOf", "$ref"):
            yield f"`type` beside `{chosen}`"
    elif types and not all(_is_of(value, types) for value in values):
        yield f"`type` beside `{chosen}` with values of other types"
    if chosen == "allOf" and isinstance(schema["allOf"], list) and len(schema["allOf"]) > 1:
        yield "`allOf` of several schemas"
    if chosen == "oneOf" and not _disjoint(schema["oneOf"]):
        yield "`oneOf`, unless the types of its schemas tell them apart"
    reference = schema.get("$ref")
    if chosen == "$ref" and not (reference == "#" or (isinstance(reference, str) and reference.startswith("#/"))):
        yield "`$ref` to anything but `#` and `#/...`"


def _of_types(schema: Mapping[str, Any]) -> Iterator[str]:
    types = _types(schema)
    for kind, names in _TYPED.items():
        if kind in types or (kind == "number" and "integer" in types):
            continue
        if kind == "object" and "properties" in schema:
            continue
        yield from (f"`{name}` without `type`" for name in names if name in schema and not types)


def _of_numbers(schema: Mapping[str, Any]) -> Iterator[str]:
    if "multipleOf" not in schema:
        return
    if "number" in _types(schema):
        yield "`multipleOf` of other numbers than integers"
    yield from (f"`{name}` beside `multipleOf`" for name in _BOUNDS if name in schema)


def _of_strings(schema: Mapping[str, Any]) -> Iterator[str]:
    lengths = [name for name in ("minLength", "maxLength") if name in schema]
    given = [name for name in ("format", "pattern") if name in schema]
    if given and (lengths or len(given) > 1):
        yield f"`{(lengths or given[1:])[0]}` beside `{given[0]}`"
    pattern = schema.get("pattern")
    if isinstance(pattern, str) and (reason := why_unsupported_regex(pattern)):
        yield reason.removeprefix("XGrammar does not enforce ")
    if "format" in schema and not (isinstance(name := schema["format"], str) and name in _FORMATS):
        yield f"`format` {str(name)[:64]!r}"


def _of_objects(schema: Mapping[str, Any]) -> Iterator[str]:
    properties = schema.get("properties")
    if not isinstance(properties, dict):
        properties = {}
    if properties and "patternProperties" in schema:
        yield "`patternProperties` beside `properties`"
    patterns = schema.get("patternProperties")
    for pattern in patterns if isinstance(patterns, dict) else ():
        if reason := why_unsupported_regex(pattern):
            yield reason.removeprefix("XGrammar does not enforce ")
    required = schema.get("required")
    if isinstance(required, list):
        missing = next((name for name in required if isinstance(name, str) and name not in properties), None)
        if missing is not None:
            yield f"`required` of {missing[:64]!r}, which is not in `properties`"


def _types(schema: Mapping[str, Any]) -> set[str]:
    found = schema.get("type")
    listed = found if isinstance(found, list) else [found]
    return {name for name in listed if isinstance(name, str)}


def _is_of(value: Any, types: set[str]) -> bool:
    match value:
        case bool():
            return "boolean" in types
        case int():
            return bool(types & {"integer", "number"})
        case float():
            return "number" in types or ("integer" in types and value.is_integer())
        case None:
            return "null" in types
        case str():
            return "string" in types
        case list():
            return "array" in types
        case _:
            return "object" in types


def _disjoint(schemas: Any) -> bool:
    """Whether each of them is of types of its own."""
    seen = set[str]()
    for schema in schemas if isinstance(schemas, list) else [None]:
        types = _types(schema) if isinstance(schema, dict) else set[str]()
        types |= {"number"} if "integer" in types else set()
        if not types or types & seen:
            return False
        seen |= types
    return True
