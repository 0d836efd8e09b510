"""What clients may send: Anthropic's fields, and `seed`, `timeout`, `cache_salt` and `chat_template_kwargs`, which mean
the same as in chats."""

from __future__ import annotations

import itertools
from typing import Any, Literal

from pydantic import BaseModel, Field

from baton.errors import InvalidRequest
from baton.sampling import MAX_CACHE_SALT_CHARS, RANGES
from router.generation_request import GenerationRequest
from router.http.anthropic.content import Content
from router.http.anthropic.unsupported import IN_CONVERSATIONS, IN_MESSAGES
from router.http.fields import CONFIG, Name, Strings, TemplateValues, Whole, between, sampling
from router.http.unsupported import refuse_unsupported
from router.limits import MAX_MESSAGES, MAX_STOP_CHARS
from router.service import size_of_chat

_SAMPLING = ("max_tokens", "temperature", "top_p", "top_k", "seed")


class Message(BaseModel):
    model_config = CONFIG
    role: Literal["user", "assistant", "system"]
    content: Content


class CountTokensRequest(BaseModel):
    """A conversation. If its last message is the assistant's, the answer continues it."""

    model_config = CONFIG
    model: Name | None = None
    messages: list[Message] = Field(max_length=MAX_MESSAGES, json_schema_extra={"minItems": 1})
    system: Content | None = None
    chat_template_kwargs: TemplateValues | None = None

    def check(self) -> None:
        """Raises InvalidRequest for unsupported fields and for contradictions."""
        refuse_unsupported(self.model_extra or {}, IN_CONVERSATIONS)
        self._check_messages()

    def _check_messages(self) -> None:
        if not self.messages:
            raise InvalidRequest("`messages` must not be empty.", "messages")

    @property
    def everything(self) -> list[Message]:
        """The messages, after the system prompt if there is one."""
        system = [Message(role="system", content=self.system)] if self.system else []
        return system + self.messages

    @property
    def size(self) -> int:
        return size_of_chat(self.everything)

    @property
    def continues(self) -> bool:
        return self.messages[-1].role == "assistant"

    def chat(self) -> list[dict[str, str]]:
        """The conversation for a chat template. Consecutive messages of one role become one, as Anthropic has it: many
        templates insist that roles alternate."""
        turns = itertools.groupby(self.everything, key=lambda message: message.role)
        return [{"role": role, "content": "\n".join(m.content for m in messages)} for role, messages in turns]


class MessagesRequest(CountTokensRequest):
    max_tokens: Whole = sampling("max_tokens", ...)
    temperature: float | None = sampling("temperature")
    top_p: float | None = sampling("top_p")
    top_k: Whole | None = between(-1, RANGES["top_k"].most)
    stop_sequences: Strings = ()
    stream: bool | None = None
    metadata: dict[str, Any] | None = None
    seed: Whole | None = None
    cache_salt: str | None = Field(None, max_length=MAX_CACHE_SALT_CHARS)
    timeout: float | None = Field(None, description="seconds until the request is given up")

    def check(self) -> None:
        refuse_unsupported(self.model_extra or {}, IN_MESSAGES)
        self._check_messages()
        if "" in self.stop_sequences:
            raise InvalidRequest("`stop_sequences` must not contain an empty string.", "stop_sequences")
        num_chars = sum(map(len, self.stop_sequences))
        if num_chars > MAX_STOP_CHARS:
            most = f"at most {MAX_STOP_CHARS} characters together"
            raise InvalidRequest(f"`stop_sequences` must have {most}, not {num_chars}.", "stop_sequences")

    def wanted(self, request_id: str, prompt: str) -> GenerationRequest:
        """`prompt` is the text that the chat template made from the conversation."""
        given = {name: getattr(self, name) for name in _SAMPLING}
        return GenerationRequest(
            request_id=request_id,
            prompts=(prompt,),
            add_special_tokens=False,
            sampling={name: value for name, value in given.items() if value is not None},
            stop=self.stop_sequences,
            timeout_s=self.timeout,
            cache_salt=self.cache_salt or "",
        )
