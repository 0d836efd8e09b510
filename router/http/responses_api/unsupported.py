"""Fields that would change a response in a way that is not served here."""

from __future__ import annotations

from collections.abc import Mapping

from baton.sampling import NAMES
from router.http.unsupported import Harmless, OneOf, is_empty, never
from router.text.structured_output import GUIDED

IN_RESPONSES: Mapping[str, Harmless] = {
    **dict.fromkeys(
        ("messages", "prompt_logprobs", "logprobs", "echo", "max_completion_tokens", "add_generation_prompt"), never
    ),
    "access_programs": is_empty,
    "context_management": is_empty,
    "conversation": is_empty,
    "enable_response_messages": is_empty,  # vLLM's
    "generate": OneOf(True),
    "image": is_empty,
    "include_reasoning": OneOf(True),  # a chat's
    "previous_input_messages": is_empty,  # vLLM's
    "prompt": is_empty,
    "reasoning_effort": never,  # a chat's: here it is `reasoning.effort`
    "stream_id": is_empty,
    "verbosity": never,  # a chat's: here it is `text.verbosity`
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
