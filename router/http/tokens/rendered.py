"""What a chat or a completion becomes as a request of tokens, which gets the same answers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from baton.errors import InvalidRequest
from baton.sampling import NAMES, SamplingParams
from baton.structured_output.constraint import StructuredKind, StructuredOutput
from router.http.sampling_fields import SamplingFields
from router.http.schemas import ChatRequest, CompletionRequest, GenerationFields
from router.text.generation_request import GenerationRequest, sampling_params
from router.text.models import ServedModel

_PLAIN = frozenset(NAMES) & SamplingFields.model_fields.keys() - {"seed", "structured_outputs", "logits_processors"}
"""Parameters that clients say as they are, numbers but for collections of token ids."""


def check_renderable(body: ChatRequest | CompletionRequest) -> None:
    """Raises InvalidRequest for what cannot be asked for with tokens."""
    for name, asked in (
        ("use_beam_search", body.use_beam_search),
        ("best_of", body.keeps_best),
        ("max_tokens", isinstance(body, CompletionRequest) and body.prompt_only),
    ):
        if asked:
            value = json.dumps(getattr(body, name))
            raise InvalidRequest(f"`{name}` {value} cannot be rendered: requests of tokens do not have it.", name)


def rendered(
    request_id: str, model: ServedModel, body: GenerationFields, wanted: GenerationRequest, tokens: Sequence[int]
) -> dict[str, Any]:
    """A prompt of `wanted`, which `body` asked for, as the fields of TokensRequest. Raises InvalidRequest."""
    return {
        "request_id": request_id,
        "token_ids": tokens,
        "features": None,
        "sampling_params": _sampling(wanted, sampling_params(wanted, model, len(tokens))),
        "model": model.name,
        "stream": bool(body.stream),
        "stream_options": body.stream_options and body.stream_options.model_dump(exclude_none=True),
        "cache_salt": body.cache_salt,
        "priority": wanted.priority,
        "timeout": wanted.timeout_s,
        "kv_transfer_params": None,
    }


def _sampling(wanted: GenerationRequest, params: SamplingParams) -> dict[str, Any]:
    """All that `params` says, but a seed only if the client gave one: each request without one draws its own."""
    said = {name: _plain(getattr(params, name)) for name in NAMES if name in _PLAIN}
    return {
        **said,
        "n": wanted.n,
        "seed": wanted.sampling.get("seed"),
        "logprobs": None if params.num_logprobs < 0 else params.num_logprobs,
        "prompt_logprobs": params.num_prompt_logprobs,
        "allowed_token_ids": said["allowed_token_ids"] or None,
        "logprob_token_ids": said["logprob_token_ids"] or None,
        "stop": wanted.stop,
        "bad_words": wanted.bad_words,
        "include_stop_str_in_output": wanted.include_stop_str_in_output,
        "skip_special_tokens": wanted.skip_special_tokens,
        "spaces_between_special_tokens": wanted.spaces_between_special_tokens,
        "structured_outputs": params.structured_outputs and _constraint(params.structured_outputs),
        "logits_processors": [_processor(*one.parsed(), one.name) for one in params.logits_processors],
    }


def _plain(value: Any) -> Any:
    return sorted(value) if isinstance(value, frozenset) else value


def _constraint(wanted: StructuredOutput) -> dict[str, Any]:
    match wanted.kind:
        case StructuredKind.JSON_OBJECT:
            return {wanted.kind.value: True}
        case StructuredKind.CHOICE:
            return {wanted.kind.value: wanted.choices()}
    return {wanted.kind.value: wanted.text}


def _processor(args: list[Any], kwargs: dict[str, Any], name: str) -> dict[str, Any]:
    return {"name": name, "args": args, "kwargs": kwargs}
