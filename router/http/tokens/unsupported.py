"""Fields of vLLM's requests of tokens, and of its sampling parameters, that would change an answer in a way that is not
served here."""

from __future__ import annotations

from collections.abc import Mapping

from router.http.sampling_fields import SamplingFields
from router.http.schemas import GenerationFields
from router.http.unsupported import Harmless, OneOf, is_empty, never

IN_TOKENS: Mapping[str, Harmless] = {
    **dict.fromkeys(SamplingFields.model_fields, never),
    **dict.fromkeys(("logprobs", "messages", "prompt"), never),
    "content_parts": is_empty,
    "features": is_empty,
    "output_mode": OneOf("tokens"),
    "reasoning_ended": OneOf(True),
}
"""With the fields of `sampling_params`, which are not beside it."""

IN_SAMPLING: Mapping[str, Harmless] = {
    **{name: never for name in GenerationFields.model_fields if name not in SamplingFields.model_fields},
    "best_of": OneOf(1),
    "extra_args": is_empty,
    "flat_logprobs": is_empty,
    "length_penalty": OneOf(1, 1.0),
    "use_beam_search": is_empty,
}
"""Those of chats and completions included that are not in `sampling_params`."""
