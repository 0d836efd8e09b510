"""Structural tags as grammars of llguidance, in its dialect of Lark."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence

from baton.errors import InvalidRequest
from baton.structured_output.constraint import is_gbnf
from baton.structured_output.guidance_schema import guidance_schema
from baton.structured_output.structural_tag import PARAM, Format, trigger_of

_MAIN = "main"
_MAX_ENDS = 64


def structural_grammar(wanted: Format, special_tokens: Mapping[str, int]) -> str:
    """The grammar of a checked format. special_tokens: ids of texts that are one special token, which llguidance
    never takes for the text. Raises InvalidRequest."""
    return _Writer(special_tokens).write(wanted)


class _Writer:
    """Collects rules. A method that takes `ends` writes a format with one of these texts after it, since free text
    extends to where its end comes first; no ends: to the end of the answer."""

    def __init__(self, special_tokens: Mapping[str, int]) -> None:
        self._special_tokens = special_tokens
        longest_first = sorted(special_tokens, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self._rules: list[str] = []
        self._others: list[dict[str, str]] = []

    def write(self, wanted: Format) -> str:
        start = self._format(wanted, ())
        main = "\n".join(["%llguidance {}", f"start: {start}", "TEXT: /(.|\\n)*/", *self._rules, ""])
        if not self._others:
            return main
        return json.dumps({"grammars": [{"name": _MAIN, "lark_grammar": main}, *self._others]})

    def _format(self, wanted: Format, ends: Sequence[str]) -> str:
        match wanted["type"]:
            case "any_text":
                return self._text_until(ends)
            case "tag":
                return self._tag(wanted, wanted["begin"], ends)
            case "sequence":
                return self._sequence(wanted["elements"], ends)
            case "or":
                return self._any([self._format(element, ends) for element in wanted["elements"]])
            case "triggered_tags":
                return self._triggered(wanted, ends)
            case "tags_with_separator":
                body = self._separated(wanted)
            case _:
                body = self._leaf(wanted)
        return f"{body} {self._end(ends)}"

    def _leaf(self, wanted: Format) -> str:
        match wanted["type"]:
            case "const_string":
                return self._literal(wanted["value"])
            case "json_schema":
                return f"%json {json.dumps(guidance_schema(wanted['json_schema']))}"
            case "regex":
                return f"/{_escaped(wanted['pattern'])}/"
        name = f"grammar_{len(self._others)}"
        self._others.append({"name": name, "lark_grammar": check_lark(wanted["grammar"])})
        return f"@{name}"

    def _tag(self, tag: Format, begin: str, ends: Sequence[str]) -> str:
        """A tag from `begin` on, which may be the rest of its own."""
        own = tag["end"] if isinstance(tag["end"], list) else [tag["end"]]
        every = [end + after for end in own for after in ends or [""]]
        if len(every) > _MAX_ENDS:
            raise InvalidRequest(f"structured_outputs: structural_tag: over {_MAX_ENDS} ends meet in one place", PARAM)
        return f"{self._literal(begin)} {self._format(tag['content'], every if any(every) else ())}"

    def _sequence(self, elements: Sequence[Format], ends: Sequence[str]) -> str:
        *others, last = elements
        if any(element["type"] in ("any_text", "triggered_tags") for element in others):
            why = "any_text and triggered_tags must be the last of a sequence, or the content of a tag with an end"
            raise InvalidRequest(f"structured_outputs: structural_tag: {why}", PARAM)
        return " ".join([*(self._format(element, ()) for element in others), self._format(last, ends)])

    def _separated(self, wanted: Format) -> str:
        one = self._any([self._tag(tag, tag["begin"], ()) for tag in wanted["tags"]])
        some = one
        if not wanted.get("stop_after_first"):
            some = f"{one} ({self._literal(wanted['separator'])} {one})*"
        return self._rule(some) if wanted.get("at_least_one") else self._any([some, '""'])

    def _triggered(self, wanted: Format, ends: Sequence[str]) -> str:
        """With `at_least_one`, the first tag comes before any other text."""
        triggers: dict[str, list[str]] = {}
        for tag in wanted["tags"]:
            trigger = trigger_of(wanted, tag)
            triggers.setdefault(trigger, []).append(self._tag(tag, tag["begin"].removeprefix(trigger), ()))
        rests = {trigger: self._any(tags) for trigger, tags in triggers.items()}
        first = self._any([f"{self._literal(trigger)} {rest}" for trigger, rest in rests.items()])
        later = self._any([f"{self._text_until([trigger])} {rest}" for trigger, rest in rests.items()])
        only_first, final = wanted.get("stop_after_first"), self._text_until(ends)
        if wanted.get("at_least_one"):
            return f"{first} {self._end(ends)}" if only_first else f"{first} {later}* {final}"
        return self._any([f"{later} {self._end(ends)}", final]) if only_first else f"{later}* {final}"

    def _text_until(self, ends: Sequence[str]) -> str:
        """Any text up to the first of `ends`, and that."""
        return self._any([self._text_up_to(end) if end else "TEXT" for end in ends or [""]])

    def _text_up_to(self, end: str) -> str:
        if self._special.match(end):
            return f"TEXT {self._literal(end)}"
        return self._rule(f"TEXT {json.dumps(end)}", "[lazy]")

    def _end(self, ends: Sequence[str]) -> str:
        return self._any([self._literal(end) for end in ends]) if ends else ""

    def _literal(self, text: str) -> str:
        """A text in which special tokens are those tokens."""
        pieces, at = list[str](), 0
        for found in self._special.finditer(text):
            pieces += [json.dumps(text[at : found.start()]), f"<[{self._special_tokens[found.group()]}]>"]
            at = found.end()
        return " ".join([*pieces, json.dumps(text[at:])])

    def _any(self, bodies: Sequence[str]) -> str:
        return self._rule(" | ".join(bodies))

    def _rule(self, body: str, attributes: str = "") -> str:
        name = f"rule_{len(self._rules)}"
        self._rules.append(f"{name}{attributes}: {body}")
        return name


def check_lark(grammar: str) -> str:
    """The grammar of a client. Raises InvalidRequest for one in the other backend's form."""
    if is_gbnf(grammar):
        raise InvalidRequest("llguidance takes grammars in its variant of Lark, `start: ...`, not in GBNF", PARAM)
    return grammar


def _escaped(pattern: str) -> str:
    """A regular expression for between slashes."""
    pieces: list[str] = []
    chars = iter(pattern)
    for char in chars:
        if char == "\\":
            pieces.append(char + next(chars, ""))
        else:
            pieces.append({"/": "\\/", "\n": "\\n"}.get(char, char))
    return "".join(pieces)
