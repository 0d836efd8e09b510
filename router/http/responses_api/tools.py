"""Tools of the Responses API: functions and custom tools, which may be in namespaces, and what agents list beside
them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, Tag

from router.http.custom_tools import ChatCustomTool, Custom, Grammar, GrammarFormat, TextFormat, read_grammars
from router.http.fields import CONFIG, FunctionName
from router.http.tools import TOOL_BY_KIND, Function, Schema, Tool
from router.limits import MAX_TOOL_CHARS, MAX_TOOLS

_LEFT_OUT = frozenset({"image_generation", "tool_search", "web_search"})
"""Types that Codex lists with every request beside its tools. A model may always do without a tool, so it is not shown
these. Alone they are refused: nothing would be left of what the client wants."""
MAX_NAME_CHARS = 128


class FunctionTool(BaseModel):
    """A function, in the flat form of this API. With `defer_loading` it is shown to the model from the beginning on."""

    model_config = CONFIG
    type: Literal["function"]
    name: FunctionName
    description: str | None = Field(None, max_length=MAX_TOOL_CHARS)
    parameters: Schema | None = None
    strict: bool | None = None
    defer_loading: bool | None = None
    namespace: FunctionName | None = None

    @property
    def chat_name(self) -> str:
        return chat_name(self.name, self.namespace)

    def of_chat(self) -> Tool:
        fields = {name: getattr(self, name) for name in ("description", "parameters", "strict")}
        function = Function.model_construct(name=self.chat_name, **fields)
        return Tool.model_construct(type="function", function=function)

    def echoed(self) -> dict[str, Any]:
        """The tool as the response repeats it."""
        return {"parameters": None, "strict": None, **self.model_dump(exclude_unset=True)}


class ResponseGrammar(Grammar):
    type: Literal["grammar"]

    def of_chat(self) -> GrammarFormat:
        return GrammarFormat.model_construct(type="grammar", grammar=self)


class ResponseCustomTool(BaseModel):
    """A custom tool, in the flat form of this API."""

    model_config = CONFIG
    type: Literal["custom"]
    name: FunctionName
    description: str | None = Field(None, max_length=MAX_TOOL_CHARS)
    format: Annotated[TextFormat | ResponseGrammar, Field(discriminator="type")] | None = None
    defer_loading: bool | None = None
    namespace: FunctionName | None = None

    @property
    def chat_name(self) -> str:
        return chat_name(self.name, self.namespace)

    def of_chat(self) -> ChatCustomTool:
        wanted = self.format.of_chat() if isinstance(self.format, ResponseGrammar) else self.format
        custom = Custom.model_construct(name=self.chat_name, description=self.description, format=wanted)
        return ChatCustomTool.model_construct(type="custom", custom=custom)

    def echoed(self) -> dict[str, Any]:
        """Without fields of the format that nobody knows: they may be what JSON cannot say."""
        known = self.format.model_dump(include=set(type(self.format).model_fields)) if self.format else {"type": "text"}
        return {**self.model_dump(exclude_unset=True, exclude={"format"}), "format": known}


def chat_name(name: str, namespace: str | None) -> str:
    """A tool's name in chats, which have no namespaces."""
    return name if namespace is None else f"{namespace}__{name}"


def _tools(value: Any) -> Any:
    """Take tools out of their namespaces, and leave out what no model is shown."""
    if not isinstance(value, list):
        return value
    found: list[Any] = []
    for tool in value:
        kind = tool.get("type") if isinstance(tool, dict) else None
        inner = tool.get("tools") if kind == "namespace" else None
        if isinstance(inner, list):
            found += [{**one, "namespace": tool.get("name")} if isinstance(one, dict) else one for one in inner]
        else:
            found.append(tool)
    kept = [tool for tool in found if not (isinstance(tool, dict) and _is_left_out(tool.get("type")))]
    return kept or value


def _is_left_out(kind: Any) -> bool:
    return isinstance(kind, str) and kind in _LEFT_OUT


AnyTool = Annotated[
    Annotated[FunctionTool, Tag("function")] | Annotated[ResponseCustomTool, Tag("custom")], TOOL_BY_KIND
]


def _read_custom(tools: list[Any]) -> list[Any]:
    formats = [tool.format for tool in tools if isinstance(tool, ResponseCustomTool)]
    read_grammars([wanted for wanted in formats if isinstance(wanted, Grammar)])
    return tools


ToolList = Annotated[list[AnyTool], BeforeValidator(_tools), Field(max_length=MAX_TOOLS), AfterValidator(_read_custom)]
