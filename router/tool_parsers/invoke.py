"""Calls as markup with the name in an attribute: MiniMax M2, DeepSeek V3.2."""

from __future__ import annotations

import re
from typing import ClassVar

from router.tool_parsers.markup import JSON_KINDS, Arguments, MarkupParser, ValueForm
from router.tool_parsers.source import Reading, any_of

_IN_NAME = re.compile(r'[^"<>\n]')
_FORMS = {
    "": ValueForm(),
    "true": ValueForm(is_verbatim=True, may_be_null=False),
    "false": ValueForm(JSON_KINDS),
}
"""By what the model says of a value being a string."""


class _InvokeParser(MarkupParser):
    """`<invoke name="f"><parameter name="a">1</parameter></invoke>`, several in a section. `tag` begins the names of
    elements."""

    section: ClassVar[str]
    tag: ClassVar[str] = ""

    def read_call(self, found: str) -> Reading[None]:
        source = self.source
        if found == f"<{self.section}>":
            yield from source.literal(found)
            yield from source.blanks()
        if not (yield from source.literal(f'<{self.tag}invoke name="')):
            return
        name = yield from self.read_name(_IN_NAME)
        if name not in self.tools or not (yield from source.literal('">')):
            return
        arguments = Arguments(self, name)
        while (yield from self._read_parameter(arguments)):
            pass
        if not (yield from source.literal(f"</{self.tag}invoke>")):
            return
        arguments.close()
        yield from self.read_ends(f"</{self.section}>")

    def _read_parameter(self, arguments: Arguments) -> Reading[bool]:
        source, end = self.source, f"</{self.tag}parameter>"
        yield from source.blanks()
        if not (yield from source.literal(f'<{self.tag}parameter name="')):
            return False
        key = yield from self.read_name(_IN_NAME)
        if not (yield from source.literal('"')):
            return False
        says = yield from self._read_is_string()
        if says is None or not (yield from source.literal(">")):
            return False
        found = yield from self.read_value(arguments, key, (end,), any_of((end,)), _FORMS[says])
        yield from source.literal(found)
        source.begin()
        return bool(found)

    def _read_is_string(self) -> Reading[str | None]:
        """What the model says of the value being a string, `true` or `false`, or nothing; None: the attribute that says
        so is broken."""
        if not (yield from self.source.literal(' string="')):
            return ""
        for word in ("true", "false"):
            if (yield from self.source.literal(f'{word}"')):
                return word
        return None


class MinimaxM2Parser(_InvokeParser):
    """The section is `<minimax:tool_call>`."""

    section = "minimax:tool_call"
    marks = ("<minimax:tool_call>", '<invoke name="')


class DeepSeekV32Parser(_InvokeParser):
    """The section is `<｜DSML｜function_calls>`, and parameters say whether they are strings: `string="true"`."""

    section, tag = "｜DSML｜function_calls", "｜DSML｜"
    marks = ("<｜DSML｜function_calls>", '<｜DSML｜invoke name="')
