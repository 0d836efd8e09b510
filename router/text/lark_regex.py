"""Lark grammars as regular expressions: a grammar may be one if no rule of it leads back to itself.

Tools get text in a JSON string. llguidance constrains what such a string says by a regular expression, the `pattern` of
its schema, and by nothing else.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping

from baton.errors import InvalidRequest
from baton.structured_output.json_pattern import REGEX_PART

_MAX_DEPTH = 64
"""Of rules within rules."""
_MAX_CHARS = 32_768
"""Of an expression: a rule of two that are the same has twice their length. That of Codex's patches has 650."""

_TOKEN = re.compile(
    r"""(?P<blank>\s+|(?:\#|//)[^\n]*|->\s*\w+)
    | "(?P<string>(?:\\.|[^"\\\n])*)"(?P<ignores_case>i?)
    | /(?P<regex>(?:\\.|[^/\\])+)/(?P<flags>[imsux]*)(?!l)
    | %import\s+common(?:\.(?P<one>\w+)(?:\s*->\s*(?P<alias>\w+))?|\s*\((?P<several>[^)]*)\))
    | (?P<begun>[!?]{0,2}[\w-]+)(?:\.-?\d+)?\s*:(?!:)
    | (?P<name>[A-Za-z_][\w-]*)
    | (?P<mark>[()|\[\]*+?]|\{[\d,\s]*\})
    | ~\s*(?P<least>\d+)(?:\s*\.\.\s*(?P<most>\d+))?""",
    re.VERBOSE | re.DOTALL,
)
_MARKS = {"(": "(?:", "[": "(?:", "]": ")?"}
_META = re.compile(r"[\\.+*?()|\[\]{}^$]")
_FLOAT = r"([0-9]+\.[0-9]*|\.[0-9]+)([eE](\+|-)?[0-9]+)?|[0-9]+[eE](\+|-)?[0-9]+"
_COMMON = {
    "DIGIT": "[0-9]",
    "HEXDIGIT": "[a-fA-F0-9]",
    "INT": "[0-9]+",
    "SIGNED_INT": r"(\+|-)?[0-9]+",
    "DECIMAL": r"([0-9]+\.[0-9]*)|(\.[0-9]+)",
    "_EXP": r"[eE](\+|-)?[0-9]+",
    "FLOAT": _FLOAT,
    "SIGNED_FLOAT": rf"(\+|-)?({_FLOAT})",
    "NUMBER": f"[0-9]+|{_FLOAT}",
    "SIGNED_NUMBER": rf"(\+|-)?([0-9]+|{_FLOAT})",
    "ESCAPED_STRING": r'"([^"\\]|\\.)*"',
    "LCASE_LETTER": "[a-z]",
    "UCASE_LETTER": "[A-Z]",
    "LETTER": "[A-Za-z]",
    "WORD": "[A-Za-z]+",
    "CNAME": "[_A-Za-z][_A-Za-z0-9]*",
    "WS_INLINE": r"[ \t]+",
    "WS": r"[ \t\f\r\n]+",
    "CR": r"\r",
    "LF": r"\n",
    "NEWLINE": r"(\r?\n)+",
    "SH_COMMENT": r"#[^\n]*",
    "CPP_COMMENT": r"//[^\n]*",
    "C_COMMENT": r"/\*[^*]*\*+(?:[^/*][^*]*\*+)*/",
    "SQL_COMMENT": r"--[^\n]*",
}
"""Terminals that grammars may import, as llguidance defines them."""


def lark_regex(grammar: str) -> str:
    """A regular expression for the texts of a grammar that compiles. Raises InvalidRequest if this finds none."""
    return _Grammar(grammar).regex_of("start", 0)


def _within(part: re.Match[str]) -> str:
    """As part of a larger expression. Anchors of a terminal that compiles are at its ends, and say nothing; names of
    groups would be there twice if the terminal is."""
    return "(?:)" if part["anchor"] else "(" if part["named"] else part[0]


class _Grammar:
    """The tokens of each rule and terminal, by its name, and the expressions of those that have been needed."""

    def __init__(self, text: str) -> None:
        self._rules: dict[str, list[re.Match[str]]] = {}
        self._found: dict[str, str] = {}
        rule: list[re.Match[str]] = []
        for token in _tokens(text):
            if token["begun"] is not None:
                rule = self._rules.setdefault(token["begun"].lstrip("!?"), [])
            elif (imported := _imported(token)) is not None:
                self._found.update(imported)
            else:
                rule.append(token)

    def regex_of(self, name: str, depth: int) -> str:
        if name not in self._found:
            if name not in self._rules:
                raise InvalidRequest(f"`{name[:64]}` is not defined")
            if depth > _MAX_DEPTH:
                raise InvalidRequest(f"`{name[:64]}` leads back to itself, or is {_MAX_DEPTH} rules deep")
            pieces, num_chars = list[str](), 0
            for token in self._rules[name]:
                pieces.append(self._piece(token, depth))
                num_chars += len(pieces[-1])
                if num_chars > _MAX_CHARS:
                    raise InvalidRequest(f"`{name[:64]}` has more than {_MAX_CHARS} characters as one")
            self._found[name] = f"(?:{''.join(pieces)})"
        return self._found[name]

    def _piece(self, token: re.Match[str], depth: int) -> str:
        if token["name"] is not None:
            return self.regex_of(token["name"], depth + 1)
        if token["string"] is not None:
            escaped = _META.sub(r"\\\g<0>", _value(token["string"]))
            return f"(?{token['ignores_case']}:{escaped})"
        if token["regex"] is not None:
            if "x" in token["flags"]:
                raise InvalidRequest("the flag `x` is in it")
            return f"(?{token['flags'].replace('u', '')}:{REGEX_PART.sub(_within, token['regex'])})"
        if token["least"] is not None:
            return f"{{{token['least']},{token['most'] or token['least']}}}"
        return _MARKS.get(token[0], token[0].replace("{,", "{0,"))


def _tokens(text: str) -> Iterator[re.Match[str]]:
    at = 0
    while at < len(text):
        token = _TOKEN.match(text, at)
        if token is None:
            raise InvalidRequest(f"`{text[at : at + 32].split()[0]}` is in it")
        at = token.end()
        if token["blank"] is None:
            yield token


def _imported(token: re.Match[str]) -> Mapping[str, str] | None:
    if token["several"] is not None:
        names = [(name, name) for name in map(str.strip, token["several"].split(","))]
    elif token["one"] is not None:
        names = [(token["one"], token["alias"] or token["one"])]
    else:
        return None
    return {own: f"(?:{_COMMON[name]})" for name, own in names if name in _COMMON}


def _value(string: str) -> str:
    """Of a string, which may have the escapes of JSON, and those like `\\x0a`."""
    as_json = re.sub(r"\\(.)", lambda found: r"\u00" if found[1] == "x" else found[0], string)
    try:
        return str(json.loads(f'"{as_json}"'))
    except ValueError:
        raise InvalidRequest(f"the string {string[:64]!r} cannot be read") from None
