"""Tools in request bodies: those that a model may call, and the calls and results of earlier turns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, Discriminator, Field, Tag, WithJsonSchema

from baton.errors import InvalidRequest
from baton.structured_output.constraint import StructuredBackend
from router.http.custom_tools import ChatCustomTool, CustomToolCall, read_grammars
from router.http.fields import CONFIG, FunctionName, Name, TextOrObject, ValueLimits, bound_values, num_chars
from router.http.parse import is_quick, parse_begun, parse_json
from router.limits import MAX_TOOL_CALLS, MAX_TOOL_CHARS, MAX_TOOL_DEPTH, MAX_TOOL_VALUES, MAX_TOOLS
from router.text.answer_reader import Parsers
from router.text.call_plan import NO_CALLS, CallMode, CallPlan, OfferedTool, plan_calls

_LIMITS = ValueLimits(MAX_TOOL_VALUES, MAX_TOOL_CHARS, MAX_TOOL_DEPTH)


def bound_schema(value: dict[str, Any]) -> dict[str, Any]:
    """A schema, or the arguments of a call. Raises ValueError if it has too much."""
    bound_values(value, _LIMITS)
    return value


Schema = Annotated[dict[str, Any], AfterValidator(bound_schema)]


_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
"""Of a function that says nothing of them, as at OpenAI."""


class Function(BaseModel):
    model_config = CONFIG
    name: FunctionName
    description: str | None = Field(None, max_length=MAX_TOOL_CHARS)
    parameters: Schema | None = None
    strict: bool | None = None


class Tool(BaseModel):
    model_config = CONFIG
    type: Literal["function"] | None = None
    function: Function
    kind: ClassVar = "function"

    @property
    def name(self) -> str:
        return self.function.name

    def offered(self, _: StructuredBackend) -> OfferedTool:
        return OfferedTool(self.name, self.function.parameters or _NO_PARAMETERS, bool(self.function.strict))

    def plain(self) -> dict[str, Any]:
        """The tool in the form for a chat template."""
        function: dict[str, Any] = {"name": self.function.name}
        for name in ("description", "parameters"):
            value = getattr(self.function, name)
            if value is not None:
                function[name] = value
        return {"type": "function", "function": function}

    @property
    def size(self) -> int:
        return len(self.function.description or "") + num_chars(self.function.parameters)


class CalledFunction(BaseModel):
    model_config = CONFIG
    name: Name
    arguments: TextOrObject | None = None


class ToolCall(BaseModel):
    """A call that the model made in an earlier turn."""

    model_config = CONFIG
    id: Name | None = None
    type: Literal["function"] | None = None
    function: CalledFunction

    def plain(self) -> dict[str, Any]:
        """The call in the form for a chat template, with its arguments as an object."""
        named = {"id": self.id} if self.id is not None else {}
        return {**named, "type": "function", "function": {"name": self.function.name, "arguments": self._arguments()}}

    @property
    def size(self) -> int:
        return len(self.function.name) + num_chars(self.function.arguments)

    def _arguments(self) -> dict[str, Any]:
        given = self.function.arguments or {}
        return given if isinstance(given, dict) else _object_in(given)


def _object_in(text: str) -> dict[str, Any]:
    """The arguments of a call as an object: of those that break off, what is there; of those that are none, nothing.

    A model wrote that, and its client has no other: without this the conversation could not go on. Of what they cannot
    parse, some clients make a string in JSON.
    """
    found = _value_in(text)
    if isinstance(found, str):
        found = _value_in(found)
    return found if isinstance(found, dict) else {}


def _value_in(text: str) -> Any:
    try:
        return parse_json(text.encode())
    except InvalidRequest:
        return parse_begun(text) if is_quick(text) else None


_KINDS = ("function", "custom")


def _kind_of(value: Any) -> str | None:
    """Of a tool or a call."""
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return "function" if kind is None else kind if kind in _KINDS else None


TOOL_BY_KIND = Discriminator(
    _kind_of,
    custom_error_type="kind",
    custom_error_message="`type` must be 'function' or 'custom': there are no other tools here",
)
AnyTool = Tool | ChatCustomTool


def _read_custom(tools: list[AnyTool]) -> list[AnyTool]:
    read_grammars([tool.grammar for tool in tools if isinstance(tool, ChatCustomTool) and tool.grammar])
    return tools


AnyToolCall = ToolCall | CustomToolCall
ToolList = Annotated[
    list[Annotated[Annotated[Tool, Tag("function")] | Annotated[ChatCustomTool, Tag("custom")], TOOL_BY_KIND]],
    Field(max_length=MAX_TOOLS),
    AfterValidator(_read_custom),
]
ToolCalls = Annotated[
    list[Annotated[Annotated[ToolCall, Tag("function")] | Annotated[CustomToolCall, Tag("custom")], TOOL_BY_KIND]],
    Field(max_length=MAX_TOOL_CALLS),
]
_NAMED = {
    "anyOf": [
        {
            "type": "object",
            "properties": {
                "type": {"const": kind},
                kind: {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]},
            },
            "required": [kind] if kind == "function" else ["type", kind],
        }
        for kind in _KINDS
    ]
}
_ALLOWED_TOOLS = "allowed_tools"
_ALLOWED = {
    "type": "object",
    "properties": {
        "type": {"const": _ALLOWED_TOOLS},
        _ALLOWED_TOOLS: {
            "type": "object",
            "properties": {
                "mode": {"enum": ["auto", "required"]},
                "tools": {"type": "array", "items": _NAMED, "minItems": 1},
            },
            "required": ["mode", "tools"],
        },
    },
    "required": ["type", _ALLOWED_TOOLS],
}
ToolChoice = Annotated[
    TextOrObject,
    WithJsonSchema(
        {
            "anyOf": [{"enum": ["none", "auto", "required"]}, _NAMED, _ALLOWED],
            "description": "unset: auto if there are tools",
        }
    ),
]


def check_tools(tools: Sequence[AnyTool] | None, choice: str | dict[str, Any] | None) -> None:
    """Raises InvalidRequest for a choice that is not possible, and for tools that cannot be told apart."""
    if isinstance(choice, dict):
        check = _check_allowed if choice.get("type") == _ALLOWED_TOOLS else _check_named
        check(tools, choice)
    elif choice not in (None, "none", "auto", "required"):
        known = "'none', 'auto', 'required' or a tool"
        raise InvalidRequest(f"`tool_choice` must be {known}, not {choice[:64]!r}.", "tool_choice")
    elif choice == "required" and not tools:
        raise InvalidRequest("`tool_choice` 'required' needs `tools`.", "tool_choice")
    if tools is None:
        return
    name, count = Counter(tool.name for tool in tools).most_common(1)[0] if tools else ("", 0)
    if count > 1:
        raise InvalidRequest(f"`tools` has {count} tools called `{name}`, of at most 1.", "tools")
    size = sum(tool.size for tool in tools)
    if size > MAX_TOOL_CHARS:
        raise InvalidRequest(f"`tools` has {size} characters, of at most {MAX_TOOL_CHARS}.", "tools")


def _check_named(tools: Sequence[AnyTool] | None, choice: dict[str, Any]) -> None:
    kind = _kind_of(choice)
    named = choice.get(kind) if kind is not None else None
    name = named.get("name") if isinstance(named, dict) else None
    if not isinstance(name, str):
        form = '{"type": "function", "function": {"name": ...}}, or the same with "custom"'
        raise InvalidRequest(f"`tool_choice` as an object must be {form}.", "tool_choice")
    if (kind, name) not in [(tool.kind, tool.name) for tool in tools or ()]:
        raise InvalidRequest(f"`tool_choice` names `{name[:64]}`, which `tools` lacks.", "tool_choice")


def _name_in(choice: dict[str, Any]) -> str:
    """The name of a tool in a checked choice."""
    return str(choice[_kind_of(choice) or ""]["name"])


def _check_allowed(tools: Sequence[AnyTool] | None, choice: dict[str, Any]) -> None:
    allowed = choice.get(_ALLOWED_TOOLS)
    mode, named = (allowed.get("mode"), allowed.get("tools")) if isinstance(allowed, dict) else (None, None)
    if mode not in ("auto", "required") or not isinstance(named, list) or not named:
        form = '{"mode": "auto" or "required", "tools": [one or more]}'
        raise InvalidRequest(f"`allowed_tools` in `tool_choice` must be {form}.", "tool_choice")
    for one in named:
        _check_named(tools, one if isinstance(one, dict) else {})


def allowed_tools(tools: Sequence[AnyTool], choice: dict[str, Any]) -> tuple[Sequence[AnyTool], str | dict[str, Any]]:
    """The tools that a checked choice of the type `allowed_tools` leaves, and its mode: the model sees no others. With
    the choice of one tool, both as they are."""
    if choice.get("type") != _ALLOWED_TOOLS:
        return tools, choice
    names = set(map(_name_in, choice[_ALLOWED_TOOLS]["tools"]))
    return [tool for tool in tools if tool.name in names], choice[_ALLOWED_TOOLS]["mode"]


def call_plan(
    parsers: Parsers,
    tools: Sequence[AnyTool] | None,
    choice: str | dict[str, Any] | None,
    parallel_tool_calls: bool,
    backend: StructuredBackend = StructuredBackend.GUIDANCE,
) -> CallPlan:
    """How answers may call these tools, as a checked `choice` has it, where `backend` constrains them. Raises
    InvalidRequest."""
    if not tools or choice == "none":
        return NO_CALLS
    name = _name_in(choice) if isinstance(choice, dict) else None
    offered = [tool.offered(backend) for tool in tools if name is None or tool.name == name]
    mode = CallMode.ONE if name is not None else CallMode.REQUIRED if choice == "required" else CallMode.AUTO
    return plan_calls(parsers, offered, mode, parallel_tool_calls)


def plain_tools(tools: Sequence[AnyTool] | None) -> list[dict[str, Any]] | None:
    """The tools in the form for a chat template, None if there are none."""
    return [tool.plain() for tool in tools] if tools else None
