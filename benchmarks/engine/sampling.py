"""What sampling parameters add to a decode step: `python -m benchmarks.engine.sampling`

A full batch decodes as in `benchmarks.engine.decode`, all sequences with the same parameters. Each is measured in turns
with greedy sampling, so that a drift of the machine meets both.
"""

from __future__ import annotations

import statistics
from typing import Any, ClassVar

from pydantic import Field

from baton.sampling import SamplingParams
from benchmarks.engine.bench import Bench, EngineBenchSettings, note
from benchmarks.engine.decode import GREEDY, SAMPLINGS, WARM_STEPS, fill_pool, measure_cell
from benchmarks.engine.report import main
from benchmarks.harness.tables import Table

QUICK = (3, 40, 6)  # batch, context, steps
NUM_TURNS = 3


class SamplingBenchSettings(EngineBenchSettings):
    """Measures decode steps with sampling parameters, in this process."""

    prog: ClassVar[str] = "benchmarks.engine.sampling"

    batch: int = Field(256, ge=1, description="sequences")
    context: int = Field(1024, ge=1, description="tokens of each at the beginning")
    num_steps: int = Field(60, ge=2, description=f"steps to measure in each turn, after {WARM_STEPS}")


def samplings(vocab_size: int, num_tokens: int) -> dict[str, SamplingParams]:
    """By name; tokens are spread over the vocabulary. num_tokens: of each answer."""
    spread = range(0, vocab_size, max(1, vocab_size // 1000))
    greedy: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}
    drawn: dict[str, Any] = {"temperature": 0.8, "ignore_eos": True}
    return {
        "temperature": SamplingParams(**drawn),
        "top_p, top_k, min_p": SamplingParams(**drawn, top_p=0.95, top_k=50, min_p=0.01),
        "penalties": SamplingParams(**greedy, repetition_penalty=1.1, presence_penalty=0.5, frequency_penalty=0.5),
        "logit_bias, 300 entries": SamplingParams(**greedy, logit_bias=dict.fromkeys(spread[:300], 1.0)),
        "allowed_token_ids": SamplingParams(**greedy, allowed_token_ids=frozenset(spread)),
        "bad_words, 16 of 2 tokens": SamplingParams(
            **greedy, bad_words_token_ids=tuple((token, token + 1) for token in spread[:16])
        ),
        "min_tokens": SamplingParams(
            **greedy, min_tokens=num_tokens, max_tokens=num_tokens, stop_token_ids=frozenset(spread[:8])
        ),
        "logprobs, 5": SamplingParams(**greedy, num_logprobs=5),
    }


def measure(bench: Bench) -> dict[str, Any]:
    """The section of the report."""
    settings = bench.settings
    assert isinstance(settings, SamplingBenchSettings)
    batch, context, num_steps = QUICK if settings.quick else (settings.batch, settings.context, settings.num_steps)
    fill_pool(bench)
    rows = []
    for name, params in samplings(bench.engine.config.vocab_size, num_steps + 2 * WARM_STEPS).items():
        note(f"decode, batch {batch} at {context}, {name}")
        greedy_ms, ms = list[float](), list[float]()
        for _ in range(1 if settings.quick else NUM_TURNS):
            for times, own, own_name in ((greedy_ms, SAMPLINGS[GREEDY], GREEDY), (ms, params, name)):
                measured = measure_cell(bench, (batch, context), own_name, num_steps, own)
                times += [seconds * 1e3 for seconds in measured.step_s]
        before, after = statistics.median(greedy_ms), statistics.median(ms)
        rows.append(
            {
                "sampling": name,
                "greedy ms": round(before, 3),
                "ms": round(after, 3),
                "more": f"{(after / before - 1) * 100:.1f}%",
            }
        )
    print(Table(list(rows[0]), [[str(value) for value in row.values()] for row in rows]).plain())
    return {"batch": batch, "context": context, "rows": rows}


if __name__ == "__main__":
    main(SamplingBenchSettings, {"sampling": measure})
