"""Fields that would change an answer in ways that are not built: refused by name, never ignored."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from baton.errors import InvalidRequest


def _is_empty(value: Any) -> bool:
    return not value


def _is_one_of(*harmless: Any) -> Callable[[Any], bool]:
    return lambda value: value in harmless


_HARMLESS: dict[str, Callable[[Any], bool]] = {
    "allowed_token_ids": _is_empty,
    "audio": _is_empty,
    "bad_words": _is_empty,
    "chat_template": _is_empty,
    "continue_final_message": _is_empty,
    "documents": _is_empty,
    "function_call": _is_one_of("none", "auto"),
    "functions": _is_empty,
    "guided_choice": _is_empty,
    "guided_grammar": _is_empty,
    "guided_json": _is_empty,
    "guided_regex": _is_empty,
    "length_penalty": _is_one_of(1),
    "logits_processors": _is_empty,
    "modalities": _is_one_of([], ["text"]),
    "prompt_embeds": _is_empty,
    "prompt_logprobs": lambda value: value is False,
    "response_format": _is_one_of({}, {"type": "text"}),
    "return_tokens_as_token_ids": _is_empty,
    "structured_outputs": _is_empty,
    "suffix": _is_empty,
    "tool_choice": _is_one_of("none", "auto"),
    "tools": _is_empty,
    "truncate_prompt_tokens": lambda value: False,
    "use_beam_search": _is_empty,
    "web_search_options": lambda value: False,
}
"""What each may be and still mean nothing; null always means nothing."""


def refuse_unsupported(extra: Mapping[str, Any]) -> None:
    """`extra` are the fields that the schema does not know. Raises InvalidRequest."""
    for name, value in extra.items():
        if value is not None and name in _HARMLESS and not _HARMLESS[name](value):
            raise InvalidRequest(f"`{name}` is not supported here.", name)
