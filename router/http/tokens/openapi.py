"""The routes of tokens in the OpenAPI document: their answers."""

from __future__ import annotations

from typing import Any

from router.http.schema_parts import object_of

_STRING = {"type": "string"}
_INTEGER = {"type": "integer"}
_OBJECT = {"type": "object"}
_CHOICE = object_of(
    {
        "index": _INTEGER,
        "logprobs": {"type": ["object", "null"]},
        "finish_reason": {"type": ["string", "null"]},
        "token_ids": {"type": "array", "items": _INTEGER},
    }
)
ANSWER = object_of(
    {
        "request_id": _STRING,
        "model": _STRING,
        "created": _INTEGER,
        "choices": {"type": "array", "items": _CHOICE, "minItems": 1},
        "usage": _OBJECT,
        "timings": _OBJECT,
        "prompt_logprobs": {"type": ["array", "null"]},
        "kv_transfer_params": {"type": "null"},
    },
    "timings",
)
RENDERED: dict[str, Any] = {"$ref": "#/components/schemas/TokensRequest"}
ALL_RENDERED: dict[str, Any] = {"type": "array", "items": RENDERED, "minItems": 1}
