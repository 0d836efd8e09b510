"""Steps computed before the first request: those that take the most memory, to measure it, and one of each kind, so
that no request waits for anything that is compiled, planned or loaded at its first use."""

from __future__ import annotations

import dataclasses

from baton.messages import AttemptId
from baton.sampling import SamplingParams
from engine.config import EngineConfig
from engine.sequence import Sequence
from engine.step import Chunk

_SAMPLING = SamplingParams(
    temperature=1.0, top_p=0.9, top_k=50, min_p=0.01, repetition_penalty=1.1, num_logprobs=5, max_tokens=1
)
"""Every parameter that makes a sampler keep a copy of its logits. `largest_steps` has the most logprobs instead."""
_KINDS = (
    dataclasses.replace(_SAMPLING, allowed_token_ids=frozenset({0}), bad_words_token_ids=((0,), (0, 0))),
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0),
)
_LENGTHS = (1, 6, 14, 30, 62, 126, 254, 300, 700, 1400, 3000)
"""Together with two decodes, these lengths cover every number of rows for which matmuls of few rows have a kernel,
except one row."""
_CONTEXT = 10_000


def profile_config(config: EngineConfig) -> EngineConfig:
    """The same limits with as few KV blocks as one long chunk of `largest_steps` fills."""
    length = min(config.max_num_batched_tokens, config.max_model_len - 1) + 1
    num_blocks = config.most_blocks(length) + 1  # plus the null block
    return dataclasses.replace(config, num_blocks=num_blocks, max_model_len=length)


def largest_steps(config: EngineConfig) -> list[list[Chunk]]:
    """Batches with the most tokens that a step can have: a few long prompts with decodes, as many prompts as can run at
    once, and decodes with the second half of a prompt. All use the same KV blocks, those of `profile_config`; their
    results are not used."""
    longest = min(config.max_num_batched_tokens, config.max_model_len - 1)
    num_drafts = min(config.num_speculative_tokens, longest - 1)
    num_seqs = min(config.max_num_seqs, config.max_num_batched_tokens)
    length = min(config.max_num_batched_tokens // num_seqs, longest)
    few = min(config.max_num_batched_tokens // longest, num_seqs)

    num_logprobs = max(_SAMPLING.num_logprobs, min(config.max_logprobs, config.vocab_size))
    sampling = dataclasses.replace(_SAMPLING, num_logprobs=num_logprobs)

    def decodes(num: int) -> list[Chunk]:
        seqs = _prompts(num, longest, config, sampling, num_drafts)
        return [Chunk.of(seq, seq.num_tokens - 1, 1 + num_drafts) for seq in seqs]

    def prompts(num: int, start: int, end: int) -> list[Chunk]:
        return [Chunk.of(prompt, start, end - start) for prompt in _prompts(num, end, config, sampling)]

    return [
        decodes(config.max_num_seqs - few) + prompts(few, 0, longest),
        prompts(num_seqs, 0, length),
        decodes(config.max_num_seqs - 1) + prompts(1, longest // 2, longest),
    ]


def first_steps(config: EngineConfig) -> list[list[Chunk]]:
    """Batches of all kinds that kernels are compiled for: chunks of several lengths with decodes, at the start of a
    prompt and after a long context, with all kinds of sampling. Their results are not used."""
    num_decodes = min(2, config.max_num_seqs - 1)
    steps: list[list[Chunk]] = []
    for start in sorted({0, min(_CONTEXT, config.max_model_len // 2)}):
        room = min(config.max_num_batched_tokens, config.max_model_len - 1 - start)
        if room > 0:
            steps.append([Chunk.of(seq, start, 1) for seq in _prompts(1, start + 1, config)])
        for length in sorted({min(length, room) for length in _LENGTHS if room > 0}):
            kind = _KINDS[len(steps) % len(_KINDS)]
            chunks = [Chunk.of(seq, start, 1) for seq in _prompts(num_decodes, start + 1, config, kind)]
            chunks += [Chunk.of(seq, start, length) for seq in _prompts(1, start + length, config, kind)]
            steps.append(chunks)
    return steps


def _prompts(
    num_seqs: int, length: int, config: EngineConfig, sampling: SamplingParams = _SAMPLING, num_drafts: int = 0
) -> list[Sequence]:
    """Sequences of `length` tokens, of which the last `num_drafts` are draft tokens, in the same blocks. A pool for
    layers with windows may have fewer blocks than a table has columns."""
    tokens, drafts = (0,) * (length - num_drafts), (0,) * num_drafts
    shape = config.table_shape
    entries = range(shape.num_columns(length) * shape.width)
    blocks = [1 + entry // shape.width % (config.num_blocks - 1) for entry in entries]
    return [
        Sequence(AttemptId(0, f"profile-{index}", 0), [0], tokens, sampling, block_table=blocks, draft_tokens=drafts)
        for index in range(num_seqs)
    ]
