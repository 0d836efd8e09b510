"""Fields that would change a response in a way that is not served here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from router.http.unsupported import Harmless


def _is_empty(value: Any) -> bool:
    return not value


def _never(value: Any) -> bool:
    return False


IN_RESPONSES: Mapping[str, Harmless] = {
    **dict.fromkeys(
        ("messages", "prompt_logprobs", "logprobs", "echo", "max_completion_tokens", "add_generation_prompt"), _never
    ),
    "access_programs": _is_empty,
    "background": _is_empty,
    "context_management": _is_empty,
    "conversation": _is_empty,
    "generate": lambda value: value is True,
    "image": _is_empty,
    "moderation": _is_empty,
    "prompt": _is_empty,
    "prompt_cache_options": _is_empty,
    "reasoning_effort": _never,  # a chat's: here it is `reasoning.effort`
    "stream_id": _is_empty,
    "verbosity": _never,  # a chat's: here it is `text.verbosity`
}
"""Those of this API, and those of chats that have another name here."""

CHATS_ONLY = ("max_tokens", "response_format", "return_token_ids", "best_of")
"""Fields of `GenerationFields` that responses do not have."""
