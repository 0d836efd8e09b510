"""Makes the messages of a chat from the items of a conversation."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from router.http.custom_tools import CalledTool, CustomToolCall
from router.http.responses_api.items import (
    CustomCall,
    CustomCallOutput,
    FunctionCall,
    FunctionCallOutput,
    InputMessage,
    ReasoningInput,
)
from router.http.responses_api.tools import chat_name
from router.http.schemas import ChatMessage
from router.http.tools import AnyToolCall, CalledFunction, ToolCall

AnyItem = InputMessage | FunctionCall | FunctionCallOutput | CustomCall | CustomCallOutput | ReasoningInput


def messages_of(items: Iterable[AnyItem], instructions: str | None = None) -> list[ChatMessage]:
    """The chat, with `instructions` as its system prompt. The items are valid, so the messages are too."""
    chat = _Chat()
    if instructions:
        chat.add("system", instructions)
    for item in items:
        chat.take(item)
    chat.end_turn()
    return chat.messages


class _Chat:
    """One message of the assistant has reasoning, then content, then calls, so reasoning or content that comes after
    content begins another message. What comes after calls does not: their results follow the message that has them."""

    def __init__(self) -> None:
        self.messages: list[ChatMessage] = []
        self._names: dict[str, str] = {}  # of the tools called, by the calls' ids
        self._reasoning: list[str] = []
        self._texts: list[str] = []
        self._calls: list[AnyToolCall] = []

    def take(self, item: AnyItem) -> None:
        match item:
            case ReasoningInput():
                self._end_answer()
                self._reasoning += [item.text] if item.text else []
            case InputMessage(role="assistant"):
                self._end_answer()
                self._texts.append(item.content)
            case InputMessage():
                self.add(item.role, item.content)
            case FunctionCall():
                name = self._names[item.call_id] = chat_name(item.name, item.namespace)
                function = CalledFunction.model_construct(name=name, arguments=item.arguments)
                self._calls.append(ToolCall.model_construct(id=item.call_id, function=function))
            case CustomCall():
                name = self._names[item.call_id] = chat_name(item.name, item.namespace)
                custom = CalledTool.model_construct(name=name, input=item.input)
                self._calls.append(CustomToolCall.model_construct(id=item.call_id, type="custom", custom=custom))
            case FunctionCallOutput():  # and a CustomCallOutput
                called = self._names.get(item.call_id)
                self.add("tool", item.output, tool_call_id=item.call_id, **({"name": called} if called else {}))

    def add(self, role: str, content: str, **more: Any) -> None:
        self.end_turn()
        self.messages.append(ChatMessage.model_construct(role=role, content=content, **more))

    def end_turn(self) -> None:
        """End the assistant's message, if one is open."""
        if not self._reasoning and not self._texts and not self._calls:
            return
        more: dict[str, Any] = {"tool_calls": self._calls} if self._calls else {}
        if self._reasoning:
            more["reasoning_content"] = "\n".join(self._reasoning)
        content = "".join(self._texts)
        self._reasoning, self._texts, self._calls = [], [], []
        self.messages.append(ChatMessage.model_construct(role="assistant", content=content, **more))

    def _end_answer(self) -> None:
        if self._texts and not self._calls:
            self.end_turn()
