"""Custom tools, which take any text or one that matches a grammar, and their calls of earlier turns."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, Field

from baton.structured_output.constraint import StructuredBackend
from router.http.fields import CONFIG, FunctionName, Name
from router.limits import MAX_TOOL_CHARS
from router.text.call_plan import OfferedTool
from router.text.custom_input import ANY_INPUT, CustomInput, Syntax
from router.tool_parsers.custom_calls import INPUT


class TextFormat(BaseModel):
    model_config = CONFIG
    type: Literal["text"]
    size: ClassVar = 0
    input: ClassVar = ANY_INPUT


class Grammar(BaseModel):
    model_config = CONFIG
    syntax: Syntax
    definition: str = Field(min_length=1, max_length=MAX_TOOL_CHARS)

    @property
    def size(self) -> int:
        return len(self.definition)

    @cached_property
    def input(self) -> CustomInput:
        return CustomInput.defined(self.syntax, self.definition)


def read_grammars(grammars: Sequence[Grammar]) -> None:
    """For the validation of a body: large ones are read on another thread. Not if they are too large together, as they
    are refused then."""
    if sum(grammar.size for grammar in grammars) <= MAX_TOOL_CHARS:
        for grammar in grammars:
            _ = grammar.input


class GrammarFormat(BaseModel):
    model_config = CONFIG
    type: Literal["grammar"]
    grammar: Grammar

    @property
    def size(self) -> int:
        return self.grammar.size

    @property
    def input(self) -> CustomInput:
        return self.grammar.input


class Custom(BaseModel):
    model_config = CONFIG
    name: FunctionName
    description: str | None = Field(None, max_length=MAX_TOOL_CHARS)
    format: Annotated[TextFormat | GrammarFormat, Field(discriminator="type")] | None = None


class ChatCustomTool(BaseModel):
    model_config = CONFIG
    type: Literal["custom"]
    custom: Custom
    kind: ClassVar = "custom"

    @property
    def name(self) -> str:
        return self.custom.name

    @property
    def size(self) -> int:
        return len(self.custom.description or "") + (self.custom.format.size if self.custom.format else 0)

    def offered(self, backend: StructuredBackend) -> OfferedTool:
        return OfferedTool.of_custom(self.name, self._input.on(backend))

    def plain(self) -> dict[str, Any]:
        """The function that a chat template gets in place of the tool."""
        described = {} if self.custom.description is None else {"description": self.custom.description}
        return {"type": "function", "function": {"name": self.name, **described, "parameters": self._input.described()}}

    @property
    def grammar(self) -> Grammar | None:
        return self.custom.format.grammar if isinstance(self.custom.format, GrammarFormat) else None

    @property
    def _input(self) -> CustomInput:
        return self.custom.format.input if self.custom.format else ANY_INPUT


class CalledTool(BaseModel):
    model_config = CONFIG
    name: Name
    input: str


class CustomToolCall(BaseModel):
    """A call that the model made in an earlier turn."""

    model_config = CONFIG
    id: Name | None = None
    type: Literal["custom"]
    custom: CalledTool

    def plain(self) -> dict[str, Any]:
        """The call in the form for a chat template, of the function that stands for the tool."""
        named = {"id": self.id} if self.id is not None else {}
        function = {"name": self.custom.name, "arguments": {INPUT: self.custom.input}}
        return {**named, "type": "function", "function": function}

    @property
    def size(self) -> int:
        return len(self.custom.name) + len(self.custom.input)
