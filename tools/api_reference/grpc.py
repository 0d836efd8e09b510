"""The gRPC API: the requests of `baton.v1.Generation`, with the names of their fields over HTTP."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from baton.v1 import generation_pb2
from router.http.descriptions import FIELDS
from tools.api_reference.covered import ROOT, Covered
from tools.api_reference.tables import code, table, test_name

SERVICE = "Generation"
SECTION = "grpc."
"""How the sections of tests/docs/covered.toml for messages begin: some have the names of schemas."""
_OTHER_NAMES = {
    "timeout_s": "timeout",
    "prompt_tokens": "prompt",
    "chat": "messages",
    "token_ids": "tokens",
}
"""Fields whose names over HTTP differ."""
_KINDS = {
    getattr(FieldDescriptor, f"TYPE_{name.upper()}"): name
    for name in ("double", "float", "int32", "int64", "uint32", "uint64", "bool", "string", "bytes")
}
_COMMENT = re.compile(r"\b(\w+) = \d+;[ \t]*//[ \t]*(.*)")
_MESSAGE = re.compile(r"^message (\w+) \{(.*?)^\}", re.MULTILINE | re.DOTALL)


def methods() -> str:
    service = generation_pb2.DESCRIPTOR.services_by_name[SERVICE]
    rows = [(code(method.name), code(method.input_type.name), _answer(method)) for method in service.methods]
    return table(("method", "request", "answer"), rows)


def messages(http_names: Collection[str], covered: Covered) -> Iterator[str]:
    """A section for each message that a client sends. `http_names`: of the fields over HTTP."""
    comments = _comments()
    for message in _requests():
        rows = []
        for field in message.fields:
            test = covered.test_of(SECTION + message.name, field.name, shared=False)
            named = _http_name(field, http_names)
            meaning = comments.get((message.name, field.name)) or _meaning_over_http(message, field, named)
            rows.append((code(field.name), _kind(field), code(named), meaning, test_name(test)))
        if rows:
            yield f"### {message.name} (gRPC)\n\n{table(('field', 'type', 'over HTTP', 'meaning', 'test'), rows)}"


def _answer(method: Any) -> str:
    answer = code(method.output_type.name)
    return f"stream of {answer}" if method.server_streaming else answer


def _requests() -> list[Descriptor]:
    """What methods take, and the messages within."""
    service = generation_pb2.DESCRIPTOR.services_by_name[SERVICE]
    found = [method.input_type for method in service.methods]
    for message in found:  # grows meanwhile
        inner = [field.message_type for field in message.fields if field.message_type and not _is_map(field)]
        found += [kind for kind in inner if kind not in found]
    return found


def _is_map(field: FieldDescriptor) -> bool:
    return bool(field.message_type and field.message_type.GetOptions().map_entry)


def _kind(field: FieldDescriptor) -> str:
    if field.message_type and _is_map(field):
        key, value = field.message_type.fields
        return f"map of {_kind(key)} to {_kind(value)}"
    named = field.message_type or field.enum_type
    kind = named.name if named else _KINDS[field.type]
    return f"list of {kind}" if field.is_repeated else kind


def _http_name(field: FieldDescriptor, http_names: Collection[str]) -> str:
    name = _OTHER_NAMES.get(field.name, field.name)
    return name if name in http_names else ""


def _meaning_over_http(message: Descriptor, field: FieldDescriptor, named: str) -> str:
    text = FIELDS.get(f"{message.name}.{field.name}") or FIELDS.get(named, "")
    return text.partition("; unset: ")[0]


def _comments() -> dict[tuple[str, str], str]:
    """What follows fields in the .proto files, which descriptors do not keep, by message and field."""
    found: dict[tuple[str, str], str] = {}
    for path in sorted((ROOT / "proto" / "baton" / "v1").glob("*.proto")):
        for message, body in _MESSAGE.findall(path.read_text()):
            found |= {(message, name): text.strip() for name, text in _COMMENT.findall(body)}
    return found
