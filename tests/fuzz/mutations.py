"""Valid requests made wrong, each a function of its seed: JSON values, protobuf messages, bytes."""

from __future__ import annotations

import copy
import json
import struct
from collections.abc import Callable
from random import Random
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

_NUMBERS = (0, 1, -1, 2**31, 2**32, 2**53 + 1, 2**63, 2**64, -(2**63) - 1, 10**400, 0.5, -0.0, 16.0, 1e10, 1e308)
_UNDEFINED = (float("nan"), float("inf"), float("-inf"))
_MAX_DEPTH = 6
"""Of messages within messages that are changed: `RouterMessageBatch` has those of its own kind."""
_TEXTS = ("", "a", " ", "\0", "\ud800", "\udfff\ud800", "🙂" * 50, "\u202e", "16", "NaN", "a" * 20_000, "<|im_end|>")
_PIECES = (
    b"\0",
    b"\r\n",
    b"\r\n\r\n",
    b"\n",
    b" ",
    b":",
    b"\xff" * 8,
    b"%00",
    b"-1",
    b"9" * 40,
    b"{",
    b'"',
    b"\xc3\x28",
)


def nested(depth: int, end: Any = 1) -> Any:
    value = end
    for level in range(depth):
        value = [value] if level % 2 else {"a": value}
    return value


def odd_json(random: Random) -> Any:
    """A value that few fields take."""
    kinds: tuple[Callable[[], Any], ...] = (
        lambda: random.choice(_NUMBERS),
        lambda: random.choice(_UNDEFINED),
        lambda: random.choice(_TEXTS),
        lambda: random.choice((None, True, False)),
        lambda: random.choice(([], {}, [[]], [None], [{}], {"": None}, {"a": []}, [1, "a"])),
        lambda: [random.choice((*_NUMBERS, *_TEXTS)) for _ in range(random.choice((1, 3, 40)))],
        lambda: [random.randrange(-2, 500)] * random.choice((1, 129, 3000)),
        lambda: [random.choice(_TEXTS)] * random.choice((1, 20, 200)),
        lambda: {random.choice(_TEXTS): random.choice(_NUMBERS) for _ in range(5)},
        lambda: {str(random.choice(_NUMBERS)): random.choice(_NUMBERS) for _ in range(5)},
        lambda: nested(random.choice((3, 50, 300))),
    )
    return random.choice(kinds)()


def wrong_json(random: Random, valid: Any) -> bytes:
    """A body that is like `valid` but in one to three places; now and then it is not even JSON."""
    value = copy.deepcopy(valid)
    for _ in range(random.randint(1, 3)):
        value = _changed(random, value)
    text = json.dumps(value)
    if random.random() < 0.1:
        return wrong_bytes(random, text.encode())
    return text.encode()


def _changed(random: Random, value: Any) -> Any:
    """With one change, somewhere in it."""
    if isinstance(value, dict) and value and random.random() < 0.85:
        key = random.choice(list(value))
        choice = random.random()
        if choice < 0.55:
            value[key] = _changed(random, value[key])
        elif choice < 0.7:
            del value[key]
        elif choice < 0.85:
            value[random.choice((*_TEXTS, key.upper(), key + "s"))] = odd_json(random)
        else:
            value[key] = [value[key]]
        return value
    if isinstance(value, list) and value and random.random() < 0.6:
        place = random.randrange(len(value))
        value[place] = _changed(random, value[place])
        return value * random.choice((1, 1, 2, 50))
    return odd_json(random)


def wrong_bytes(random: Random, valid: bytes) -> bytes:
    """Bits turned, pieces put in, taken out, or said twice; or the rest left away."""
    data = bytearray(valid)
    for _ in range(random.randint(1, 4)):
        at = random.randrange(len(data) + 1)
        to = min(len(data), at + random.choice((1, 2, 8, 64)))
        match random.randrange(6):
            case 0 if data:
                data[at % len(data)] ^= 1 << random.randrange(8)
            case 1:
                data[at:at] = random.choice(_PIECES)
            case 2:
                del data[at:to]
            case 3:
                data[at:at] = data[at:to] * random.choice((1, 3, 200))
            case 4:
                data[at:to] = random.randbytes(to - at)
            case _:
                del data[max(at, 1) :]
    return bytes(data)


def wrong_message(random: Random, valid: Message) -> Message:
    """A copy with some fields changed, set or cleared."""
    message = type(valid)()
    message.CopyFrom(valid)
    for _ in range(random.randint(1, 3)):
        _change_field(random, message)
    return message


def wrong_wire(random: Random, valid: Message) -> bytes:
    """A wrong message, or a message that is none."""
    choice = random.random()
    if choice < 0.6:
        return wrong_message(random, valid).SerializeToString()
    if choice < 0.85:
        return wrong_bytes(random, valid.SerializeToString())
    return random.randbytes(random.choice((0, 1, 7, 90)))


def _change_field(random: Random, message: Message, depth: int = 0) -> None:
    if not message.DESCRIPTOR.fields or depth > _MAX_DEPTH:
        return
    set_fields = [field for field, _ in message.ListFields()]
    field: Any = random.choice(set_fields if set_fields and random.random() < 0.6 else message.DESCRIPTOR.fields)
    if random.random() < 0.15:
        message.ClearField(field.name)
    elif field.is_repeated:
        _change_repeated(random, getattr(message, field.name), field, depth)
    elif field.type == FieldDescriptor.TYPE_MESSAGE:
        inner = getattr(message, field.name)
        inner.SetInParent()
        if random.random() < 0.9:
            _change_field(random, inner, depth + 1)
    else:
        setattr(message, field.name, _odd_scalar(random, field))


def _change_repeated(random: Random, values: Any, field: FieldDescriptor, depth: int) -> None:
    entry = field.message_type
    if entry is not None and entry.GetOptions().map_entry:
        key, value = entry.fields
        for _ in range(random.choice((1, 5))):
            values[_odd_scalar(random, key)] = _odd_scalar(random, value)
    elif entry is not None:
        for _ in range(random.choice((1, 2, 40))):
            _change_field(random, values.add(), depth + 1)
    else:
        values.extend(_odd_scalar(random, field) for _ in range(random.choice((1, 2, 300))))


def _odd_scalar(random: Random, field: FieldDescriptor) -> Any:
    kinds = FieldDescriptor
    match field.cpp_type:
        case kinds.CPPTYPE_BOOL:
            return random.random() < 0.5
        case kinds.CPPTYPE_DOUBLE | kinds.CPPTYPE_FLOAT:
            return random.choice((0.0, -0.0, -1.0, 0.5, 1.0, 2.0, 1e10, 1e300, *_UNDEFINED))
        case kinds.CPPTYPE_STRING if field.type == kinds.TYPE_BYTES:
            tokens = struct.pack("<3I", 1, random.choice((7, 127, 4096, 2**31)), 2**32 - 1)
            return random.choice((b"", b"\0", tokens, tokens[:4], random.randbytes(32), b"\x07\0\0\0" * 500))
        case kinds.CPPTYPE_STRING:
            return random.choice([text for text in _TEXTS if text.isascii() or "🙂" in text])
        case kinds.CPPTYPE_ENUM:
            return random.choice((0, 1, 2, 99))
        case _:
            signed = field.cpp_type in (kinds.CPPTYPE_INT32, kinds.CPPTYPE_INT64)
            bits = 32 if field.cpp_type in (kinds.CPPTYPE_INT32, kinds.CPPTYPE_UINT32) else 64
            top = 2 ** (bits - signed) - 1
            below = (-1, -top - 1) if signed else ()
            return random.choice((0, 1, 2, 7, 129, 2**16, 2**31 - 1, top, top // 2 + 1, *below))
