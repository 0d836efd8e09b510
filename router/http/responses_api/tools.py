"""Tools of the Responses API: functions, which may be in namespaces, and what agents list beside them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field

from router.http.fields import CONFIG
from router.http.tools import Function, FunctionName, Schema, Tool
from router.limits import MAX_TOOL_CHARS, MAX_TOOLS

_LEFT_OUT = frozenset({"custom", "image_generation", "tool_search", "web_search"})
"""Types that Codex lists with every request beside its functions. A model may always do without a tool, so it is not
shown these. Alone they are refused: nothing would be left of what the client wants."""
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


def chat_name(name: str, namespace: str | None) -> str:
    """A function's name in chats, which have no namespaces."""
    return name if namespace is None else f"{namespace}__{name}"


def _functions(value: Any) -> Any:
    """Take functions out of their namespaces, and leave out what no model is shown."""
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


FunctionTools = Annotated[list[FunctionTool], BeforeValidator(_functions), Field(max_length=MAX_TOOLS)]
