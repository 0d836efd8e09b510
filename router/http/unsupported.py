"""Fields that the schemas do not know. They are refused by name if they would change an answer in an unsupported way,
and otherwise mentioned in the log."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from baton.errors import InvalidRequest
from router.limits import MAX_UNKNOWN_FIELDS

log = logging.getLogger(__name__)

Harmless = Callable[[Any], bool]
"""Whether a field's value changes nothing."""


def _is_empty(value: Any) -> bool:
    return not value


def _never(value: Any) -> bool:
    return False


@dataclass(frozen=True, slots=True)
class OneOf:
    """A rule: these values change nothing."""

    harmless: tuple[Any, ...]

    def __call__(self, value: Any) -> bool:
        return any(type(value) is type(one) and value == one for one in self.harmless)


def _is_one_of(*harmless: Any) -> OneOf:
    return OneOf(harmless)


HARMLESS: dict[str, Harmless] = {
    # OpenAI's
    "audio": _is_empty,
    "function_call": _is_one_of("none", "auto"),
    "functions": _is_empty,
    "input": _never,
    "instructions": _is_empty,
    "max_output_tokens": _never,
    "modalities": _is_one_of([], ["text"]),
    "moderation": _is_empty,
    "prediction": _is_empty,
    "suffix": _is_empty,
    "tool_choice": _is_one_of("none", "auto"),
    "tools": _is_empty,
    "verbosity": _is_one_of("medium"),
    "web_search_options": _never,
    # vLLM's
    "chat_template": _is_empty,
    "continue_final_message": _is_empty,
    "documents": _is_empty,
    "guided_whitespace_pattern": _is_empty,
    "kv_transfer_params": _is_empty,
    "early_stopping": _is_empty,
    "ec_transfer_params": _is_empty,
    "logprob_token_ids": _is_empty,
    "packed_top_logprobs": _is_empty,
    "media_io_kwargs": _is_empty,
    "mm_processor_kwargs": _is_empty,
    "prompt_embeds": _is_empty,
    "prompt_token_ids": _is_empty,
    "repetition_detection": _is_empty,
    "return_prompt_text": _is_empty,
    "thinking_token_budget": _is_one_of(-1),
    "truncation_side": _is_one_of("left"),
    "vllm_xargs": _is_empty,
    "watermarking": _is_empty,
    # SGLang's
    "custom_logit_processor": _is_empty,
    "ebnf": _is_empty,
    "image_data": _is_empty,
    "input_embeds": _is_empty,
    "input_ids": _is_empty,
    "json_schema": _is_empty,
    "lora_path": _is_empty,
    "no_stop_trim": _is_empty,
    "regex": _is_empty,
    "return_hidden_states": _is_empty,
    "sampling_params": _is_empty,
    "separate_reasoning": _is_one_of(True),
    "session_params": _is_empty,
    "stop_regex": _is_empty,
    "stream_reasoning": _is_one_of(True),
    "structural_tag": _is_empty,
    # Anthropic's
    "max_tokens_to_sample": _never,
    "stop_sequences": _is_empty,
    "system": _is_empty,
    "thinking": _is_one_of({"type": "disabled"}),
    # llama.cpp's, text-generation-inference's, transformers'
    "adapter_id": _is_empty,
    "do_sample": _never,
    "dry_multiplier": _is_empty,
    "grammar": _is_empty,
    "max_new_tokens": _never,
    "mirostat": _is_empty,
    "n_predict": _never,
    "no_repeat_ngram_size": _is_empty,
    "num_beams": _is_one_of(1),
    "num_predict": _never,
    "top_a": _is_empty,
    "typical_p": _is_one_of(1, 1.0),
    "xtc_probability": _is_empty,
}
"""For each field, the values that change nothing; null never changes anything."""

MEANINGLESS = frozenset(
    {
        *("metadata", "parallel_tool_calls", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"),
        *("safety_identifier", "service_tier", "store", "user"),
        "cache_control",  # Anthropic's: prefixes are cached anyway
        *("session_id", "stream_interval"),  # vLLM's
    }
)
"""Not worth a warning: they change no answer, or are handled elsewhere."""

_MAX_WARNINGS = 256
_warned: set[str] = set()


def refuse_unsupported(extra: Mapping[str, Any], others: Mapping[str, Harmless] | None = None) -> None:
    """`extra` are the fields unknown to the schema; `others` has the rules of an API that differ from those for all.
    Raises InvalidRequest; warns once about each other name."""
    rules = HARMLESS if others is None else {**HARMLESS, **others}
    if len(extra) > MAX_UNKNOWN_FIELDS:
        names = ", ".join(f"`{name[:64]}`" for name in list(extra)[:3])
        raise InvalidRequest(f"There are {len(extra)} unknown fields, of at most {MAX_UNKNOWN_FIELDS}: {names}, ...")
    for name, value in extra.items():
        if value is None or (name in MEANINGLESS and name not in rules):
            continue
        if name not in rules:
            _warn(name[:64])
        elif not rules[name](value):
            raise InvalidRequest(f"`{name}` is not supported here.", name)


def _warn(name: str) -> None:
    """Warn once per name, and for a bounded number of names, so that clients cannot fill memory or the log."""
    if name in _warned or len(_warned) >= _MAX_WARNINGS:
        return
    _warned.add(name)
    log.warning("unknown request field %r is ignored", name)
    if len(_warned) == _MAX_WARNINGS:
        log.warning("%d request fields were unknown: there is no warning of others", _MAX_WARNINGS)
