"""Tools and thinking in Anthropic's form, and what they mean in the form of chats."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from baton.errors import InvalidRequest
from router.http import tools as chats
from router.http.fields import CONFIG, FunctionName, Name, Whole
from router.limits import MAX_TOOL_CHARS, MAX_TOOLS

MIN_BUDGET_TOKENS = 1024


class CustomTool(BaseModel):
    """One of the client's own; those that Anthropic runs have other types."""

    model_config = CONFIG
    type: Literal["custom"] | None = None
    name: FunctionName
    description: str | None = Field(None, max_length=MAX_TOOL_CHARS)
    input_schema: chats.Schema
    strict: bool | None = None

    def in_chat(self) -> chats.Tool:
        function = chats.Function(
            name=self.name, description=self.description, parameters=self.input_schema, strict=self.strict
        )
        return chats.Tool(type="function", function=function)


ToolList = Annotated[list[CustomTool], Field(max_length=MAX_TOOLS)]


class MessageToolChoice(BaseModel):
    """`any`: one call or more. `name` is for the type `tool`."""

    model_config = CONFIG
    type: Literal["auto", "any", "tool", "none"]
    name: Name | None = None
    disable_parallel_tool_use: bool | None = None

    def in_chat(self) -> str | dict[str, Any]:
        """Raises InvalidRequest."""
        if self.type == "tool":
            if self.name is None:
                raise InvalidRequest("`tool_choice` of type 'tool' needs a `name`.", "tool_choice")
            return {"type": "function", "function": {"name": self.name}}
        return "required" if self.type == "any" else self.type


class ThinkingConfig(BaseModel):
    """`enabled` and `adaptive` ask the chat template for reasoning."""

    model_config = CONFIG
    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: Whole | None = Field(None, json_schema_extra={"minimum": MIN_BUDGET_TOKENS})

    def check(self, max_tokens: int | None) -> None:
        """Raises InvalidRequest."""
        if self.type != "enabled":
            return
        budget = self.budget_tokens
        if budget is None or budget < MIN_BUDGET_TOKENS:
            least = f"at least {MIN_BUDGET_TOKENS}"
            raise InvalidRequest(f"`thinking.budget_tokens` must be {least}, not {budget}.", "thinking")
        if max_tokens is not None and budget >= max_tokens:
            text = f"`thinking.budget_tokens` must be below `max_tokens`, {max_tokens}, not {budget}."
            raise InvalidRequest(text, "thinking")


def tools_in_chat(tools: Sequence[CustomTool] | None) -> list[chats.Tool] | None:
    return None if tools is None else [tool.in_chat() for tool in tools]
