"""Regular expressions for strings in JSON, as llguidance needs them."""

from __future__ import annotations

import re

REGEX_PART = re.compile(
    r"""\\. | (?P<anchor>[\^$]) | \(\?P?<\w+(?P<named>>)
    | \[ (?P<negated>\^(?:-+|\]?))? (?P<class> \]? (?:\\.|\[(?:\\.|[^\]\\])*(?:\]|\Z)|[^\]\\\[])* (?:\]|\\?\Z))""",
    re.VERBOSE | re.DOTALL,
)
"""Of a regular expression: escapes, anchors, beginnings of named groups, and classes with those in them. One
that is not closed ends with the expression: looking for its end again and again would take minutes."""


def for_json(regex: str) -> str:
    """The expression as a `pattern`: its negated classes leave out NUL. To llguidance (1.9), one that has all control
    characters has quotes and backslashes, too, even if it says that it has not."""
    return REGEX_PART.sub(_without_nul, regex)


def _without_nul(part: re.Match[str]) -> str:
    if part["negated"] is None:
        return part[0]
    return r"[^\x00" + re.sub(r"[-\]]", r"\\\g<0>", part["negated"][1:]) + part["class"]
