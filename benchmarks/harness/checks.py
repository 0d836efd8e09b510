"""Checks that answers are correct: a fast wrong answer is worth nothing."""

from __future__ import annotations

import secrets
from random import Random
from typing import Any

from benchmarks.harness.http_stream import Streamed
from benchmarks.harness.load import Load
from tools import tiny_tasks

NUM_COMPARED = 8
MOST_RECALLED_TOKENS = 256
NUM_RECALLED = 8
MAX_FORGOTTEN = 1
"""Wrong answers tolerated among NUM_RECALLED: the model itself is right in more than 99 of 100."""
RECALL_TOKENS = (100, 1500)
TINY = "baton-tiny"


class WrongAnswers(Exception):
    """An answer is wrong; the text describes it."""


async def check_concurrency(load: Load, concurrency: int, tolerance: float) -> dict[str, Any]:
    """Compare greedy tokens of requests sent one at a time with those of the same requests among others. Raises
    WrongAnswers."""
    bodies = [load.body(-number, logprobs=2) for number in range(1, NUM_COMPARED + 1)]
    alone = await load.send("/v1/completions", bodies, 1)
    crowd = [load.body(-number) for number in range(1, max(NUM_COMPARED, concurrency) + 1)]
    together = await load.send("/v1/completions", crowd, max(NUM_COMPARED, concurrency))
    margins = [_margin_where_different(a, b) for a, b in zip(alone, together, strict=False)]
    different = [margin for margin in margins if margin is not None]
    if wrong := [margin for margin in different if margin > tolerance]:
        text = (
            f"{len(wrong)} of {NUM_COMPARED} greedy answers differ between one request alone and {len(crowd)} at once"
        )
        raise WrongAnswers(f"{text}; the two best logprobs are {max(wrong):.2g} apart, more than --tie-tolerance")
    return {"num_compared": NUM_COMPARED, "num_near_ties": len(different)}


def _margin_where_different(alone: Streamed, together: Streamed) -> float | None:
    """The difference of the two best logprobs at the first differing token. None: all tokens are equal."""
    pairs = zip(alone.tokens, together.tokens, alone.margins, strict=True)
    return next((margin for ours, theirs, margin in pairs if ours != theirs), None)


async def check_recall(load: Load, model: str, concurrency: int) -> dict[str, Any]:
    """Ask concurrently for facts in long texts; only for the embedded model, which is trained to recall them. Raises
    WrongAnswers."""
    if model != TINY:
        return {}
    rng = Random(11)
    low, high = RECALL_TOKENS
    samples = [tiny_tasks.recall(rng, "heldout", num_tokens=rng.randint(low, high)) for _ in range(NUM_RECALLED)]
    common = {"temperature": 0, "max_tokens": MOST_RECALLED_TOKENS}  # simulated nodes would fill the context
    bodies = [{"messages": sample.messages, "cache_salt": secrets.token_hex(8), **common} for sample in samples]
    answers = await load.send("/v1/chat/completions", bodies, concurrency)
    right = sum(sample.check(answer.text) for sample, answer in zip(samples, answers, strict=True))
    if right < NUM_RECALLED - MAX_FORGOTTEN:
        raise WrongAnswers(f"only {right} of {NUM_RECALLED} facts were recalled from long texts")
    return {"num_recalled": right, "num_asked": NUM_RECALLED}
