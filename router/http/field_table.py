"""Reads the fields of a request from its JSON schema: type, valid values and default in words, for pages."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from baton.node_info import GenerationDefaults
from baton.sampling import SamplingParams

_OF_MODEL = frozenset(field.name for field in dataclasses.fields(GenerationDefaults))
_DEFAULTS = {field.name: field.default for field in dataclasses.fields(SamplingParams)}
_OWN_DEFAULTS = {
    "seed": "drawn",
    "max_tokens": "the model's, else what fits into the context",
    "n": "`1`",
}


@dataclass(frozen=True, slots=True)
class FieldRow:
    """One field. `values`: its range, or the choices; empty: all of its type. `default`: empty if it has none."""

    name: str
    kind: str
    values: str
    default: str
    description: str


def rows_of(schema: Mapping[str, Any]) -> list[FieldRow]:
    """Required fields come first."""
    required = schema.get("required", ())
    rows = [_row(name, field, name in required) for name, field in schema.get("properties", {}).items()]
    return sorted(rows, key=lambda row: row.default != "required")


def models_of(schema: Mapping[str, Any]) -> list[str]:
    """The names of the schemas that it refers to, in their order."""
    return list(dict.fromkeys(_references(schema)))


def _row(name: str, field: Mapping[str, Any], required: bool) -> FieldRow:
    """The description may end with `unset:` and the default."""
    description, _, stated = field.get("description", "").partition("unset: ")
    kind = _kind(field)
    default = "required" if required else stated or _default(name) or ("false" if kind == "boolean" else "")
    return FieldRow(name, kind, "; ".join(dict.fromkeys(_values(field))), default, description.removesuffix("; "))


def _default(name: str) -> str:
    if name in _OWN_DEFAULTS:
        return _OWN_DEFAULTS[name]
    default = _DEFAULTS.get(name)
    if type(default) not in (int, float):
        return ""
    text = f"`{default:g}`"
    return f"the model's, else {text}" if name in _OF_MODEL else text


def _kind(field: Mapping[str, Any]) -> str:
    if "$ref" in field:
        return str(field["$ref"].rpartition("/")[2])
    kinds = dict.fromkeys(_kind(choice) for choice in _choices(field))
    if kinds:
        return " or ".join(kinds)
    if "const" in field or "enum" in field:
        value = field.get("const", next(iter(field.get("enum", ())), ""))
        return {str: "string", bool: "boolean"}.get(type(value), "number")
    kind = field.get("type", "any")
    if kind != "array":
        return str(kind)
    inner = _kind(field.get("items", {}))
    return f"list of ({inner})" if " or " in inner else f"list of {inner}"


def _choices(field: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """What it may be, beside null."""
    every = [*field.get("anyOf", ()), *field.get("oneOf", ())]
    return [choice for choice in every if choice.get("type") != "null"]


def _values(field: Mapping[str, Any]) -> Iterator[str]:
    for part in (field, *_choices(field)):
        if interval := _interval(part):
            yield interval
        if "enum" in part or "const" in part:
            yield ", ".join(f"`{_plain(value)}`" for value in part.get("enum", [part.get("const")]))
        if "maxItems" in part:
            yield f"{part['minItems']} to {part['maxItems']}" if "minItems" in part else f"at most {part['maxItems']}"
        if "maxProperties" in part:
            yield f"at most {part['maxProperties']} names"
        if "maxLength" in part:
            yield f"at most {part['maxLength']} characters"
        if "pattern" in part:
            yield f"`{part['pattern']}`"
        if isinstance(inner := part.get("additionalProperties"), dict) and (interval := _interval(inner)):
            yield f"each {interval}"


def _interval(part: Mapping[str, Any]) -> str:
    least, above, most = part.get("minimum"), part.get("exclusiveMinimum"), part.get("maximum")
    if least is None and above is None:
        return "" if most is None else f"at most {_number(most)}"
    if most is None or most >= 2**31 - 1:
        return f"above {_number(above)}" if above is not None else f"{_number(least)} or more"
    return f"({_number(above)}, {_number(most)}]" if above is not None else f"[{_number(least)}, {_number(most)}]"


def _number(value: Any) -> str:
    return f"{value:g}".replace("e+0", "e")


def _plain(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _references(node: object) -> Iterator[str]:
    if isinstance(node, dict):
        if "$ref" in node:
            yield node["$ref"].rpartition("/")[2]
        for value in node.values():
            yield from _references(value)
    elif isinstance(node, list):
        for value in node:
            yield from _references(value)
