"""What a tool's schema says of its arguments: their types and those of what is in them, however it says so."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from urllib.parse import unquote

_ALIASES = {"str": "string", "int": "integer", "float": "number", "bool": "boolean", "dict": "object", "list": "array"}
"""Types that clients write as in Python."""
_KINDS = {
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    dict: "object",
    list: "array",
    type(None): "null",
}
_IMPLIED = {"properties": "object", "items": "array"}
"""Types of what has such a field."""
_CHOICES = ("anyOf", "oneOf", "allOf")
_MAX_PARTS = 32
"""Of one schema, which may refer to itself. All values of an answer are looked up, so this bounds their cost."""
_MAX_VALUES = 256
_MAX_REFERENCE_CHARS = 256


@dataclass(frozen=True, slots=True)
class SchemaPart:
    """A part of the schema `whole`, into which its references point. Clients wrote it: it may be anything."""

    part: object
    whole: object

    def kinds(self) -> frozenset[str]:
        """The types that it allows; none: it says nothing of them."""
        return frozenset(_ALIASES.get(kind, kind) for part in self._parts() for kind in _kinds_said(part))

    def member(self, name: str) -> SchemaPart:
        """What it says of the value of this name."""
        others: object = None
        for part in self._parts():
            properties = part.get("properties")
            if isinstance(properties, Mapping) and name in properties:
                return SchemaPart(properties[name], self.whole)
            others = others or part.get("additionalProperties")
        return SchemaPart(others, self.whole)

    def item(self) -> SchemaPart:
        """What it says of the values in a list."""
        found = (part["items"] for part in self._parts() if "items" in part)
        return SchemaPart(next(found, None), self.whole)

    def _parts(self) -> Iterator[Mapping[str, object]]:
        """The schema, and those that it refers to or is put together from."""
        waiting: list[object] = [self.part]
        for i in range(_MAX_PARTS):
            if i >= len(waiting):
                return
            part = waiting[i]
            if not isinstance(part, Mapping):
                continue
            yield part
            if isinstance(reference := part.get("$ref"), str):
                waiting.append(_referred(reference, self.whole))
            for name in _CHOICES:
                choices = part.get(name)
                waiting += choices[:_MAX_PARTS] if isinstance(choices, list) else ()


def _kinds_said(part: Mapping[str, object]) -> Iterator[str]:
    if "type" in part:
        kind = part["type"]
        yield from (name for name in (kind if isinstance(kind, list) else [kind]) if isinstance(name, str))
        if part.get("nullable") is True:  # as OpenAPI 3.0 says it
            yield "null"
    elif isinstance(values := part.get("enum"), list):
        yield from (_KINDS[type(value)] for value in islice(values, _MAX_VALUES) if type(value) in _KINDS)
    elif "const" in part and type(part["const"]) in _KINDS:
        yield _KINDS[type(part["const"])]
    else:
        yield from (kind for field, kind in _IMPLIED.items() if field in part)


def _referred(reference: str, whole: object) -> object:
    """What `#/$defs/name` points to; None: nothing here."""
    beginning, *steps = unquote(reference).split("/") if len(reference) <= _MAX_REFERENCE_CHARS else [""]
    found = whole if beginning == "#" else None
    for step in steps:
        found = _step(found, step.replace("~1", "/").replace("~0", "~"))
    return found


def _step(found: object, step: str) -> object:
    if isinstance(found, Mapping):
        return found.get(step)
    if isinstance(found, Sequence) and not isinstance(found, str) and step.isdecimal() and int(step) < len(found):
        return found[int(step)]
    return None
