"""Decode steps of which some sequences must match a JSON schema: `python -m benchmarks.engine.structured`

A batch decodes as in `benchmarks.engine.decode`, with none, some and all of its sequences constrained. Free sequences
must not slow down. A constrained one sits out the step that is launched ahead, so its tokens are counted separately.
"""

from __future__ import annotations

import json
import statistics
import time
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
from pydantic import Field

from baton.settings import Sizes
from baton.structured_output.constraint import StructuredKind, StructuredOutput
from benchmarks.engine.bench import Bench, EngineBenchSettings, note, step
from benchmarks.engine.decode import GREEDY, SAMPLINGS, WARM_STEPS, end, fill_pool
from benchmarks.engine.report import main
from benchmarks.harness.big_vocabulary import big_vocabulary
from benchmarks.harness.tables import Table
from engine.sequence import Sequence
from node.structured_output.grammars import Grammars

QUICK = (6, 40, 12)  # batch, context, steps
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "email": {"type": "string", "pattern": "^[a-z.]+@[a-z]+[.](com|org)$"},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}},
        "note": {"type": "string"},
    },
    "required": ["name", "age", "email", "tags", "note"],
    "additionalProperties": False,
}
PEOPLE = {"type": "array", "items": PERSON, "minItems": 10_000}
"""No answer of a benchmark gets to its end."""


class StructuredBenchSettings(EngineBenchSettings):
    """Measures decode steps with constrained sequences, in this process."""

    prog: ClassVar[str] = "benchmarks.engine.structured"

    batch: int = Field(256, ge=1, description="sequences")
    context: int = Field(1024, ge=1, description="tokens of each at the beginning")
    constrained: Sizes = Field((32, 256), description="how many of them are constrained, in runs after one without any")
    num_steps: int = Field(150, ge=2, description=f"steps to measure in each, after {WARM_STEPS}")


def measure(bench: Bench) -> dict[str, Any]:
    """The section of the report."""
    settings = bench.settings
    assert isinstance(settings, StructuredBenchSettings)
    batch, context, num_steps = QUICK if settings.quick else (settings.batch, settings.context, settings.num_steps)
    fill_pool(bench)
    config = bench.engine.config
    is_dummy = settings.load_format == "dummy"
    tokenizer = big_vocabulary(config.vocab_size) if is_dummy else bench.built.tokenizer.json
    grammars = Grammars(tokenizer, config.vocab_size, config.eos_token_ids, lambda: None)
    wanted = StructuredOutput(StructuredKind.JSON, json.dumps(PEOPLE))
    began = time.perf_counter()
    while not grammars.matcher(wanted).ready:
        time.sleep(0.001)  # on a thread of its own
    compiled_s = time.perf_counter() - began
    rows = []
    for asked in (0, *settings.constrained):
        constrained = min(asked, batch)
        note(f"{constrained} of {batch} constrained")
        running = _adopt(bench, grammars, wanted, (batch, context, constrained, num_steps))
        rows.append(_measure(bench, running, constrained, num_steps))
        end(bench.engine, running)
    masks = _masks(bench, grammars, wanted)
    table = [[str(value) for value in row.values()] for row in rows]
    print(Table(list(rows[0]), table).plain())
    print(f"schema and vocabulary compiled in {compiled_s * 1e3:.1f} ms; masks in us: {masks}")
    return {
        "batch": batch,
        "context": context,
        "rows": rows,
        "mask_us": masks,
        "compile_ms": round(compiled_s * 1e3, 2),
    }


def _adopt(
    bench: Bench, grammars: Grammars, wanted: StructuredOutput, sizes: tuple[int, int, int, int]
) -> list[Sequence]:
    """A batch at its context, the constrained ones first."""
    engine, (batch, context, constrained, num_steps) = bench.engine, sizes
    num_forced = 8  # tokens that a step may add to the chosen one, on average
    params = replace(SAMPLINGS[GREEDY], max_tokens=(num_steps + 2 * WARM_STEPS) * (1 + num_forced))
    running, opening = [], _opening(grammars, wanted)
    for i in range(batch):
        prompt = bench.prompt(context + i % engine.config.block_size)
        seq = bench.sequence(prompt, params)
        if i < constrained:
            seq.matcher, seq.runs_ahead = grammars.matcher(wanted), False
        num_columns = len(prompt) // engine.config.block_size + 1
        seq.block_table = engine.allocate(num_columns * engine.tables.shape.width)
        first = opening if i < constrained else prompt[-1]  # as a prefill node would have chosen it
        running += engine.adopt(seq, {0: (first,)}, [])
    return running


def _opening(grammars: Grammars, wanted: StructuredOutput) -> int:
    """The first token that the schema allows."""
    matcher = grammars.matcher(wanted)
    mask = np.zeros(grammars.num_mask_words, np.int32)
    matcher.fill(mask)
    return int(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))[0])


def _measure(bench: Bench, running: list[Sequence], constrained: int, num_steps: int) -> dict[str, Any]:
    for _ in range(WARM_STEPS):
        step(bench.engine)
    guided = {seq for seq in running if seq.matcher is not None}
    assert len(guided) == constrained
    num_free, num_guided, stamps = 0, 0, [time.perf_counter()]
    for _ in range(num_steps):
        result = step(bench.engine)
        assert not any(token.error for token in result.sampled)
        chosen = sum(token.sequence in guided for token in result.sampled)
        num_guided += chosen
        num_free += len(result.sampled) - chosen
        stamps.append(time.perf_counter())
    total_s = stamps[-1] - stamps[0]
    free = len(running) - constrained
    return {
        "constrained": constrained,
        "ms/step": round(total_s / num_steps * 1e3, 3),
        "ms/token, free": round(total_s / num_free * free * 1e3, 3) if num_free else None,
        "ms/token, constrained": round(total_s / num_guided * constrained * 1e3, 3) if num_guided else None,
        "tokens/s": round((num_free + num_guided) / total_s),
    }


def _masks(bench: Bench, grammars: Grammars, wanted: StructuredOutput) -> dict[str, float]:
    """Microseconds of filling a mask, in the order of an answer's tokens."""
    matcher, draw = grammars.matcher(wanted), np.random.default_rng(0)
    took = []
    for _ in range(60 if bench.settings.quick else 2000):
        mask = np.zeros(grammars.num_mask_words, np.int32)
        began = time.perf_counter()
        matcher.fill(mask)
        took.append((time.perf_counter() - began) * 1e6)
        matcher.accept(int(draw.choice(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")))))
    quantiles = statistics.quantiles(took, n=100)
    return {"p50": round(quantiles[49], 1), "p99": round(quantiles[98], 1), "max": round(max(took), 1)}


if __name__ == "__main__":
    main(StructuredBenchSettings, {"structured": measure})
