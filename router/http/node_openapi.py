"""`/admin/nodes` and `/debug/nodes` in the OpenAPI document."""

from __future__ import annotations

import dataclasses
from typing import Any

from baton.node_info import NodeRole
from router.http.schema_parts import in_path, object_of
from router.nodes.report import NodeLoad, NodeReport, NodeState, UnusedPair

_LOAD_OF_NODE = {name: {"type": "integer"} for name in (field.name for field in dataclasses.fields(NodeLoad))}
_NODE_KINDS: dict[str, dict[str, Any]] = {
    "address": {"type": "string"},
    "role": {"enum": [role.value for role in NodeRole]},
    "state": {"enum": [state.value for state in NodeState]},
    "sources": {"type": "array", "items": {"type": "string"}},
    "load": {"type": ["object", "null"], "properties": _LOAD_OF_NODE, "required": list(_LOAD_OF_NODE)},
}
_NODE_FIELDS = [field.name for field in dataclasses.fields(NodeReport)]
NODE = object_of({name: _NODE_KINDS.get(name, {"type": ["string", "null"]}) for name in _NODE_FIELDS})
ADMIN_NODES = object_of({"nodes": {"type": "array", "items": NODE}})
_UNPAIRED = object_of({field.name: {"type": "string"} for field in dataclasses.fields(UnusedPair)})
NODES = object_of(
    {
        "nodes": {"type": "array", "items": NODE},
        "unpaired": {"type": "array", "items": _UNPAIRED},
        "problems": {"type": "array", "items": {"type": "string"}},
    }
)
ADMIN_ERRORS = {401: "The key of the admin API is missing or wrong", 404: "No such node, or no --admin-api-key"}
NAMED_NODE_ERRORS = {400: "The id is that of several nodes", **ADMIN_ERRORS}
NODE_NAME = in_path("node")
