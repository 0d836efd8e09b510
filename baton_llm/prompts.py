"""The forms in which callers give prompts, made one."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NotRequired, TypedDict

from baton.errors import InvalidRequest
from baton.priority import check_priority
from baton.sampling import MAX_CACHE_SALT_CHARS
from baton_llm.sampling_params import SamplingParams, is_text


class TextPrompt(TypedDict):
    """`cache_salt`: prompts with different ones share no KV."""

    prompt: str
    cache_salt: NotRequired[str]


class TokensPrompt(TypedDict):
    """`cache_salt`: as in TextPrompt."""

    prompt_token_ids: Sequence[int]
    cache_salt: NotRequired[str]


class ChatOptions(TypedDict, total=False):
    """How conversations become prompts, by vLLM's names; None is as if it were not given.

    tools: functions that the model may call, in OpenAI's form. The answer's text has the calls in the model's own form.
    chat_template: a Jinja template instead of the model's own; a router takes it only with
    --trust-request-chat-template. chat_template_kwargs: variables for the template. add_generation_prompt: end the
    prompt where the assistant's answer begins; default True. continue_final_message: end it within the last message,
    so that the answer continues it.
    """

    tools: Sequence[Mapping[str, Any]] | None
    chat_template: str | None
    chat_template_kwargs: Mapping[str, Any] | None
    add_generation_prompt: bool | None
    continue_final_message: bool | None


Prompt = str | Sequence[int] | TextPrompt | TokensPrompt
"""A text, token ids, or vLLM's dict of either."""
Message = Mapping[str, Any]
"""In OpenAI's form: `role`, `content`, and maybe `name`, `tool_calls`, `tool_call_id`, `reasoning_content`."""
Conversation = Sequence[Message]


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation and its options, as a JSON object in the form of the HTTP API."""

    json: str


@dataclass(frozen=True, slots=True)
class Salted:
    """A prompt whose KV is shared only among those of the same salt."""

    prompt: str | tuple[int, ...]
    cache_salt: str


Input = str | tuple[int, ...] | Chat
Asked = Input | Salted
Params = SamplingParams | Sequence[SamplingParams] | None


@dataclass(frozen=True, slots=True)
class Encoded:
    """A prompt ready to be placed. `text` is None where the caller gave token ids."""

    text: str | None
    token_ids: tuple[int, ...]
    cache_salt: str = ""


def read_prompt(prompt: object) -> str | tuple[int, ...] | Salted:
    """Raises InvalidRequest."""
    return _of_dict(prompt) if isinstance(prompt, Mapping) else _plain(prompt)


def _plain(prompt: object) -> str | tuple[int, ...]:
    if isinstance(prompt, str):
        if not is_text(prompt):
            raise InvalidRequest(f"a prompt must not have half of a surrogate pair, as {_short(prompt)} has", "prompts")
        return prompt
    if _is_token_ids(prompt):
        return tuple(prompt)  # type: ignore[arg-type]
    raise InvalidRequest(f"a prompt must be a text, a list of token ids or a dict, not {_short(prompt)}", "prompts")


def read_prompts(prompts: object) -> list[str | tuple[int, ...] | Salted]:
    """One prompt, or a list of them. Raises InvalidRequest."""
    is_one = isinstance(prompts, str | Mapping) or (_is_token_ids(prompts) and bool(prompts))
    if is_one:
        return [read_prompt(prompts)]
    if not isinstance(prompts, Sequence):
        raise InvalidRequest(f"prompts must be a prompt or a list of prompts, not {_short(prompts)}", "prompts")
    return [read_prompt(prompt) for prompt in prompts]


def read_conversations(messages: object, options: Mapping[str, Any]) -> list[Chat]:
    """One list of messages, or a list of such lists; options: see ChatOptions. Their contents are checked where they
    are rendered. Raises InvalidRequest, or TypeError for an unknown option."""
    if unknown := options.keys() - ChatOptions.__annotations__.keys():
        raise TypeError(f"chat() got an unexpected keyword argument {min(unknown)!r}")
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        raise InvalidRequest(f"messages must be a list of messages, not {_short(messages)}", "messages")
    several = messages if messages and not isinstance(messages[0], Mapping) else [messages]
    given = {name: value for name, value in options.items() if value is not None}
    return [_read_conversation(conversation, given) for conversation in several]


def params_of_each(params: Params, count: int) -> list[SamplingParams | None]:
    """One for each prompt. Raises InvalidRequest."""
    if params is None or isinstance(params, SamplingParams):
        return [params] * count
    each = list(params) if isinstance(params, Sequence) else [params]
    wrong = next((one for one in each if not isinstance(one, SamplingParams)), None)
    if wrong is not None or None in each:
        raise InvalidRequest(
            f"sampling_params must be SamplingParams or a list of them, not {_short(wrong)}", "sampling_params"
        )
    if len(each) != count:
        raise InvalidRequest(f"there are {len(each)} sampling_params for {count} prompts", "sampling_params")
    return [*each]


def priorities_of_each(priority: int | Sequence[int] | None, count: int) -> list[int]:
    """One for each prompt. Raises InvalidRequest."""
    each = [0 if priority is None else priority] * count if not isinstance(priority, Sequence) else list(priority)
    wrong = next((one for one in each if not isinstance(one, int) or isinstance(one, bool)), None)
    if wrong is not None:
        raise InvalidRequest(f"priority must be a whole number or a list of them, not {_short(wrong)}", "priority")
    if len(each) != count:
        raise InvalidRequest(f"there are {len(each)} priorities for {count} prompts", "priority")
    return [check_priority(one) for one in each]


def _of_dict(prompt: Mapping[Any, Any]) -> str | tuple[int, ...] | Salted:
    salt = prompt.get("cache_salt")
    named = sorted(map(str, prompt.keys() - {"cache_salt"}))
    if named not in (["prompt"], ["prompt_token_ids"]):
        needed = "`prompt` or `prompt_token_ids`, and may have `cache_salt`"
        raise InvalidRequest(f"a prompt as a dict must have {needed}, not {named}", "prompts")
    value = prompt[named[0]]
    if isinstance(value, str) != (named[0] == "prompt") or isinstance(value, Mapping):
        raise InvalidRequest(f"`{named[0]}` must not be {_short(value)}", "prompts")
    if salt is not None and (not is_text(salt) or len(salt) > MAX_CACHE_SALT_CHARS):
        most = f"a text of at most {MAX_CACHE_SALT_CHARS} characters"
        raise InvalidRequest(f"`cache_salt` must be {most}, not {_short(salt)}", "cache_salt")
    return Salted(_plain(value), salt) if salt else _plain(value)


def _is_token_ids(value: object) -> bool:
    return (
        isinstance(value, Sequence)
        and not isinstance(value, str | bytes)
        and all(isinstance(token, int) and not isinstance(token, bool) for token in value)
    )


def _read_conversation(conversation: object, options: Mapping[str, Any]) -> Chat:
    if not isinstance(conversation, Sequence) or isinstance(conversation, str) or not conversation:
        raise InvalidRequest(f"a conversation must be a list of messages, not {_short(conversation)}", "messages")
    if wrong := [message for message in conversation if not isinstance(message, Mapping)]:
        raise InvalidRequest(f"a message must be a dict, not {_short(wrong[0])}", "messages")
    try:
        return Chat(json.dumps({**options, "messages": [dict(message) for message in conversation]}))
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"a conversation and its options must be JSON: {error}", "messages") from None


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
