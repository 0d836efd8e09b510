"""Turns JSON into Python values without one long call into C.

Such a call keeps the interpreter's lock: 4 MB of `[[],[],...` stop all other threads for a second. Few bodies have so
much structure, so the fast parser reads most of them. The others go to the standard library's parser in its Python
form, which is 20 times slower but lets other threads run every 5 ms.
"""

from __future__ import annotations

import codecs
import json
import json.decoder
import json.scanner
from typing import Any

import pydantic_core

from baton.errors import InvalidRequest

_FAST_VALUES = 65_536
"""The fast parser reads so many commas and brackets in less than 50 ms, whatever their kind."""
_MAX_CONTAINERS = 262_144
"""Lists and objects in one body. Brackets within texts count too; even the largest texts have far fewer."""
_MAX_NAMES = 4096
"""Of one object."""


def parse_json(body: bytes) -> Any:
    """Raises InvalidRequest. A mark of the byte order, with which some programs begin their files, is passed over."""
    body = body.removeprefix(codecs.BOM_UTF8)
    num_containers = body.count(b"[") + body.count(b"{")
    if num_containers > _MAX_CONTAINERS:
        raise InvalidRequest(f"The request body has {num_containers} brackets, of at most {_MAX_CONTAINERS}.")
    try:
        if num_containers + body.count(b",") <= _FAST_VALUES:
            return pydantic_core.from_json(body)
        return _PythonDecoder().decode(body.decode())
    except ValueError as error:  # json's and Unicode's too
        raise InvalidRequest(f"The request body is not valid JSON: {error}") from None
    except RecursionError:
        raise InvalidRequest("The request body is not valid JSON: it is nested too deeply") from None


def is_quick(text: str) -> bool:
    """Whether the fast parser reads a text of a client without keeping other threads waiting."""
    return text.count("[") + text.count("{") + text.count(",") <= _FAST_VALUES


def parse_begun(text: str) -> dict[str, Any]:
    """What there is of a JSON object that breaks off, as a model may write it; nothing if that cannot be told. One long
    call: see `is_quick`."""
    try:
        found = pydantic_core.from_json(text, allow_partial="trailing-strings")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


class _PythonDecoder(json.JSONDecoder):
    """The standard decoder with Python functions in place of those in C, chosen in the way of `json.scanner`."""

    def __init__(self) -> None:
        super().__init__(object_pairs_hook=_object)
        self.parse_object = json.decoder.JSONObject  # type: ignore[attr-defined]  # unknown to the stubs
        self.parse_array = json.decoder.JSONArray  # type: ignore[attr-defined]  # unknown to the stubs
        self.parse_string = _string
        self.scan_once = json.scanner.py_make_scanner(self)  # type: ignore[attr-defined]  # unknown to the stubs


def _string(text: str, end: int, strict: bool) -> tuple[str, int]:
    value, end = json.decoder.scanstring(text, end, strict)  # type: ignore[attr-defined]  # unknown to the stubs
    value.encode()  # raises for half of a surrogate pair
    return value, end


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(pairs) > _MAX_NAMES:
        raise ValueError(f"an object has more than {_MAX_NAMES} names")
    "".join(name for name, _ in pairs).encode()
    return dict(pairs)
