"""The items of a conversation that clients send: messages, calls of tools and their results, reasoning. The output of a
response has the same form, so that clients can send it back."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Discriminator, Field, PlainValidator, Tag, TypeAdapter, WithJsonSchema

from router.http.fields import CONFIG, Name
from router.http.text_parts import parts_schema, read_text
from router.limits import MAX_MESSAGES

_TEXTS = {"input_text": "text", "output_text": "text", "refusal": "refusal"}
_REASONING_TEXTS = {"reasoning_text": "text"}
_SUMMARY_TEXTS = {"summary_text": "text"}


def _reads(texts: dict[str, str]) -> PlainValidator:
    return PlainValidator(lambda value: read_text(value, texts))


def _described(texts: dict[str, str]) -> WithJsonSchema:
    return WithJsonSchema({"anyOf": [{"type": "string"}, parts_schema(texts)]})


Text = Annotated[str, _reads(_TEXTS), _described(_TEXTS)]
ReasoningText = Annotated[str, _reads(_REASONING_TEXTS), _described(_REASONING_TEXTS)]
SummaryText = Annotated[str, _reads(_SUMMARY_TEXTS), _described(_SUMMARY_TEXTS)]


class InputMessage(BaseModel):
    model_config = CONFIG
    type: Literal["message"] | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: Text
    id: Name | None = None
    status: Name | None = None

    @property
    def is_begun(self) -> bool:
        """Whether the assistant has not finished it."""
        return self.role == "assistant" and self.status in ("incomplete", "in_progress")

    @property
    def size(self) -> int:
        return len(self.content)

    def kept(self) -> dict[str, Any]:
        """The item in the form of the API, with its text in one part."""
        if self.role == "assistant":
            part: dict[str, Any] = {"type": "output_text", "text": self.content, "annotations": [], "logprobs": []}
        else:
            part = {"type": "input_text", "text": self.content}
        return {"type": "message", "role": self.role, "content": [part], "status": "completed"}


class FunctionCall(BaseModel):
    """A call that the model made in an earlier turn."""

    model_config = CONFIG
    type: Literal["function_call"]
    call_id: Name
    name: Name
    arguments: str
    id: Name | None = None
    namespace: Name | None = None

    @property
    def size(self) -> int:
        return len(self.name) + len(self.arguments)

    def kept(self) -> dict[str, Any]:
        call = {"call_id": self.call_id, "name": self.name, "arguments": self.arguments}
        named = {} if self.namespace is None else {"namespace": self.namespace}
        return {"type": self.type, **call, **named, "status": "completed"}


class FunctionCallOutput(BaseModel):
    """The result of a call."""

    model_config = CONFIG
    type: Literal["function_call_output"]
    call_id: Name
    output: Text
    id: Name | None = None

    @property
    def size(self) -> int:
        return len(self.output)

    def kept(self) -> dict[str, Any]:
        return {"type": self.type, "call_id": self.call_id, "output": self.output, "status": "completed"}


class CustomCall(BaseModel):
    """A call of a custom tool that the model made in an earlier turn."""

    model_config = CONFIG
    type: Literal["custom_tool_call"]
    call_id: Name
    name: Name
    input: str
    id: Name | None = None
    namespace: Name | None = None

    @property
    def size(self) -> int:
        return len(self.name) + len(self.input)

    def kept(self) -> dict[str, Any]:
        call = {"call_id": self.call_id, "name": self.name, "input": self.input}
        named = {} if self.namespace is None else {"namespace": self.namespace}
        return {"type": self.type, **call, **named, "status": "completed"}


class CustomCallOutput(FunctionCallOutput):
    """The result of such a call."""

    type: Literal["custom_tool_call_output"]  # type: ignore[assignment]  # another one


class ReasoningInput(BaseModel):
    """What the model thought in an earlier turn. Of a summary and the text itself, the text is used."""

    model_config = CONFIG
    type: Literal["reasoning"]
    summary: SummaryText | None = None
    content: ReasoningText | None = None
    id: Name | None = None

    @property
    def text(self) -> str:
        return self.content or self.summary or ""

    @property
    def size(self) -> int:
        return len(self.content or "") + len(self.summary or "")

    def kept(self) -> dict[str, Any]:
        content = [{"type": "reasoning_text", "text": self.content}] if self.content else []
        summary = [{"type": "summary_text", "text": self.summary}] if self.summary else []
        return {"type": self.type, "summary": summary, "content": content, "status": "completed"}


class ItemReference(BaseModel):
    """In place of an item of the output of a response that is kept."""

    model_config = CONFIG
    type: Literal["item_reference"]
    id: Name


_KINDS = (
    *("message", "function_call", "function_call_output", "custom_tool_call", "custom_tool_call_output"),
    *("reasoning", "item_reference"),
)
_UNKNOWN = f"there is no such item here: only {', '.join(_KINDS)}"


def _kind(item: Any) -> str | None:
    if isinstance(item, BaseModel):
        return str(item.type or "message")  # type: ignore[attr-defined]  # every item has one
    kind = item.get("type") if isinstance(item, dict) else None
    return "message" if kind is None else kind if isinstance(kind, str) and kind in _KINDS else None


def _items(value: Any) -> Any:
    """A string is one message of the user."""
    if isinstance(value, str):
        return [{"type": "message", "role": "user", "content": value}]
    if not isinstance(value, list):
        raise ValueError("must be a string or a list of items")
    for i, item in enumerate(value):
        if not isinstance(item, dict):
            raise ValueError(f"item {i} must be an object")
        if _kind(item) is None:
            kind = item["type"]
            shown = repr(kind[:64]) if isinstance(kind, str) else "unknown"
            raise ValueError(f"item {i} of type {shown} is not supported here: {', '.join(_KINDS)} are")
    return value


Item = Annotated[
    Annotated[InputMessage, Tag("message")]
    | Annotated[FunctionCall, Tag("function_call")]
    | Annotated[FunctionCallOutput, Tag("function_call_output")]
    | Annotated[CustomCall, Tag("custom_tool_call")]
    | Annotated[CustomCallOutput, Tag("custom_tool_call_output")]
    | Annotated[ReasoningInput, Tag("reasoning")]
    | Annotated[ItemReference, Tag("item_reference")],
    Discriminator(_kind, custom_error_type="item", custom_error_message=_UNKNOWN),
]
Items = Annotated[
    list[Item],
    Field(max_length=MAX_MESSAGES),
    BeforeValidator(_items, json_schema_input_type=str | list[Item]),
]
ITEMS: TypeAdapter[list[Any]] = TypeAdapter(list[Item])
