"""Structural tags: formats that say which text is free, and which must be a JSON schema, a tag, and so on.

The JSON form is vLLM's and XGrammar's (https://xgrammar.mlc.ai/docs/tutorials/structural_tag.html): the newer one with
`format`, and the older one with `structures` and `triggers`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from baton.errors import InvalidRequest

Format = dict[str, Any]

PARAM = "structured_outputs"
MAX_FORMATS = 4096
MAX_DEPTH = 32

_STRUCTURE = ("begin", "schema", "end")


def load_structural_tag(text: str) -> Format:
    """The checked format that the JSON of a structural tag describes. Raises InvalidRequest."""
    try:
        tag = json.loads(text)
        json.dumps(tag, ensure_ascii=False).encode()  # raises for half of a surrogate pair, which no text has
    except (ValueError, RecursionError):
        tag = None
    if not isinstance(tag, dict):
        _refuse("must be a JSON object")
    wanted = _newer(tag) if "format" in tag else _older(tag)
    _Checker().check(wanted, 0)
    return wanted


def _newer(tag: Mapping[str, Any]) -> Any:
    _only(tag, ("type", "format"), "the object")
    return tag["format"]


def _older(tag: Mapping[str, Any]) -> Format:
    _only(tag, ("type", "structures", "triggers"), "the object")
    structures = tag.get("structures")
    if not isinstance(structures, list):
        _refuse("needs `format`, or `structures` and `triggers`")
    tags: list[Format] = []
    for structure in structures:
        if not isinstance(structure, dict):
            _refuse("`structures` must be a list of objects")
        _only(structure, _STRUCTURE, "a structure")
        content = {"type": "json_schema", "json_schema": structure.get("schema", {})}
        tags.append(_tag(structure.get("begin"), content, structure.get("end")))
    return {"type": "triggered_tags", "triggers": tag.get("triggers"), "tags": tags}


def _tag(begin: Any, content: Format, end: Any) -> Format:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


class _Checker:
    """Checks the types and names of all fields, so that later code can rely on them."""

    def __init__(self) -> None:
        self._num_formats = 0

    def check(self, wanted: Any, depth: int) -> None:
        kind = wanted.get("type") if isinstance(wanted, dict) else None
        if not isinstance(kind, str) or kind not in _FIELDS:
            shown = repr(kind[:64]) if isinstance(kind, str) else "unknown"
            _refuse(f"a format of type {shown} is not supported: {', '.join(_FIELDS)} are")
        self._num_formats += 1
        if self._num_formats > MAX_FORMATS or depth > MAX_DEPTH:
            _refuse(f"must have at most {MAX_FORMATS} formats, nested at most {MAX_DEPTH} deep")
        fields = _FIELDS[kind]
        _only(wanted, ("type", *fields), f"a format of type {kind}")
        for name, (is_valid, what) in fields.items():
            if name not in wanted and (is_valid is _is_flag):
                continue
            if not is_valid(wanted.get(name)):
                _refuse(f"`{name}` of a format of type {kind} must be {what}")
        for inner in self._inner(wanted):
            self.check(inner, depth + 1)
        if "tags" in wanted and not all(tag["type"] == "tag" for tag in wanted["tags"]):
            _refuse("`tags` must be formats of type tag")
        if kind == "triggered_tags":
            for tag in wanted["tags"]:
                trigger_of(wanted, tag)

    def _inner(self, wanted: Format) -> Sequence[Any]:
        if "content" in wanted:
            return [wanted["content"]]
        inner: Sequence[Any] = wanted.get("elements") or wanted.get("tags") or ()
        return inner


def trigger_of(triggered: Format, tag: Format) -> str:
    """The trigger with which the tag begins. Raises InvalidRequest."""
    begin: str = tag["begin"]
    trigger: str | None = next((t for t in triggered["triggers"] if begin.startswith(t)), None)
    if trigger is None:
        _refuse(f"a tag begins with {begin[:64]!r}, which none of the triggers begins")
    return trigger


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_some_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


def _is_end(value: Any) -> bool:
    return _is_text(value) or (_is_list(value) and all(map(_is_text, value)))


def _is_texts(value: Any) -> bool:
    return _is_list(value) and all(map(_is_some_text, value))


def _is_list(value: Any) -> bool:
    return isinstance(value, list) and bool(value)


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def _is_schema(value: Any) -> bool:
    return isinstance(value, (dict, bool))


def _is_object(value: Any) -> bool:
    return isinstance(value, dict)


_Field = tuple[Callable[[Any], bool], str]
_TEXT: _Field = (_is_text, "a string")
_SOME_TEXT: _Field = (_is_some_text, "a string that is not empty")
_LIST: _Field = (_is_list, "a list that is not empty")
_FLAG: _Field = (_is_flag, "a boolean")
_FIELDS: Mapping[str, Mapping[str, _Field]] = {
    "const_string": {"value": _TEXT},
    "json_schema": {"json_schema": (_is_schema, "a JSON schema")},
    "any_text": {},
    "regex": {"pattern": _SOME_TEXT},
    "grammar": {"grammar": _SOME_TEXT},
    "sequence": {"elements": _LIST},
    "or": {"elements": _LIST},
    "tag": {"begin": _TEXT, "content": (_is_object, "a format"), "end": (_is_end, "a string or a list of strings")},
    "triggered_tags": {
        "triggers": (_is_texts, "a list of strings that are not empty"),
        "tags": _LIST,
        "at_least_one": _FLAG,
        "stop_after_first": _FLAG,
    },
    "tags_with_separator": {"tags": _LIST, "separator": _TEXT, "at_least_one": _FLAG, "stop_after_first": _FLAG},
}
"""The fields of each type of format; flags may be missing."""


def _only(given: Mapping[str, Any], known: Sequence[str], where: str) -> None:
    for name in given:
        if name not in known:
            _refuse(f"`{str(name)[:64]}` of {where} is not supported")


def _refuse(why: str) -> NoReturn:
    raise InvalidRequest(f"structured_outputs: structural_tag: {why}", PARAM)
