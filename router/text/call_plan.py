"""How the answers to a request may call tools: what reads their calls, and what their text must match."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from baton.errors import InvalidRequest
from baton.structured_output.structural_tag import Format
from router.text.answer_reader import AnswerReading, Parsers
from router.text.custom_input import CustomInput
from router.tool_parsers import CallListParser, ToolParser, Tools

_NO_TOOL_PARSER = (
    "`tools` need --enable-auto-tool-choice and --tool-call-parser, with which this router was not started. "
    "With `tool_choice` 'none' the model sees them, and calls none."
)


class CallMode(Enum):
    """AUTO: the model decides. REQUIRED: one call or more. ONE: exactly one."""

    AUTO = "auto"
    REQUIRED = "required"
    ONE = "one"


@dataclass(frozen=True, slots=True)
class OfferedTool:
    """A tool that may be called. `schema`: of its arguments; `strict`: whether they must match it. `custom`: what a
    custom tool says of its input, which its only argument is; None: it is a function."""

    name: str
    schema: Mapping[str, Any]
    strict: bool = False
    custom: CustomInput | None = None

    @classmethod
    def of_custom(cls, name: str, custom: CustomInput) -> OfferedTool:
        return cls(name, custom.schema(), custom.pattern is not None, custom)


@dataclass(frozen=True, slots=True)
class CallPlan:
    """`parser` reads the calls of `tools`; None: there are none. `must_match` holds for every answer. One
    that has to match JSON may match `alternative` instead, which are calls that cannot be taken for JSON. `custom`:
    what the custom ones among the tools say of their input, by their names."""

    parser: type[ToolParser] | None = None
    tools: Tools | None = None
    must_match: Format | None = None
    alternative: Format | None = None
    mode: CallMode = CallMode.AUTO
    custom: Mapping[str, CustomInput] = field(default_factory=dict)

    @property
    def is_forced(self) -> bool:
        return self.mode is not CallMode.AUTO

    def reading(
        self, parsers: Parsers, prompt: str, parallel_tool_calls: bool, begun: str | None = None
    ) -> AnswerReading | None:
        """How answers are read; None: as they are. `begun`: see AnswerReading."""
        if not self.tools and parsers.reasoning is None:
            return None
        parser = self.parser if self.is_forced else None
        is_named = self.mode is CallMode.ONE
        tools = self.tools or {}
        reading = AnswerReading(parsers, prompt, tools, parallel_tool_calls, parser, is_named, begun, self.custom)
        return reading if reading.is_needed else None


NO_CALLS = CallPlan()


def plan_calls(
    parsers: Parsers, offered: Sequence[OfferedTool], mode: CallMode, parallel_tool_calls: bool = True
) -> CallPlan:
    """`offered`: at least one tool. Raises InvalidRequest."""
    tools = {tool.name: tool.schema for tool in offered}
    custom = {tool.name: tool.custom for tool in offered if tool.custom is not None}
    if mode is CallMode.AUTO:
        return _plan_auto(parsers, offered, tools, custom, parallel_tool_calls)
    for name, wanted in custom.items():
        wanted.check_enforced(name)
    parser = parsers.tool if parsers.tool and parsers.tool.form else CallListParser
    assert parser.form is not None
    only_one = mode is CallMode.ONE or not parallel_tool_calls
    schemas = [(tool.name, _of_object(tool)) for tool in offered]
    return CallPlan(parser, tools, parser.form.some(schemas, only_one), mode=mode, custom=custom)


def _plan_auto(
    parsers: Parsers,
    offered: Sequence[OfferedTool],
    tools: Tools,
    custom: Mapping[str, CustomInput],
    parallel: bool,
) -> CallPlan:
    if not parsers.may_call_tools:
        raise InvalidRequest(_NO_TOOL_PARSER, "tools")
    assert parsers.tool is not None
    form = parsers.tool.form
    if form is None:
        return CallPlan(parsers.tool, tools, custom=custom)
    schemas = [(t.name, _of_object(t) if t.strict or t.custom else {"type": "object"}) for t in offered]
    within = form.within_text(schemas) if any(tool.strict for tool in offered) else None
    alternative = form.some(schemas, not parallel) if form.trigger else None
    return CallPlan(parsers.tool, tools, within, alternative, custom=custom)


def _of_object(tool: OfferedTool) -> dict[str, Any]:
    """The schema of the tool's arguments, which are an object even if it does not say so. Raises InvalidRequest."""
    kind = tool.schema.get("type", "object")
    if kind != "object" and not (isinstance(kind, list) and "object" in kind):
        raise InvalidRequest(f"`parameters` of the tool `{tool.name}` must be a schema of type object.", "tools")
    return {**tool.schema, "type": "object"}
