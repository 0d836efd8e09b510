"""Fields that the schemas do not know. They are refused by name if they would change an answer in an unsupported way,
and otherwise mentioned in the log."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from baton.errors import InvalidRequest
from router.limits import MAX_UNKNOWN_FIELDS

log = logging.getLogger(__name__)

Harmless = Callable[[Any], bool]
"""Whether a field's value changes nothing."""


def is_empty(value: Any) -> bool:
    """A rule: what counts as nothing changes nothing."""
    return not value


def never(value: Any) -> bool:
    """A rule: every value would change something."""
    return False


class OneOf:
    """A rule: these values change nothing."""

    def __init__(self, *harmless: Any) -> None:
        self.harmless = harmless

    def __call__(self, value: Any) -> bool:
        return any(type(value) is type(one) and value == one for one in self.harmless)


HARMLESS: dict[str, Harmless] = {
    # OpenAI's
    "audio": is_empty,
    "function_call": OneOf("none", "auto"),
    "functions": is_empty,
    "input": never,
    "instructions": is_empty,
    "max_output_tokens": never,
    "modalities": OneOf([], ["text"]),
    "moderation": is_empty,
    "suffix": is_empty,
    "tool_choice": OneOf("none", "auto"),
    "tools": is_empty,
    "verbosity": OneOf("medium"),
    "web_search_options": never,
    # vLLM's
    "chat_template": is_empty,
    "continue_final_message": is_empty,
    "documents": is_empty,
    "guided_whitespace_pattern": is_empty,
    "kv_transfer_params": is_empty,
    "early_stopping": is_empty,
    "ec_transfer_params": is_empty,
    "logprob_token_ids": is_empty,
    "packed_top_logprobs": is_empty,
    "media_io_kwargs": is_empty,
    "mm_processor_kwargs": is_empty,
    "prompt_embeds": is_empty,
    "prompt_token_ids": is_empty,
    "repetition_detection": is_empty,
    "return_prompt_text": is_empty,
    "thinking_token_budget": OneOf(-1),
    "truncation_side": OneOf("left"),
    "vllm_xargs": is_empty,
    "watermarking": is_empty,
    # SGLang's
    "custom_logit_processor": is_empty,
    "ebnf": is_empty,
    "image_data": is_empty,
    "input_embeds": is_empty,
    "input_ids": is_empty,
    "json_schema": is_empty,
    "lora_path": is_empty,
    "no_stop_trim": is_empty,
    "regex": is_empty,
    "return_hidden_states": is_empty,
    "sampling_params": is_empty,
    "separate_reasoning": OneOf(True),
    "session_params": is_empty,
    "stop_regex": is_empty,
    "stream_reasoning": OneOf(True),
    "structural_tag": is_empty,
    # Anthropic's
    "max_tokens_to_sample": never,
    "stop_sequences": is_empty,
    "system": is_empty,
    "thinking": OneOf({"type": "disabled"}),
    # llama.cpp's, text-generation-inference's, transformers'
    "adapter_id": is_empty,
    "do_sample": never,
    "dry_multiplier": is_empty,
    "grammar": is_empty,
    "max_new_tokens": never,
    "mirostat": is_empty,
    "n_predict": never,
    "no_repeat_ngram_size": is_empty,
    "num_beams": OneOf(1),
    "num_predict": never,
    "top_a": is_empty,
    "typical_p": OneOf(1, 1.0),
    "xtc_probability": is_empty,
}
"""For each field, the values that change nothing; null never changes anything."""

NO_EFFECT: Mapping[str, str] = {
    "cache_control": "Anthropic's; all prompts are cached",
    "conversation_id": "SGLang's; the router finds the node that has the prompt by itself",
    "custom_labels": "SGLang's; metrics have the labels that they have",
    "data_parallel_rank": "SGLang's; the router chooses the node",
    "log_metrics": "SGLang's; all requests are counted",
    "metadata": "OpenAI's; only `/v1/responses` keeps answers",
    "no_logs": "SGLang's; prompts and answers are never logged",
    "parallel_tool_calls": "OpenAI's; outside chats nothing calls tools",
    "prediction": "OpenAI's; it only says which tokens may come faster",
    "prompt_cache_key": "OpenAI's; the router finds the node that has the prompt by itself",
    "prompt_cache_options": "OpenAI's; all prompts are cached",
    "prompt_cache_retention": "OpenAI's; all prompts are cached",
    "routed_dp_rank": "SGLang's; the router chooses the node",
    "routing_key": "SGLang's; the router finds the node that has the prompt by itself",
    "safety_identifier": "OpenAI's; nothing is moderated",
    "service_tier": "OpenAI's; there is one",
    "session_id": "vLLM's; the router finds the node that has the prompt by itself",
    "stream_interval": "vLLM's; tokens are sent as they come",
    "store": "OpenAI's; only `/v1/responses` keeps answers",
    "user": "OpenAI's; nothing is told apart by it",
}
"""Not worth a warning: fields that change no answer, or are handled elsewhere, and why they need not do anything."""

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
        if value is None or (name in NO_EFFECT and name not in rules):
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
