"""What clients may send: Anthropic's fields, and `seed`, `timeout`, `cache_salt` and `chat_template_kwargs`, which mean
the same as in chats."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field

from baton.errors import InvalidRequest
from baton.sampling import MAX_CACHE_SALT_CHARS, RANGES
from router.http.anthropic.content import (
    Block,
    Content,
    RedactedThinking,
    SystemText,
    Text,
    Thinking,
    ToolResult,
    ToolUse,
    size_of_block,
)
from router.http.anthropic.conversation import text_of, turns_of
from router.http.anthropic.output_config import OutputConfig
from router.http.anthropic.tools import MessageToolChoice, ThinkingConfig, ToolList, tools_in_chat
from router.http.anthropic.unsupported import IN_CONVERSATIONS, IN_MESSAGES
from router.http.fields import CONFIG, Name, Strings, TemplateValues, Whole, between, sampling
from router.http.template_fields import THINKING_VARIABLES
from router.http.tools import Tool as ChatTool
from router.http.tools import check_tools
from router.http.unsupported import refuse_unsupported
from router.limits import MAX_MESSAGES, MAX_STOP_CHARS
from router.service import MESSAGE_SIZE
from router.text.generation_request import GenerationRequest

_SAMPLING = ("max_tokens", "temperature", "top_p", "top_k", "seed")
_ROLES: dict[type[Block], str] = {
    Thinking: "assistant",
    RedactedThinking: "assistant",
    ToolUse: "assistant",
    ToolResult: "user",
}


class Message(BaseModel):
    model_config = CONFIG
    role: Literal["user", "assistant", "system"]
    content: Content

    @property
    def size(self) -> int:
        """In characters, with what the message itself costs."""
        return MESSAGE_SIZE + sum(map(size_of_block, self.content))

    @property
    def text(self) -> str:
        return text_of(self.content)

    def check(self) -> None:
        """Raises InvalidRequest for a block that the role cannot have."""
        for block in self.content:
            role = _ROLES.get(type(block), self.role)
            if role != self.role:
                kind = "tool_result" if isinstance(block, ToolResult) else "tool_use or thinking"
                raise InvalidRequest(f"A {kind} block must be in a message of the {role}.", "messages")


class CountTokensRequest(BaseModel):
    """A conversation. If its last message is the assistant's, the answer continues it."""

    model_config = CONFIG
    model: Name | None = None
    messages: list[Message] = Field(max_length=MAX_MESSAGES, json_schema_extra={"minItems": 1})
    system: SystemText | None = None
    tools: ToolList | None = None
    tool_choice: MessageToolChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: TemplateValues | None = None

    def check(self) -> None:
        """Raises InvalidRequest for unsupported fields and for contradictions."""
        refuse_unsupported(self.model_extra or {}, IN_CONVERSATIONS)
        self._check_conversation(None)

    def _check_conversation(self, max_tokens: int | None) -> None:
        if not self.messages:
            raise InvalidRequest("`messages` must not be empty.", "messages")
        for message in self.messages:
            message.check()
        if self.continues and any(isinstance(block, ToolUse) for block in self.messages[-1].content):
            raise InvalidRequest("The last message has a tool_use block, whose tool_result is missing.", "messages")
        check_tools(self.chat_tools, self.chat_choice)
        if self.thinking is not None:
            self.thinking.check(max_tokens)
        if self.output_config is not None:
            self.output_config.check()

    @property
    def size(self) -> int:
        system = MESSAGE_SIZE + len(self.system) if self.system else 0
        tools = sum(tool.size for tool in self.chat_tools or ())
        return system + sum(message.size for message in self.messages) + tools

    @property
    def continues(self) -> bool:
        return self.messages[-1].role == "assistant"

    @property
    def begun(self) -> str | None:
        """The text that the answer goes on from, if it does."""
        return self.messages[-1].text if self.continues else None

    @property
    def parallel_tool_calls(self) -> bool:
        return not (self.tool_choice and self.tool_choice.disable_parallel_tool_use)

    @property
    def chat_tools(self) -> list[ChatTool] | None:
        return tools_in_chat(self.tools)

    @property
    def chat_choice(self) -> str | dict[str, Any] | None:
        return self.tool_choice.in_chat() if self.tool_choice else None

    def chat(self) -> list[dict[str, Any]]:
        """The conversation for a chat template."""
        system: list[tuple[str, tuple[Block, ...]]] = [("system", (Text(self.system),))] if self.system else []
        return turns_of([*system, *((message.role, message.content) for message in self.messages)])

    def variables(self, may_reason: bool) -> dict[str, Any] | None:
        """Those of the chat template. may_reason: whether answers can have thinking blocks. Raises InvalidRequest."""
        thinks = self.thinking is not None and self.thinking.type != "disabled"
        if self.thinking is not None and self.thinking.type == "enabled" and not may_reason:
            raise InvalidRequest("`thinking` needs --reasoning-parser, which this router lacks.", "thinking")
        said: dict[str, Any] = dict.fromkeys(THINKING_VARIABLES, thinks) if may_reason else {}
        effort = self.output_config.effort if self.output_config else None
        if effort and (thinks or self.thinking is None):
            said["reasoning_effort"] = effort
        return {**said, **(self.chat_template_kwargs or {})} or None


class MessagesRequest(CountTokensRequest):
    max_tokens: Whole = sampling("max_tokens", ...)
    temperature: float | None = sampling("temperature")
    top_p: float | None = sampling("top_p")
    top_k: Whole | None = between(-1, RANGES["top_k"].most)
    stop_sequences: Strings = ()
    stream: bool | None = None
    metadata: dict[str, Any] | None = None
    seed: Whole | None = None
    cache_salt: str | None = Field(None, min_length=1, max_length=MAX_CACHE_SALT_CHARS)
    timeout: float | None = Field(None, description="seconds until the request is given up")

    def check(self) -> None:
        refuse_unsupported(self.model_extra or {}, IN_MESSAGES)
        self._check_conversation(self.max_tokens)
        if "" in self.stop_sequences:
            raise InvalidRequest("`stop_sequences` must not contain an empty string.", "stop_sequences")
        num_chars = sum(map(len, self.stop_sequences))
        if num_chars > MAX_STOP_CHARS:
            most = f"at most {MAX_STOP_CHARS} characters together"
            raise InvalidRequest(f"`stop_sequences` must have {most}, not {num_chars}.", "stop_sequences")

    @property
    def thinking_budget(self) -> int | None:
        """Tokens of reasoning at most; None: without a bound."""
        return self.thinking.budget_tokens if self.thinking and self.thinking.type == "enabled" else None

    def constraint(self) -> str | None:
        """The field that says what answers must match."""
        return "output_config" if self.output_config and self.output_config.format else None

    def wanted(self, request_id: str, prompt: str, must_call: bool) -> GenerationRequest:
        """`prompt` is the text that the chat template made from the conversation. must_call: answers are calls alone,
        without text that could be of a format."""
        given = {name: getattr(self, name) for name in _SAMPLING}
        if self.output_config and not must_call:
            given["structured_outputs"] = self.output_config.constraint()
        return GenerationRequest(
            request_id=request_id,
            prompts=(prompt,),
            add_special_tokens=False,
            sampling={name: value for name, value in given.items() if value is not None},
            stop=self.stop_sequences,
            timeout_s=self.timeout,
            cache_salt=self.cache_salt or "",
        )
