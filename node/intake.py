"""From a router's Prefill message to a sequence of the engine, the same for both roles."""

from __future__ import annotations

from baton.errors import InvalidRequest
from baton.messages import Prefill
from engine.logits_processor import LogitsProcessorChain
from engine.sequence import Sequence
from engine.token_matcher import TokenMatcher


def make_sequence(
    prefill: Prefill,
    *,
    hand_off: bool,
    now: float,
    matcher: TokenMatcher | None = None,
    processors: LogitsProcessorChain | None = None,
) -> Sequence:
    """The sequence that computes prompt and output so far. Raises InvalidRequest if the output is complete already;
    `Engine.add` checks whether the tokens fit."""
    output = prefill.samples[0].output_tokens
    if len(output) >= prefill.sampling.max_tokens:
        raise InvalidRequest(f"{len(output)} tokens of max_tokens {prefill.sampling.max_tokens} exist already")
    return Sequence(
        attempt_id=prefill.attempt_id,
        samples=[s.index for s in prefill.samples],
        prompt_tokens=prefill.prompt_tokens,
        tokens=[*prefill.prompt_tokens, *output],
        sampling=prefill.sampling,
        hand_off=hand_off,
        cache_salt=prefill.cache_salt,
        arrived_s=now,
        priority=prefill.priority,
        matcher=matcher,
        processors=processors,
    )
