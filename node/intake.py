"""From a router's Prefill message to a sequence of the engine, the same for both roles."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence as Seq

from baton.errors import InvalidRequest
from baton.messages import AttemptId, Prefill
from baton.sampling import SamplingParams
from engine.beams import BeamGroup
from engine.engine import Engine
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
    beams: BeamGroup[Sequence] | None = None,
) -> Sequence:
    """The sequence that computes prompt and output so far. Raises InvalidRequest if the output is complete already;
    `Engine.add` checks whether the tokens fit."""
    output = prefill.samples[0].output_tokens
    if prefill.sampling.beam_width and output:
        raise InvalidRequest("a beam search cannot go on from an output", "samples")
    if len(output) >= prefill.sampling.max_tokens:
        raise InvalidRequest(f"{len(output)} tokens of max_tokens {prefill.sampling.max_tokens} exist already")
    return Sequence(
        attempt_id=prefill.attempt_id,
        samples=[0] if beams else [s.index for s in prefill.samples],
        prompt_tokens=prefill.prompt_tokens,
        output=output,
        sampling=BeamGroup.sampling_of(prefill.sampling) if beams else prefill.sampling,
        hand_off=hand_off,
        cache_salt=prefill.cache_salt,
        arrived_s=now,
        age_s=prefill.age_s,
        priority=prefill.priority,
        matcher=matcher,
        num_prompt_logprobs=prefill.sampling.num_prompt_logprobs,
        processors=processors,
        beams=beams,
    )


def without_last_token(prefill: Prefill) -> Prefill:
    """What a prefill node computes for a beam search: the decode node computes the prompt's last token, whose logits
    give the first candidates. Raises InvalidRequest if nothing is left."""
    if len(prefill.prompt_tokens) < 2:
        raise InvalidRequest("a beam search from a single token needs no prefill node", "prompt")
    return dataclasses.replace(prefill, prompt_tokens=prefill.prompt_tokens[:-1])


def beams_of(
    attempt_id: AttemptId, prompt: Seq[int], sampling: SamplingParams, engine: Engine
) -> BeamGroup[Sequence] | None:
    """The beam search that a request asks for, if it does. Raises InvalidRequest if it may not fit."""
    if not sampling.beam_width:
        return None
    engine.beam_search.require_possible(sampling.beam_width, len(prompt) + sampling.max_tokens)
    return BeamGroup(attempt_id, len(prompt), sampling, engine.config.eos_token_ids)
