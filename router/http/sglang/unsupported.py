"""Fields of SGLang's requests, and of its sampling parameters, that would change an answer in a way that is not served
here; and those of other servers' requests to the same path."""

from __future__ import annotations

from collections.abc import Mapping

from router.http.schemas import ChatRequest, CompletionRequest
from router.http.unsupported import Harmless, OneOf, is_empty, never

_OTHERS: Mapping[str, Harmless] = dict.fromkeys((*ChatRequest.model_fields, *CompletionRequest.model_fields), never)

IN_GENERATE: Mapping[str, Harmless] = {
    **_OTHERS,
    **dict.fromkeys(("inputs", "parameters", "max_thinking_tokens"), never),
    **dict.fromkeys(("audio_data", "image_data", "video_data", "input_embeds", "positional_embed_overrides"), is_empty),
    **dict.fromkeys(("return_entropy", "return_hidden_states", "return_indexer_topk"), is_empty),
    **dict.fromkeys(("return_flat_raw_top_logprobs", "return_routed_experts", "return_sampling_mask"), is_empty),
    **dict.fromkeys(("bootstrap_host", "bootstrap_port", "bootstrap_room"), is_empty),
    "background": is_empty,
    "lora_id": is_empty,
    "multi_item_delimiter_indices": is_empty,
    "require_reasoning": is_empty,
}
"""With sampling parameters, which are not beside `sampling_params`."""

IN_SAMPLING: Mapping[str, Harmless] = {
    **_OTHERS,
    "beam_width": OneOf(1),
    "custom_params": is_empty,
}
"""With the names that OpenAI's API and vLLM have for sampling parameters."""
