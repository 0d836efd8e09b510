"""Answers of the Responses API, for `/openapi.json`."""

from __future__ import annotations

from router.http.schema_parts import in_path, object_of

_STRING = {"type": "string"}
_OBJECT = {"type": "object"}
_OBJECT_OR_NULL = {"type": ["object", "null"]}
_STRING_OR_NULL = {"type": ["string", "null"]}
_ITEMS = {"type": "array", "items": object_of({"id": _STRING, "type": _STRING})}

RESPONSE = object_of(
    {
        "id": _STRING,
        "object": {"const": "response"},
        "created_at": {"type": "integer"},
        "status": {"enum": ["completed", "incomplete", "in_progress", "failed", "cancelled"]},
        "model": _STRING,
        "output": _ITEMS,
        "incomplete_details": _OBJECT_OR_NULL,
        "error": _OBJECT_OR_NULL,
        "usage": _OBJECT,
        "timings": _OBJECT,
    },
    "timings",
)
DELETED = object_of({"id": _STRING, "object": {"const": "response"}, "deleted": {"const": True}})
COUNT = object_of({"object": {"const": "response.input_tokens"}, "input_tokens": {"type": "integer"}})
PAGE_OF_ITEMS = object_of(
    {
        "object": {"const": "list"},
        "data": _ITEMS,
        "first_id": _STRING_OR_NULL,
        "last_id": _STRING_OR_NULL,
        "has_more": {"type": "boolean"},
    }
)
RESPONSE_ID = in_path("response_id")
