"""The forms in which callers give prompts, made one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict, TypeVar

from baton.errors import InvalidRequest
from baton.priority import check_priority
from baton_llm.sampling_params import SamplingParams

T = TypeVar("T")


class TextPrompt(TypedDict):
    prompt: str


class TokensPrompt(TypedDict):
    prompt_token_ids: Sequence[int]


Prompt = str | Sequence[int] | TextPrompt | TokensPrompt
"""A text, token ids, or vLLM's dict of either."""
Message = Mapping[str, str]
Conversation = Sequence[Message]
Input = str | tuple[int, ...] | tuple[Message, ...]
"""A text, token ids, or the messages of a chat."""
Params = SamplingParams | Sequence[SamplingParams] | None


@dataclass(frozen=True, slots=True)
class Encoded:
    """A prompt ready to be placed. `text` is None where the caller gave token ids."""

    text: str | None
    token_ids: tuple[int, ...]


def read_prompt(prompt: object) -> str | tuple[int, ...]:
    """Raises InvalidRequest."""
    if isinstance(prompt, Mapping):
        prompt = _of_dict(prompt)
    if isinstance(prompt, str):
        return prompt
    if _is_token_ids(prompt):
        return tuple(prompt)  # type: ignore[arg-type]
    raise InvalidRequest(f"a prompt must be a text, a list of token ids or a dict, not {_short(prompt)}", "prompts")


def read_prompts(prompts: object) -> list[str | tuple[int, ...]]:
    """One prompt, or a list of them. Raises InvalidRequest."""
    is_one = isinstance(prompts, str | Mapping) or (bool(prompts) and _is_token_ids(prompts))
    if is_one:
        return [read_prompt(prompts)]
    if not isinstance(prompts, Sequence):
        raise InvalidRequest(f"prompts must be a prompt or a list of prompts, not {_short(prompts)}", "prompts")
    return [read_prompt(prompt) for prompt in prompts]


def read_conversations(messages: object) -> list[tuple[Message, ...]]:
    """One list of messages, or a list of such lists. Raises InvalidRequest."""
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        raise InvalidRequest(f"messages must be a list of messages, not {_short(messages)}", "messages")
    several = messages if messages and not isinstance(messages[0], Mapping) else [messages]
    return [_read_conversation(conversation) for conversation in several]


def params_of_each(params: Params, count: int) -> list[SamplingParams | None]:
    """One for each prompt. Raises InvalidRequest."""
    if params is None or isinstance(params, SamplingParams):
        return [params] * count
    each = list(params) if isinstance(params, Sequence) else [params]
    wrong = next((one for one in each if not isinstance(one, SamplingParams)), None)
    if wrong is not None or None in each:
        raise InvalidRequest(f"params must be SamplingParams or a list of them, not {_short(wrong)}", "params")
    if len(each) != count:
        raise InvalidRequest(f"there are {len(each)} params for {count} prompts", "params")
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


def _of_dict(prompt: Mapping[Any, Any]) -> object:
    known = [name for name in ("prompt", "prompt_token_ids") if name in prompt]
    if len(known) != 1 or len(prompt) != 1:
        raise InvalidRequest(
            f"a prompt as a dict must have `prompt` or `prompt_token_ids`, not {sorted(map(str, prompt))}", "prompts"
        )
    value = prompt[known[0]]
    if isinstance(value, str) != (known[0] == "prompt") or isinstance(value, Mapping):
        raise InvalidRequest(f"`{known[0]}` must not be {_short(value)}", "prompts")
    return value


def _is_token_ids(value: object) -> bool:
    return (
        isinstance(value, Sequence)
        and not isinstance(value, str | bytes)
        and all(isinstance(token, int) and not isinstance(token, bool) for token in value)
    )


def _read_conversation(conversation: object) -> tuple[Message, ...]:
    if not isinstance(conversation, Sequence) or isinstance(conversation, str) or not conversation:
        raise InvalidRequest(f"a conversation must be a list of messages, not {_short(conversation)}", "messages")
    for message in conversation:
        if not _is_message(message):
            what = "a dict of texts, `role`, `content` and maybe `name`"
            raise InvalidRequest(f"a message must be {what}, not {_short(message)}", "messages")
    return tuple(conversation)


def _is_message(value: object) -> bool:
    return (
        isinstance(value, Mapping)
        and {"role", "content"} <= value.keys() <= {"role", "content", "name"}
        and all(isinstance(text, str) for text in value.values())
    )


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
