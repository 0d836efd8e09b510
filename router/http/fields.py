"""The kinds of fields in request bodies: their values, their limits, and their part of the API's description."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, PlainValidator, WithJsonSchema

from baton.sampling import MAX_BIAS, MAX_LOGIT_BIAS, RANGES
from router.http.text_parts import parts_schema, read_text
from router.limits import (
    MAX_BAD_WORDS,
    MAX_NAME_CHARS,
    MAX_ROLE_CHARS,
    MAX_STOP_STRINGS,
    MAX_TEMPLATE_CHARS,
    MAX_TEMPLATE_DEPTH,
    MAX_TEMPLATE_VALUES,
)

CONFIG = ConfigDict(strict=True, extra="allow", frozen=True)

_FUNCTION_NAME = r"^[a-zA-Z0-9_-]{1,128}$"
_MAX_ID_DIGITS = 10
_MAX_NAMED = 8
"""Of the wrong names in an object, so many are told."""


def between(least: float | None = None, most: float | None = None) -> Any:
    """An optional number. The range is only described here: code that also knows the model checks it."""
    extra = {"minimum": least, "maximum": most}
    return Field(None, json_schema_extra={name: value for name, value in extra.items() if value is not None})


def sampling(name: str, default: Any = None) -> Any:
    """A number of the parameter's range, for the API's description likewise. A default of `...` makes it required."""
    valid = RANGES[name]
    least = "exclusiveMinimum" if valid.excludes_least else "minimum"
    return Field(default, json_schema_extra={least: valid.least, "maximum": valid.most})


def _whole(value: Any) -> Any:
    """JSON has one kind of number: 16.0 is 16."""
    return int(value) if type(value) is float and value.is_integer() else value


def _strings(value: Any) -> Any:
    """Read one string, a list of strings, or null."""
    if value is None:
        return ()
    return _texts([value] if isinstance(value, str) else value, MAX_STOP_STRINGS, "a string or a list of strings")


def _words(value: Any) -> Any:
    """Read a list of strings, or null."""
    return () if value is None else _texts(value, MAX_BAD_WORDS, "a list of strings")


def _texts(value: Any, most: int, kind: str) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise ValueError(f"must be {kind}")
    if len(value) > most:
        raise ValueError(f"must have at most {most} strings, not {len(value)}")
    if not all(isinstance(text, str) for text in value):
        raise ValueError(f"must be {kind}")
    return tuple(dict.fromkeys(value))


def _prompts(value: Any) -> Any:
    """Read a text, token ids, or a list of either."""
    if isinstance(value, str):
        return (value,)
    if isinstance(value, list) and value:
        if is_ids(value):
            return (tuple(value),)
        if all(isinstance(item, str) or (isinstance(item, list) and is_ids(item)) for item in value):
            return tuple(item if isinstance(item, str) else tuple(item) for item in value)
    raise ValueError("must be a string, a list of token ids, or a list of either")


def is_ids(value: list[Any]) -> bool:
    """Whether they look like token ids, at least one."""
    return bool(value) and all(type(item) is int for item in value)


def _message_text(value: Any) -> Any:
    """Read a string, a list of text parts, or null."""
    if value is None or isinstance(value, str):
        return value or ""
    return read_text(value, _TEXT_PARTS)


def _function_name(value: str) -> str:
    if not re.fullmatch(_FUNCTION_NAME[1:-1], value):
        raise ValueError(f"must be 1 to 128 letters, digits, `_` or `-`, not {value[:129]!r}")
    return value


def _text_or_object(value: Any) -> Any:
    if not isinstance(value, str | dict):
        raise ValueError("must be a string or an object")
    return value


def _biases(value: Any) -> Any:
    """Read an object whose names are token ids."""
    if not isinstance(value, dict):
        return value
    if len(value) > MAX_LOGIT_BIAS:
        raise ValueError(f"must have at most {MAX_LOGIT_BIAS} entries, not {len(value)}")
    wrong = [name for name in value if not (name.isascii() and name.isdecimal() and len(name) <= _MAX_ID_DIGITS)]
    if wrong:
        named = ", ".join([repr(name[:64]) for name in wrong[:_MAX_NAMED]])
        raise ValueError(f"names must be token ids, integers of 0 or more, not {named}")
    return {int(name): bias for name, bias in value.items()}


@dataclass(frozen=True, slots=True)
class ValueLimits:
    """Of JSON for a chat template: values of all kinds, characters of names and texts, and nesting."""

    num_values: int
    num_chars: int
    depth: int


_TEMPLATE_LIMITS = ValueLimits(MAX_TEMPLATE_VALUES, MAX_TEMPLATE_CHARS, MAX_TEMPLATE_DEPTH)


def bound_values(value: Any, limits: ValueLimits) -> Any:
    """Bound the values that a template works on."""
    num_values, num_chars = 0, 0
    level = [value]
    for _ in range(limits.depth):
        inner, chars = _inner(level)
        num_values += len(inner)
        num_chars += chars
        if num_values > limits.num_values:
            raise ValueError(f"must have at most {limits.num_values} names and values")
        if num_chars > limits.num_chars:
            raise ValueError(f"must have at most {limits.num_chars} characters")
        if not all(map(math.isfinite, [item for item in inner if type(item) is float])):
            raise ValueError("must have only numbers that can be read")
        level = inner
    if level:
        raise ValueError(f"must be nested at most {limits.depth - 1} deep")
    return value


def num_chars(value: Any) -> int:
    """The characters of all names and texts in JSON, and one more for each value."""
    total, level = 0, [value]
    while level:
        inner, chars = _inner(level)
        total += chars + len(level)
        level = inner
    return total


def _inner(level: list[Any]) -> tuple[list[Any], int]:
    """What is within these values, and the characters of those that are texts."""
    inner: list[Any] = []
    num_chars = 0
    for item in level:
        if isinstance(item, dict):
            inner += [*item, *item.values()]
        elif isinstance(item, list):
            inner += item
        elif isinstance(item, str):
            num_chars += len(item)
    return inner, num_chars


def _template_values(value: Any) -> Any:
    return bound_values(value, _TEMPLATE_LIMITS)


_STRING = {"type": "string"}
_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""The types of parts of messages that have a text, as vLLM takes them, and in which field."""
_BIASES = {
    "type": "object",
    "additionalProperties": {"type": "number", "minimum": -MAX_BIAS, "maximum": MAX_BIAS},
    "propertyNames": {"pattern": "^[0-9]{1,10}$"},
    "maxProperties": MAX_LOGIT_BIAS,
}
_STOPS = {"type": "array", "items": {"type": "string", "minLength": 1}, "maxItems": MAX_STOP_STRINGS}
_WORDS = {"type": "array", "items": {"type": "string", "pattern": "\\S"}, "maxItems": MAX_BAD_WORDS}
_PROMPTS = {"anyOf": [_STRING, _IDS, {"type": "array", "items": {"anyOf": [_STRING, _IDS]}, "minItems": 1}]}

Whole = Annotated[int, BeforeValidator(_whole)]
Name = Annotated[str, Field(max_length=MAX_NAME_CHARS)]
FunctionName = Annotated[
    str, AfterValidator(_function_name), WithJsonSchema({"type": "string", "pattern": _FUNCTION_NAME})
]
Role = Annotated[str, Field(max_length=MAX_ROLE_CHARS, examples=["user", "assistant", "system", "tool"])]
Strings = Annotated[
    tuple[str, ...],
    PlainValidator(_strings),
    WithJsonSchema({"anyOf": [{"type": "string", "minLength": 1}, _STOPS, {"type": "null"}]}),
]
Words = Annotated[tuple[str, ...], PlainValidator(_words), WithJsonSchema({"anyOf": [_WORDS, {"type": "null"}]})]
Prompts = Annotated[tuple[str | tuple[int, ...], ...], PlainValidator(_prompts), WithJsonSchema(_PROMPTS)]
Text = Annotated[
    str,
    PlainValidator(_message_text),
    WithJsonSchema({"anyOf": [_STRING, parts_schema(_TEXT_PARTS), {"type": "null"}]}),
]
TextOrObject = Annotated[
    str | dict[str, Any],
    PlainValidator(_text_or_object),
    WithJsonSchema({"anyOf": [_STRING, {"type": "object", "additionalProperties": True}]}),
]
Biases = Annotated[dict[int, float], BeforeValidator(_biases), WithJsonSchema(_BIASES)]
TemplateValues = Annotated[dict[str, Any], BeforeValidator(_template_values)]
