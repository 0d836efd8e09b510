"""Fields that would change a response in a way that is not served here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from baton.sampling import NAMES
from router.http.unsupported import Harmless
from router.text.structured_output import GUIDED


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
    "enable_response_messages": _is_empty,  # vLLM's
    "generate": lambda value: value is True,
    "image": _is_empty,
    "include_reasoning": lambda value: value is True,  # a chat's
    "previous_input_messages": _is_empty,  # vLLM's
    "prompt": _is_empty,
    "reasoning_effort": _never,  # a chat's: here it is `reasoning.effort`
    "stream_id": _is_empty,
    "verbosity": _never,  # a chat's: here it is `text.verbosity`
}
"""Those of this API, and those of chats that have another name here."""

SHARED = frozenset(
    {
        *NAMES,
        *("bad_words", "cache_salt", "include_stop_str_in_output", "model", "priority", "request_id"),
        *("return_tokens_as_token_ids", "skip_special_tokens", "spaces_between_special_tokens", "stop", "stream"),
        *("structured_outputs", "timeout", "truncate_prompt_tokens", "truncation_side"),
        *GUIDED,
    }
) - {"max_tokens", "logprob_token_ids", "num_logprobs", "prompt_logprobs", "num_prompt_logprobs"}
"""Fields of `GenerationFields` that responses have too, with the same meaning. The others are refused."""
