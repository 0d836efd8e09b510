"""Pieces that the parts of the OpenAPI document share."""

from __future__ import annotations

from typing import Any


def object_of(properties: dict[str, Any], *optional: str) -> dict[str, Any]:
    """The schema of an object that has all of these, but for some that are `optional`."""
    required = [name for name in properties if name not in optional]
    return {"type": "object", "properties": properties, "required": required}


def in_path(name: str) -> dict[str, Any]:
    """A part of a path that is a parameter."""
    schema = {"type": "string", "minLength": 1}
    return {"parameters": [{"name": name, "in": "path", "required": True, "schema": schema}]}
