"""`/debug/requests` in the OpenAPI document."""

from __future__ import annotations

from typing import Any

from baton.telemetry.timeline import STAGES
from router.http.debug_requests import DEFAULT_LIMIT, MAX_LIMIT
from router.http.schema_parts import in_path, object_of

_SECONDS = {"type": "number", "minimum": 0}
_NULLABLE = {"type": ["string", "null"]}
_SUMMARY: dict[str, Any] = {
    "request_id": {"type": "string"},
    "model": {"type": "string"},
    "is_live": {"type": "boolean"},
    "received_at": {"type": "string"},
    "first_token_s": {"type": ["number", "null"]},
    "total_s": _SECONDS,
    "num_prompt_tokens": {"type": "integer"},
    "num_output_tokens": {"type": "integer"},
    "num_attempts": {"type": "integer"},
    "prefill_node": _NULLABLE,
    "decode_node": _NULLABLE,
    "error_code": _NULLABLE,
    "stages_s": {"type": "object", "properties": dict.fromkeys(STAGES, _SECONDS), "additionalProperties": False},
}
_TIMELINE: dict[str, Any] = {
    **_SUMMARY,
    "num_samples": {"type": "integer"},
    "trace_id": _NULLABLE,
    "error": _NULLABLE,
    "read_at_s": _SECONDS,
    "tokenized_at_s": _SECONDS,
    "submitted_at_s": _SECONDS,
    "longest_stage": {"enum": [*STAGES, None]},
    "decode_alone": {"type": ["object", "null"]},
    "attempts": {"type": "array", "items": {"type": "object"}},
}


def _list_of(properties: dict[str, Any]) -> dict[str, Any]:
    return object_of({"requests": {"type": "array", "items": object_of(properties)}})


RECENT = _list_of(_SUMMARY)
TIMELINES = _list_of(_TIMELINE)
_LIMIT = {"type": "integer", "minimum": 1, "maximum": MAX_LIMIT, "default": DEFAULT_LIMIT}
LIMIT = {"parameters": [{"name": "limit", "in": "query", "required": False, "schema": _LIMIT}]}
REQUEST_ID = in_path("request_id")
