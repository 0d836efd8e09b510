"""Beam search as vLLM has it (vllm/entrypoints/llm.py and vllm/beam_search.py), with whole sequences and no cache."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

Logprobs = Callable[[Sequence[int]], Sequence[tuple[int, float]]]
"""Of the next token: at least the 2 * width most likely ones, best first."""
Found = list[tuple[tuple[int, ...], float]]
"""Outputs with their cumulative logprobs, best first."""


def beam_search(
    logprobs: Logprobs,
    prompt: Sequence[int],
    width: int,
    max_tokens: int,
    eos: Collection[int] = (),
    length_penalty: float = 1.0,
) -> Found:
    def score(beam: tuple[tuple[int, ...], float]) -> float:
        tokens, cumulative = beam
        length = len(prompt) + len(tokens) - (tokens[-1] in eos)
        return float(cumulative / length**length_penalty)

    beams: Found = [((), 0.0)]
    completed: Found = []
    for _ in range(max_tokens):
        candidates: Found = []
        for tokens, cumulative in beams:
            for token, logprob in logprobs((*prompt, *tokens))[: 2 * width]:
                beam = ((*tokens, token), cumulative + logprob)
                (completed if token in eos else candidates).append(beam)
        beams = sorted(candidates, key=score, reverse=True)[:width]
    return sorted(completed + beams, key=score, reverse=True)[:width]
