"""The routes of SGLang's API in the OpenAPI document: their answers."""

from __future__ import annotations

from typing import Any

from router.http.schema_parts import object_of

_STRING = {"type": "string"}
_INTEGER = {"type": "integer"}
_OBJECT = {"type": "object"}
_IDS = {"type": "array", "items": _INTEGER}
_META = object_of(
    {
        "id": _STRING,
        "finish_reason": {"type": ["object", "null"]},
        "prompt_tokens": _INTEGER,
        "completion_tokens": _INTEGER,
        "cached_tokens": {"type": ["integer", "null"]},
        "weight_version": _STRING,
        "e2e_latency": {"type": "number"},
    },
    "e2e_latency",
)
_ONE = object_of(
    {"text": _STRING, "output_ids": _IDS, "meta_info": _META, "prompt_token_ids": _IDS}, "prompt_token_ids"
)
ANSWER: dict[str, Any] = {"anyOf": [_ONE, {"type": "array", "items": _ONE, "minItems": 1}]}
MODEL_INFO = object_of(
    {
        "model_path": _STRING,
        "tokenizer_path": _STRING,
        "served_model_name": _STRING,
        "is_generation": {"const": True},
        "preferred_sampling_params": {"type": ["object", "null"]},
        "weight_version": _STRING,
        "has_image_understanding": {"const": False},
        "has_audio_understanding": {"const": False},
        "model_type": {"type": "null"},
        "architectures": {"type": "null"},
    }
)
SERVER_INFO = object_of(
    {
        "model_path": _STRING,
        "tokenizer_path": _STRING,
        "served_model_name": _STRING,
        "context_length": _INTEGER,
        "max_req_input_len": _INTEGER,
        "page_size": _INTEGER,
        "version": _STRING,
        "internal_states": {"type": "array", "items": _OBJECT},
    }
)
