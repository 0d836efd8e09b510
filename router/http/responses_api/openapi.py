"""Answers of the Responses API, for `/openapi.json`."""

from __future__ import annotations

from typing import Any

_STRING = {"type": "string"}
_OBJECT = {"type": "object"}
_OBJECT_OR_NULL = {"type": ["object", "null"]}
_ITEMS = {
    "type": "array",
    "items": {"type": "object", "properties": {"id": _STRING, "type": _STRING}, "required": ["id", "type"]},
}

RESPONSE: dict[str, Any] = {
    "type": "object",
    "properties": {
        "id": _STRING,
        "object": {"const": "response"},
        "created_at": {"type": "integer"},
        "status": {"enum": ["completed", "incomplete"]},
        "model": _STRING,
        "output": _ITEMS,
        "incomplete_details": _OBJECT_OR_NULL,
        "error": _OBJECT_OR_NULL,
        "usage": _OBJECT,
        "timings": _OBJECT,
    },
    "required": ["id", "object", "created_at", "status", "model", "output", "incomplete_details", "error", "usage"],
}
DELETED: dict[str, Any] = {
    "type": "object",
    "properties": {"id": _STRING, "object": {"const": "response"}, "deleted": {"const": True}},
    "required": ["id", "object", "deleted"],
}
COUNT: dict[str, Any] = {
    "type": "object",
    "properties": {"object": {"const": "response.input_tokens"}, "input_tokens": {"type": "integer"}},
    "required": ["object", "input_tokens"],
}
PAGE_OF_ITEMS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "object": {"const": "list"},
        "data": _ITEMS,
        "first_id": {"type": ["string", "null"]},
        "last_id": {"type": ["string", "null"]},
        "has_more": {"type": "boolean"},
    },
    "required": ["object", "data", "first_id", "last_id", "has_more"],
}
RESPONSE_ID: dict[str, Any] = {
    "parameters": [
        {"name": "response_id", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
    ]
}
