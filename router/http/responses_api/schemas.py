"""What clients may send: OpenAI's fields, and vLLM's additional fields for sampling, as in chats."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from baton.errors import InvalidRequest
from baton.sampling import RANGES
from router.http.fields import CONFIG, Name, TemplateValues, TextOrObject, Whole, between
from router.http.responses_api.conversation import AnyItem, messages_of
from router.http.responses_api.items import InputMessage, Items
from router.http.responses_api.tools import MAX_NAME_CHARS, ToolList
from router.http.responses_api.unsupported import IN_RESPONSES, SHARED
from router.http.schemas import ChatRequest, GenerationFields
from router.http.template_fields import effort_variables
from router.http.unsupported import refuse_unsupported
from router.limits import MAX_MESSAGES
from router.text.num_logprobs import ALL
from router.text.structured_output import GUIDED

LOGPROBS = "message.output_text.logprobs"
_ENCRYPTED = "reasoning.encrypted_content"
_MAX_METADATA = 16
_MAX_METADATA_NAME = 64
_MAX_METADATA_TEXT = 512


class Format(BaseModel):
    """`strict` is accepted either way: an answer always matches its schema."""

    model_config = CONFIG
    type: Literal["text", "json_object", "json_schema"]
    name: Name | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    description: str | None = None
    strict: bool | None = None


class TextConfig(BaseModel):
    model_config = CONFIG
    format: Format | None = None
    verbosity: str | None = None


class Reasoning(BaseModel):
    """`effort`: as the `reasoning_effort` of chats. There is no `summary` of any kind: answers have the text itself."""

    model_config = CONFIG
    effort: Name | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None


class StreamChoices(BaseModel):
    model_config = CONFIG
    include_obfuscation: Literal[False] | None = None


_OWN = frozenset({"stream_options"})
_NOT_HERE = GenerationFields.model_fields.keys() - SHARED - _OWN


def _described(schema: dict[str, Any]) -> None:
    for name in _NOT_HERE:
        del schema["properties"][name]


class ResponsesRequest(GenerationFields):
    model_config = ConfigDict(**CONFIG, json_schema_extra=_described)
    input: Items
    instructions: str | None = None
    max_output_tokens: Whole | None = between(1)
    max_tool_calls: Whole | None = Field(None, description="of built-in tools, of which there are none")
    top_logprobs: Whole | None = between(ALL)
    include: list[str] | None = Field(None, description=f"{LOGPROBS}; {_ENCRYPTED} changes nothing")
    text: TextConfig | None = None
    tools: ToolList | None = None
    tool_choice: TextOrObject | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    background: bool | None = None
    store: bool | None = Field(None, description="keep the response; unset: yes, if the router keeps any")
    previous_response_id: Name | None = None
    stream_options: StreamChoices | None = None  # type: ignore[assignment]  # other options than chats have
    metadata: dict[str, str] | None = None
    truncation: Literal["disabled"] | None = None
    chat_template_kwargs: TemplateValues | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    service_tier: str | None = None

    def check(self) -> None:
        """Raises InvalidRequest for unsupported fields and for contradictions. `chat` has the checks of chats."""
        refuse_unsupported(self.model_extra or {}, IN_RESPONSES)
        for name in sorted(_NOT_HERE & self.model_fields_set):
            if getattr(self, name) not in (None, (), 1 if name == "n" else None):
                raise InvalidRequest(f"`{name}` is not a field of responses.", name)
        limit, valid = self.max_output_tokens, RANGES["max_tokens"]
        if limit is not None and limit not in valid:
            raise InvalidRequest(f"`max_output_tokens` {valid.text}, not {limit}.", "max_output_tokens")
        if self.background:
            self._check_background()
        self._check_parts()
        self._check_include()
        self._check_metadata()

    @property
    def wants_logprobs(self) -> bool:
        return LOGPROBS in (self.include or ())

    def chat(self, items: Sequence[AnyItem]) -> ChatRequest:
        """The same as a chat. items: of the whole conversation, that of `previous_response_id` included."""
        if len(items) > MAX_MESSAGES:
            raise InvalidRequest(
                f"`input` has {len(items)} items with those before it, of at most {MAX_MESSAGES}.", "input"
            )
        messages = messages_of(items, self.instructions)
        last = items[-1] if items else None
        continues = isinstance(last, InputMessage) and last.is_begun and not messages[-1].tool_calls
        shared = self.model_fields_set & SHARED & GenerationFields.model_fields.keys()
        given = {name: getattr(self, name) for name in shared}
        chat = ChatRequest.model_construct(
            **given,
            messages=messages,
            continue_final_message=continues,
            add_generation_prompt=not continues,
            max_completion_tokens=self.max_output_tokens,
            logprobs=self.wants_logprobs,
            top_logprobs=self.top_logprobs,
            response_format=self._response_format(),
            chat_template_kwargs=self._template_values(),
            tools=[tool.of_chat() for tool in self.tools] if self.tools else None,
            tool_choice=self._tool_choice(),
            parallel_tool_calls=self.parallel_tool_calls,
        )
        chat.check()
        return chat

    def _response_format(self) -> dict[str, Any] | None:
        wanted = self.text.format if self.text else None
        if wanted is None or wanted.type == "text":
            return None
        if wanted.type == "json_object":
            return {"type": "json_object"}
        return {"type": "json_schema", "json_schema": {"name": wanted.name, "schema": wanted.schema_}}

    def _template_values(self) -> dict[str, Any] | None:
        effort = self.reasoning.effort if self.reasoning else None
        if effort is None:
            return self.chat_template_kwargs
        return {**effort_variables(effort), **(self.chat_template_kwargs or {})}

    def _tool_choice(self) -> str | dict[str, Any] | None:
        choice = self.tool_choice
        if not isinstance(choice, dict):
            return choice
        if choice.get("type") == "allowed_tools":
            named = choice.get("tools")
            tools = [_named_tool(one) for one in named] if isinstance(named, list) else None
            return {"type": "allowed_tools", "allowed_tools": {"mode": choice.get("mode"), "tools": tools}}
        return _named_tool(choice)

    def _check_parts(self) -> None:
        """What is within objects, where unknown fields would pass."""
        if not self.input and self.previous_response_id is None:
            raise InvalidRequest("`input` must not be empty.", "input")
        if self.text and self.text.verbosity not in (None, "medium"):
            raise InvalidRequest("`text.verbosity` is not supported here.", "text")
        wanted = self.text.format if self.text else None
        if wanted and wanted.type == "json_schema" and wanted.schema_ is None:
            raise InvalidRequest("`text.format` of type json_schema needs an object in `schema`.", "text")
        others = {"structured_outputs", *GUIDED}
        if wanted and wanted.type != "text" and (other := next((n for n in others if getattr(self, n)), None)):
            raise InvalidRequest(f"`text.format` and `{other}` exclude each other.", "text")
        if long := next((tool for tool in self.tools or () if len(tool.chat_name) > MAX_NAME_CHARS), None):
            text = f"`{long.name}` in `tools` has more than {MAX_NAME_CHARS} characters with its namespace."
            raise InvalidRequest(text, "tools")
        for name, part in (("reasoning", self.reasoning), *(("tools", tool) for tool in self.tools or ())):
            unknown = {n: v for n, v in ((part.model_extra if part else None) or {}).items() if v}
            if unknown and unknown != {"allowed_callers": ["direct"]}:
                raise InvalidRequest(f"`{next(iter(unknown))[:64]}` in `{name}` is not supported here.", name)

    def _check_background(self) -> None:
        if self.stream:
            raise InvalidRequest("`background` and `stream` exclude each other here.", "background")
        if self.store is False:
            raise InvalidRequest("`background` needs `store`: the response is asked for later.", "background")

    def _check_include(self) -> None:
        other = next((name for name in self.include or () if name not in (LOGPROBS, _ENCRYPTED)), None)
        if other is not None:
            raise InvalidRequest(f"`include` may have '{LOGPROBS}', not {other[:64]!r}.", "include")
        if self.top_logprobs and not self.wants_logprobs:
            raise InvalidRequest(f"`top_logprobs` needs '{LOGPROBS}' in `include`.", "top_logprobs")

    def _check_metadata(self) -> None:
        metadata = self.metadata or {}
        if len(metadata) > _MAX_METADATA:
            raise InvalidRequest(f"`metadata` has {len(metadata)} entries, of at most {_MAX_METADATA}.", "metadata")
        for name, text in metadata.items():
            if len(name) > _MAX_METADATA_NAME or len(text) > _MAX_METADATA_TEXT:
                most = f"{_MAX_METADATA_NAME} characters, a value {_MAX_METADATA_TEXT}"
                raise InvalidRequest(f"A name in `metadata` has at most {most}.", "metadata")


_COUNTED = (
    *("model", "input", "instructions", "previous_response_id", "reasoning", "text", "truncation"),
    *("tools", "tool_choice", "parallel_tool_calls", "chat_template_kwargs"),
)


def _counted(schema: dict[str, Any]) -> None:
    schema["properties"] = {name: schema["properties"][name] for name in _COUNTED}


class InputTokensRequest(ResponsesRequest):
    """A request whose prompt is counted. What is said of its answer changes nothing."""

    model_config = ConfigDict(**CONFIG, json_schema_extra=_counted)


def _named_tool(choice: Any) -> dict[str, Any]:
    """A choice of one tool, as chats have it. Raises InvalidRequest."""
    kind, name = (choice.get("type"), choice.get("name")) if isinstance(choice, dict) else (None, None)
    if kind not in ("function", "custom") or not isinstance(name, str):
        text = f"`tool_choice` of type {str(kind)[:64]!r} is not supported here: 'function' and 'custom' are"
        raise InvalidRequest(f"{text}, with a `name`.", "tool_choice")
    return {"type": kind, kind: {"name": name}}
