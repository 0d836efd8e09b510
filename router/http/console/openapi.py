"""The console's paths in the OpenAPI document."""

from __future__ import annotations

import dataclasses

from baton.telemetry.pools import BOTTLENECKS
from router.http.node_openapi import NODE, NODES
from router.http.schema_parts import in_path, object_of
from router.requests.kv_flows import KvFlow
from router.requests.request_state import AttemptState

_COUNT = {"type": "integer", "minimum": 0}
_TEXT = {"type": "string"}

_HISTOGRAM = object_of(
    {"bounds": {"type": "array", "items": {"type": "number"}}, "counts": {"type": "array", "items": _COUNT}}
)
_FLOW = {field.name: _TEXT if field.type == "str" else _COUNT for field in dataclasses.fields(KvFlow)}
_WORK = object_of(
    {
        "requests": object_of({state.value: _COUNT for state in AttemptState}),
        "num_ended": {"type": "object", "additionalProperties": _COUNT},
        "num_prompt_tokens": _COUNT,
        "num_generation_tokens": _COUNT,
        "first_token_s": _HISTOGRAM,
        "inter_token_s": _HISTOGRAM,
        "num_tokens_by_node": {"type": "object", "additionalProperties": _COUNT},
        "flows": {"type": "array", "items": object_of(_FLOW)},
    }
)
_NODE = object_of({**NODE["properties"], "num_seats": {"type": ["integer", "null"]}})
SNAPSHOT = object_of(
    {
        "version": _TEXT,
        "at": {"type": "number"},
        "is_ready": {"type": "boolean"},
        "status": _TEXT,
        "has_admin": {"type": "boolean"},
        "models": {"type": "array", "items": _TEXT},
        "bottleneck": {"enum": list(BOTTLENECKS)},
        "num_workers": _COUNT,
        "num_workers_answered": _COUNT,
        **NODES["properties"],
        "nodes": {"type": "array", "items": _NODE},
        "work": _WORK,
    }
)
FILE = in_path("file")
