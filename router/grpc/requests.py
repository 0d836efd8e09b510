"""Counts the fields of gRPC requests before they are parsed.

Protobuf parses in one call that keeps the interpreter's lock, and an empty message in a list takes two bytes: 8 MB of
them stop the router for a second. A message with no more fields than allowed is parsed in milliseconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from baton.errors import InvalidRequest
from baton.logits_processors import MAX_LOGITS_PROCESSORS
from baton.sampling import MAX_ALLOWED_TOKEN_IDS, MAX_LOGIT_BIAS, MAX_STOP_TOKEN_IDS
from router.limits import MAX_BAD_WORDS, MAX_MESSAGES, MAX_STOP_STRINGS

M = TypeVar("M", bound=Message)

_MAX_FIELDS = MAX_STOP_STRINGS + MAX_BAD_WORDS + MAX_LOGIT_BIAS + MAX_STOP_TOKEN_IDS + MAX_LOGITS_PROCESSORS + 64
_MAX_IDS = {"stop_token_ids": MAX_STOP_TOKEN_IDS, "allowed_token_ids": MAX_ALLOWED_TOKEN_IDS}
_MAX_VARINT_BYTES = 10
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


def parse_request(kind: type[M], data: bytes) -> M:
    """Raises InvalidRequest."""
    chat = kind.DESCRIPTOR.fields_by_name.get("chat")
    ids = {field.number: name for name, field in kind.DESCRIPTOR.fields_by_name.items() if name in _MAX_IDS}
    try:
        num_messages = 0
        for num_fields, (number, start, end) in enumerate(_fields(data, 0, len(data))):
            if num_fields == _MAX_FIELDS:
                raise InvalidRequest(f"the request has more than {_MAX_FIELDS} fields")
            name = ids.get(number)
            if name is not None and end - start > _MAX_IDS[name] * _MAX_VARINT_BYTES:
                raise InvalidRequest(f"{name} must have at most {_MAX_IDS[name]} ids", name)
            if chat is not None and number == chat.number:
                for _ in _fields(data, start, end):
                    num_messages += 1
                    if num_messages > MAX_MESSAGES:
                        raise InvalidRequest(f"chat must have at most {MAX_MESSAGES} messages", chat.name)
        return kind.FromString(data)
    except (DecodeError, IndexError, ValueError) as error:
        raise InvalidRequest(f"the request is not a {kind.DESCRIPTOR.full_name}: {error}") from None


def _fields(data: bytes, at: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Number, begin and end of each field's content. Raises IndexError or ValueError if there is no field."""
    while at < end:
        tag, at = _varint(data, at)
        wire_type = tag & 7
        if wire_type == _BYTES:
            size, at = _varint(data, at)
        elif wire_type == _VARINT:
            size = _varint(data, at)[1] - at
        elif wire_type in (_FIXED32, _FIXED64):
            size = 4 if wire_type == _FIXED32 else 8
        else:
            raise ValueError("a group, which no message here has")
        if at + size > end:
            raise ValueError("it is cut off")
        yield tag >> 3, at, at + size
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """The number, and where it ends."""
    value = 0
    for shift in range(0, 7 * _MAX_VARINT_BYTES, 7):
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise ValueError("a number has more than 10 bytes")
