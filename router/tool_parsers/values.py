"""Values of arguments that models do not write as JSON: Python literals, and text whose type the tool's schema says."""

from __future__ import annotations

import ast
import json
import math
from typing import Any

_NAMES = {"true": True, "false": False, "null": None}
_MAX_CHARS = 65_536
"""Of one text that is parsed at once: about 20 ms."""
_MAX_BRACKETS = 64
_BROKEN = (SyntaxError, ValueError, RecursionError, MemoryError)


def dump(value: Any) -> str:
    """JSON. Raises ValueError for what JSON cannot say: infinities, halves of surrogate pairs."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    text.encode()
    return text


def call_arguments(text: str) -> str | None:
    """The JSON of a Python call's arguments, `a=1, b="x"`; None: they are not literals with names."""
    if len(text) > _MAX_CHARS:
        return None
    try:
        call = ast.parse(f"f({text}\n)", mode="eval").body
        if not isinstance(call, ast.Call) or call.args or not isinstance(call.func, ast.Name):
            return None
        return dump({_name(keyword): _literal(keyword.value) for keyword in call.keywords})
    except _BROKEN:
        return None


def typed(text: str, kinds: frozenset[str]) -> str:
    """The JSON of an argument's text, of one of the types that its schema allows; a string if it is none of them, or if
    there are none."""
    if text.strip().lower() == "null":
        return "null"
    if kinds and "string" not in kinds and len(text) <= _MAX_CHARS:
        for read in (_json_value, _python_value):
            try:
                value = read(text)
                if _is_one_of(value, kinds):
                    return dump(value)
            except _BROKEN:
                continue
    return dump(text)


def _json_value(text: str) -> object:
    return json.loads(text)


def _python_value(text: str) -> object:
    """As models that know Python write it: `True`, `{'a': 1}`."""
    lowered = text.strip().lower()
    if lowered in _NAMES:
        return _NAMES[lowered]
    if text.count("[") + text.count("{") + text.count("(") > _MAX_BRACKETS:
        raise ValueError("too deep")
    return _literal(ast.parse(text.strip(), mode="eval").body)


def _is_one_of(value: object, kinds: frozenset[str]) -> bool:
    if isinstance(value, bool):
        return "boolean" in kinds
    if isinstance(value, int):
        return bool(kinds & {"integer", "number"})
    if isinstance(value, float):
        return "number" in kinds and math.isfinite(value)
    if isinstance(value, dict):
        return "object" in kinds
    return isinstance(value, list) and "array" in kinds


def _name(keyword: ast.keyword) -> str:
    if keyword.arg is None:
        raise ValueError("`**` is not an argument")
    return keyword.arg


def _literal(node: ast.expr) -> object:
    match node:
        case ast.Constant(value=str() | int() | float() | None as value):
            return value
        case ast.Name(id=name) if name in _NAMES:
            return _NAMES[name]
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
            return -number
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_literal(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            return {_key(key): _literal(value) for key, value in zip(keys, values, strict=True)}
    raise ValueError("not a literal")


def _key(node: ast.expr | None) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    raise ValueError("not a name")
