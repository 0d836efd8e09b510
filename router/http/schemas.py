"""What clients may send: OpenAI's fields, and those of vLLM's additional fields that baton supports. Other fields are
ignored, unless they would change the answer (`unsupported`)."""

from __future__ import annotations

from typing import Any, ClassVar, Self

from pydantic import BaseModel, Field, model_validator

from baton.errors import InvalidRequest
from baton.priority import MAX_PRIORITY, MIN_PRIORITY
from baton.sampling import MAX_BEAM_WIDTH, MAX_CACHE_SALT_CHARS, RANGES
from router.http.fields import CONFIG, Name, Prompts, Role, Text, TextOrObject, Whole, between, sampling
from router.http.sampling_fields import SamplingFields, check_logprob_token_ids, with_num_logprobs
from router.http.template_fields import TemplateFields
from router.http.text_parts import without_thoughts
from router.http.tools import ToolCalls, ToolChoice, ToolList, allowed_tools, check_tools
from router.http.unsupported import refuse_unsupported
from router.limits import MAX_MESSAGES, MAX_N
from router.request_ids import REQUEST_ID
from router.service import MESSAGE_SIZE
from router.text.answer_reader import Parsers
from router.text.generation_request import GenerationRequest
from router.text.models import ServedModel
from router.text.num_logprobs import ALL, STREAMED, WHOLE
from router.text.structured_output import GUIDED, structured_output_of
from router.text.tokenizer import TruncationSide


class ChatMessage(BaseModel):
    model_config = CONFIG
    role: Role
    content: Text = ""
    name: Name | None = None
    tool_calls: ToolCalls | None = None
    tool_call_id: Name | None = None
    reasoning_content: str | None = None
    reasoning: str | None = Field(None, description="another name of `reasoning_content`, which comes first")

    @model_validator(mode="before")
    @classmethod
    def _part_thoughts(cls, value: Any) -> Any:
        """Thoughts may be parts of the content: vLLM takes them, and some versions of LiteLLM send them."""
        if type(value) is dict and "content" in value and type(value["content"]) is list:
            return without_thoughts(value) if value.get("role") == "assistant" else value
        return value

    def plain(self) -> dict[str, Any]:
        """The message in the form for a chat template. Raises InvalidRequest for the older form of tool calls."""
        if self.role == "function" or (self.model_extra or {}).get("function_call"):
            what = "role function" if self.role == "function" else "function_call"
            raise InvalidRequest(f"Use `tool_calls` and the role `tool`: a message has `{what}`.", "messages")
        message: dict[str, Any] = {"role": self.role, "content": self.content}
        for name in ("name", "tool_call_id"):
            if (value := getattr(self, name)) is not None:
                message[name] = value
        if self.tool_calls:
            message["tool_calls"] = [call.plain() for call in self.tool_calls]
        if (thought := self.thought) is not None:
            message |= {"reasoning": thought, "reasoning_content": thought}
        return message

    @property
    def thought(self) -> str | None:
        return self.reasoning_content if self.reasoning is None else self.reasoning

    @property
    def size(self) -> int:
        """In characters, with what the message itself costs."""
        calls = sum([call.size for call in self.tool_calls]) if self.tool_calls else 0
        return len(self.content) + MESSAGE_SIZE + calls + len(self.thought or "")


COMPLETION_TOKENS = 16
"""How long completions are at most if the request does not say, as at OpenAI and with vLLM. null: what fits."""


class StreamOptions(BaseModel):
    model_config = CONFIG
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationFields(SamplingFields):
    """Fields that chats and completions share."""

    _logprob_counts: ClassVar[tuple[str, ...]]
    """The fields that say how many logprobs are wanted."""
    model: Name | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    truncate_prompt_tokens: Whole | None = between(-1)  # -1: what max_tokens leaves of the context
    truncation_side: TruncationSide | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    best_of: Whole | None = between(1, MAX_N)
    use_beam_search: bool | None = None
    length_penalty: float | None = sampling("length_penalty")
    request_id: str | None = Field(None, pattern=f"^{REQUEST_ID}$")
    cache_salt: str | None = Field(None, min_length=1, max_length=MAX_CACHE_SALT_CHARS)
    priority: Whole | None = between(MIN_PRIORITY, MAX_PRIORITY)  # lower: served earlier
    timeout: float | None = Field(None, description="seconds until the request is given up")
    response_format: dict[str, Any] | None = None
    guided_json: TextOrObject | None = Field(None, description="as structured_outputs.json")
    guided_regex: str | None = Field(None, description="as structured_outputs.regex")
    guided_choice: list[str] | None = Field(None, description="as structured_outputs.choice")
    guided_grammar: str | None = Field(None, description="as structured_outputs.grammar")

    def check(self) -> None:
        """Raises InvalidRequest for unsupported fields and for contradictions."""
        refuse_unsupported(self.model_extra or {})
        if self.best_of is not None:
            self._check_best_of(self.best_of)
        if self.stream_options and not self.stream:
            raise InvalidRequest("`stream_options` needs `stream` to be true.", "stream_options")

    def with_num_logprobs(self, model: ServedModel) -> Self:
        """See `router.http.sampling_fields`. Raises InvalidRequest."""
        if self.logprob_token_ids:
            check_logprob_token_ids(self.logprob_token_ids, model, "logprob_token_ids")
        return with_num_logprobs(self, model, *self._logprob_counts)

    def _check_best_of(self, best_of: int) -> None:
        if not 1 <= best_of <= MAX_N:
            raise InvalidRequest(f"best_of must be in [1, {MAX_N}], not {best_of}", "best_of")
        if self.num_drawn < self.num_kept:
            raise InvalidRequest(f"`best_of` must be at least `n`, {self.num_kept}, not {best_of}.", "best_of")
        if self.keeps_best and self.stream:
            text = f"`best_of` must be `n`, {self.num_kept}, not {best_of}, with `stream`: "
            raise InvalidRequest(text + "the best answers are known when all have ended.", "best_of")

    @property
    def num_kept(self) -> int:
        """Answers to each prompt."""
        return 1 if self.n is None else self.n

    @property
    def num_drawn(self) -> int:
        """Samples of each prompt, of which the best are its answers."""
        if self.best_of is None or self.use_beam_search:
            return 1 if self.n is None else self.n
        return self.best_of

    @property
    def keeps_best(self) -> bool:
        return self.best_of is not None and self.num_drawn > self.num_kept

    def constraint(self) -> str | None:
        """The field that says what answers must match; with a `response_format` of plain text, that."""
        given = self.model_fields_set
        return next((name for name in _CONSTRAINTS if name in given and getattr(self, name)), None)

    def sampling(self, **translated: Any) -> dict[str, Any]:
        if self.use_beam_search:
            translated["beam_width"] = self._beam_width()
        if self.best_of is not None and self.keeps_best:
            translated["num_logprobs"] = translated.get("num_logprobs") or 0
        guided = (self.guided_json, self.guided_regex, self.guided_choice, self.guided_grammar)
        if self.response_format is not None or guided != _NOT_GUIDED:
            named = dict(zip(GUIDED, guided, strict=True))
            wanted = structured_output_of(self.response_format, self.structured_outputs, named)
            translated["structured_outputs"] = wanted
        return super().sampling(**translated)

    def _beam_width(self) -> int:
        name, width = ("n", self.n or 1) if self.best_of is None else ("best_of", self.best_of)
        if width > MAX_BEAM_WIDTH:
            raise InvalidRequest(f"`{name}` must be at most {MAX_BEAM_WIDTH} in a beam search, not {width}.", name)
        return width

    def shared(self) -> dict[str, Any]:
        """The other fields of GenerationRequest that chats and completions share."""
        return {
            "n": self.num_drawn,
            "stop": self.stop,
            "bad_words": self.bad_words,
            "include_stop_str_in_output": bool(self.include_stop_str_in_output),
            "skip_special_tokens": self.skip_special_tokens is not False,
            "spaces_between_special_tokens": self.spaces_between_special_tokens is not False,
            "logprob_limits": STREAMED if self.stream else WHOLE,
            "truncate_prompt_tokens": self.truncate_prompt_tokens,
            "truncation_side": self.truncation_side or "left",
            "timeout_s": self.timeout,
            "cache_salt": self.cache_salt or "",
            "priority": self.priority or 0,
        }


_CHAT_NAMES = {"prompt": "messages"}
_NEWER_CHAT_NAMES = {**_CHAT_NAMES, "max_tokens": "max_completion_tokens"}
_NOT_GUIDED = (None,) * len(GUIDED)
_CONSTRAINTS = ("structured_outputs", *GUIDED, "response_format")


class ChatRequest(GenerationFields, TemplateFields):
    _logprob_counts = ("prompt_logprobs", "top_logprobs")
    messages: list[ChatMessage] = Field(max_length=MAX_MESSAGES, json_schema_extra={"minItems": 1})
    max_completion_tokens: Whole | None = between(1)
    logprobs: bool | None = None
    top_logprobs: Whole | None = between(ALL)
    include_reasoning: bool | None = None
    thinking_token_budget: Whole | None = between(-1)  # -1: none
    return_prompt_text: bool | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None
    tools: ToolList | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None

    def check(self) -> None:
        super().check()
        check_tools(self.tools, self.tool_choice)
        self.check_template()
        limit, valid = self.max_completion_tokens, RANGES["max_tokens"]
        if limit is not None and limit not in valid:
            raise InvalidRequest(f"max_completion_tokens {valid.text}, not {limit}", "max_completion_tokens")
        if self.thinking_token_budget is not None:
            self._check_budget(self.thinking_token_budget)
        if not self.logprobs and (self.top_logprobs or self.logprob_token_ids):
            name = "top_logprobs" if self.top_logprobs else "logprob_token_ids"
            raise InvalidRequest(f"`{name}` needs `logprobs` to be true.", name)

    def _check_budget(self, budget: int) -> None:
        name = "thinking_token_budget"
        if budget < -1:
            raise InvalidRequest(f"`{name}` must be -1 or more, not {budget}.", name)
        if self.use_beam_search:
            raise InvalidRequest(f"`{name}` and `use_beam_search` exclude each other.", name)

    @property
    def names(self) -> dict[str, str]:
        """Of fields of generations: what they are here."""
        return _CHAT_NAMES if self.max_completion_tokens is None else _NEWER_CHAT_NAMES

    @property
    def echoed(self) -> str:
        """What comes before the answer's text, as in vLLM: the last message if the answer continues it, or if it is the
        assistant's."""
        if not self.echo or not self.messages:
            return ""
        final = self.messages[-1]
        return final.content if self.continue_final_message or final.role == "assistant" else ""

    def with_allowed_tools(self, parsers: Parsers) -> ChatRequest:
        """The checked request without tools that the model is not to see, as its `tool_choice` leaves them out."""
        if not parsers.shows_tools(self.tool_choice):
            return self.model_copy(update={"tools": None, "tool_choice": None})
        if self.tools is None or not isinstance(self.tool_choice, dict):
            return self
        tools, choice = allowed_tools(self.tools, self.tool_choice)
        return self.model_copy(update={"tools": tools, "tool_choice": choice})

    def without_response_format(self) -> ChatRequest:
        """The checked request as one whose answers are calls alone, which have no content to be of that format. Raises
        InvalidRequest for a format that is none."""
        structured_output_of(self.response_format, None, {})
        return self.model_copy(update={"response_format": None})

    @property
    def begun(self) -> str | None:
        """The text that the answer goes on from, if it does."""
        return self.messages[-1].content if self.continue_final_message and self.messages else None

    def wanted(self, request_id: str, prompt: str) -> GenerationRequest:
        """`prompt` is the text that the chat template made from the messages."""
        return GenerationRequest(
            request_id=request_id,
            prompts=(prompt,),
            add_special_tokens=bool(self.add_special_tokens),
            sampling=self.sampling(
                max_tokens=self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens,
                num_logprobs=(self.top_logprobs or 0) if self.logprobs else None,
                num_prompt_logprobs=self.prompt_logprobs,
            ),
            **self.shared(),
        )


class CompletionRequest(GenerationFields):
    _logprob_counts = ("prompt_logprobs", "logprobs")
    prompt: Prompts
    max_tokens: Whole | None = between(0, RANGES["max_tokens"].most)  # 0: with `echo`, the prompt alone
    logprobs: Whole | None = between(ALL)
    echo: bool | None = None
    add_special_tokens: bool | None = None

    def check(self) -> None:
        super().check()
        if self.max_tokens == 0 and not self.echo:
            raise InvalidRequest("`max_tokens` must be 1 or more, or 0 with `echo`, not 0.", "max_tokens")
        if self.max_tokens == 0 and self.min_tokens:
            raise InvalidRequest(f"`min_tokens` must be in [0, max_tokens], not {self.min_tokens}.", "min_tokens")
        if self.logprob_token_ids and self.logprobs is None:
            raise InvalidRequest("`logprob_token_ids` needs `logprobs`.", "logprob_token_ids")

    @property
    def prompt_only(self) -> bool:
        """Whether the answer is dropped. A token of it is computed, as no request of a node has none."""
        return self.max_tokens == 0

    @property
    def _num_prompt_logprobs(self) -> int | None:
        """For `prompt_logprobs` and for the logprobs of what `echo` repeats."""
        asked = [self.prompt_logprobs, self.logprobs if self.echo else None]
        return max((count for count in asked if count is not None), default=None)

    def wanted(self, request_id: str) -> GenerationRequest:
        return GenerationRequest(
            request_id=request_id,
            prompts=self.prompt,
            add_special_tokens=self.add_special_tokens is not False,
            sampling=self.sampling(
                num_logprobs=self.logprobs,
                num_prompt_logprobs=self._num_prompt_logprobs,
                max_tokens=1 if self.prompt_only else self.max_tokens,
            ),
            prompt_only=self.prompt_only,
            default_max_tokens=None if "max_tokens" in self.model_fields_set else COMPLETION_TOKENS,
            **self.shared(),
        )


class TokenizeRequest(TemplateFields):
    """Either `prompt` or `messages`."""

    model: Name | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = Field(None, max_length=MAX_MESSAGES)
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    tools: ToolList | None = None

    def check(self) -> None:
        """Raises InvalidRequest for unsupported fields and for contradictions."""
        refuse_unsupported(self.model_extra or {})
        self.check_template()
        if self.prompt is not None and self.messages is not None:
            raise InvalidRequest("`prompt` and `messages` exclude each other.", "prompt")

    @property
    def names(self) -> dict[str, str]:
        """Of fields of generations: what they are here."""
        return {} if self.messages is None else _CHAT_NAMES

    @property
    def text(self) -> str:
        if self.prompt is None:
            raise InvalidRequest("`prompt` or `messages` is needed.", "prompt")
        return self.prompt


class Chat(TemplateFields):
    """A chat by itself, as clients of the other front ends give it in JSON."""

    messages: list[ChatMessage] = Field(max_length=MAX_MESSAGES)
    tools: ToolList | None = None

    def check(self) -> None:
        """Raises InvalidRequest for unsupported fields and for contradictions."""
        refuse_unsupported(self.model_extra or {})
        self.check_template()


class DetokenizeRequest(BaseModel):
    model_config = CONFIG
    model: Name | None = None
    tokens: list[int]

    def check(self) -> None:
        """Raises InvalidRequest for unsupported fields."""
        refuse_unsupported(self.model_extra or {})


def size_of_prompt(body: ChatRequest | TokenizeRequest | Chat) -> int:
    """The characters of a chat with its tools and documents; 0 if there are no messages."""
    if not body.messages:
        return 0
    tools = sum([tool.size for tool in body.tools]) if body.tools else 0
    return sum([message.size for message in body.messages]) + body.template_size + tools
