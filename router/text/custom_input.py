"""What custom tools take: a text, which may have to match a grammar."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from baton.errors import InvalidRequest
from baton.structured_output.constraint import StructuredBackend, StructuredKind, StructuredOutput
from router.text.lark_regex import lark_regex
from router.tool_parsers.custom_calls import INPUT

Syntax = Literal["lark", "regex"]
_KINDS: dict[Syntax, tuple[str, StructuredKind]] = {
    "lark": ("Lark grammar", StructuredKind.GRAMMAR),
    "regex": ("regular expression", StructuredKind.REGEX),
}


@dataclass(frozen=True, slots=True)
class CustomInput:
    """`definition`: what the text must match; None: it may be any. `pattern`: the same as a regular expression, by
    which alone a string in JSON can be constrained; None: nothing to match, or `why_free` says why it cannot be."""

    syntax: Syntax = "lark"
    definition: str | None = None
    pattern: str | None = None
    why_free: str = ""

    @classmethod
    def defined(cls, syntax: Syntax, definition: str) -> CustomInput:
        """Takes a millisecond for a thousand tokens of Lark."""
        if syntax == "regex":
            return cls(syntax, definition, definition)
        try:
            return cls(syntax, definition, lark_regex(definition))
        except InvalidRequest as error:
            return cls(syntax, definition, why_free=f"it is no regular expression: {error.message}")

    def on(self, backend: StructuredBackend) -> CustomInput:
        """The same where this compiles patterns. XGrammar (0.2) does not escape what they match, as JSON has to be."""
        if backend is StructuredBackend.GUIDANCE or self.pattern is None:
            return self
        return CustomInput(
            self.syntax, self.definition, why_free="XGrammar cannot constrain what a string in JSON says"
        )

    @property
    def constraint(self) -> StructuredOutput | None:
        """What the text must match, as clients define it elsewhere. Raises InvalidRequest."""
        return None if self.definition is None else StructuredOutput(_KINDS[self.syntax][1], self.definition)

    def schema(self) -> dict[str, Any]:
        """Of the arguments of the function that stands for the tool."""
        return self._schema({} if self.pattern is None else {"pattern": f"^(?:{self.pattern})$"})

    def described(self) -> dict[str, Any]:
        """The same as a chat template gets it."""
        text = "All that the tool gets, as one text."
        if self.definition is not None:
            text += f" It must match this {_KINDS[self.syntax][0]}:\n{self.definition}"
        return self._schema({"description": text})

    def check_enforced(self, name: str) -> None:
        """Raises InvalidRequest if the input of the tool of this name should match something, and cannot be made to."""
        if self.why_free:
            text = f"The grammar of the tool `{name}` cannot be enforced: {self.why_free}."
            raise InvalidRequest(f"{text} With `tool_choice` 'auto' its input is free.", "tools")

    def _schema(self, more: dict[str, Any]) -> dict[str, Any]:
        text = {"type": "string", **more}
        return {"type": "object", "properties": {INPUT: text}, "required": [INPUT], "additionalProperties": False}


ANY_INPUT = CustomInput()
