"""Measures the steps of a real engine and writes a profile of them:
`python -m benchmarks.simulation.fit_profile --output FILE`.

The engine is the one that a node with these flags builds, on a CPU or a GPU. It runs prompts alone, decodes in batches
of several sizes over contexts of several lengths, and both together; the profile's coefficients are the ones, none of
them negative, with the least squares of relative errors. With --up, a pair of nodes then answers one request after the
other, and shows how much longer steps take in a node that serves, and how they vary (`fit_served`).
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
import time
from collections import defaultdict, deque
from collections.abc import Coroutine, Sequence
from dataclasses import asdict
from pathlib import Path
from random import Random
from typing import Any, ClassVar

import numpy as np
from pydantic import Field

from baton.messages import AttemptId
from baton.sampling import SamplingParams
from baton.settings import parse
from benchmarks.simulation.fit_served import Answers, Served, serve
from engine.engine import Engine
from engine.sequence import Sequence as EngineSequence
from engine.step import Begun, Chunk, LaunchedStep, ModelRunner
from engine.step_size import StepSize
from node.build import LoadedModel, build
from node.settings import NodeSettings

MIN_TOKEN = 5
"""Lower ids are often special tokens."""
NUM_DECODES = 12
"""Tokens of each answer."""
US = 1e6


class FitSettings(NodeSettings):
    """Measures the steps of an engine with these flags, and writes a profile of them."""

    prog: ClassVar[str] = "benchmarks.simulation.fit_profile"

    output: Path = Field(description="file to write the profile to")
    batches: str = Field("1,2,4,8,16", description="sizes of the batches of decodes, as N,N,...")
    contexts: str = Field("64,256,1024", description="tokens of their contexts")
    prompts: str = Field("16,64,256,512,1024", description="tokens of the prompts that are alone")
    link_gb_s: float = Field(2.0, gt=0, description="GB/s between nodes, which are not measured")
    latency_us: float = Field(300.0, ge=0, description="microseconds of a message, which are not measured")
    up: str | None = Field(None, description="flags of a pair of nodes, as for baton-up, to measure how these serve")
    served_prompts: str = Field("128,512", description="tokens of the prompts that the pair gets")
    num_served: int = Field(100, ge=2, description="requests that it gets of each")
    served_per_s: float = Field(2.0, gt=0, description="how many it gets in a second: few, so that most are alone")


class Recorder:
    """A ModelRunner that notes the size of each step. `sizes`: of those that have not retired."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self.sizes: deque[tuple[StepSize, float]] = deque()
        self.copy_blocks, self.forget = runner.copy_blocks, runner.forget
        self.only_launches = runner.only_launches

    def launch(self, chunks: Sequence[Chunk], begun: Begun = lambda waited_s: None) -> LaunchedStep:
        self.sizes.append((StepSize.of(chunks), time.monotonic()))
        return self._runner.launch(chunks, begun)


class Steps:
    """Runs sequences and keeps how long each step took."""

    def __init__(self, built: LoadedModel, seed: int) -> None:
        self._recorder = Recorder(built.runner)
        self._engine = Engine(built.engine.config, self._recorder)
        self._random = Random(seed)
        self._serials = itertools.count()
        self.taken: defaultdict[StepSize, list[float]] = defaultdict(list)

    def add(self, length: int, max_tokens: int) -> None:
        """A prompt that shares nothing with any other."""
        name = f"fit-{next(self._serials)}"
        prompt = tuple(self._random.choices(range(MIN_TOKEN, self._engine.config.vocab_size), k=length))
        sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        attempt_id = AttemptId(0, name, 0)
        self._engine.add(EngineSequence(attempt_id, [0], prompt, sampling, cache_salt=name, arrived_s=time.monotonic()))

    def drain(self, joining: Sequence[int] = ()) -> None:
        """Until all have ended. A prompt of the next length joins after each third step."""
        join, ended, number = iter(joining), 0.0, 0
        while self._engine.has_work or self._recorder.sizes:
            result = self._engine.compute(self._engine.schedule(time.monotonic()))
            if not result.num_tokens:
                continue
            now = time.monotonic()
            size, launched = self._recorder.sizes.popleft()
            self.taken[size].append(now - max(ended, launched))
            ended, number = now, number + 1
            if number % 3 == 0 and (length := next(join, None)) is not None:
                self.add(length, 2)


def measure(settings: FitSettings, built: LoadedModel) -> dict[StepSize, float]:
    """The median seconds of each kind of step."""
    steps, longest = Steps(built, settings.seed), built.engine.config.max_model_len - NUM_DECODES
    prompts = [length for length in lengths(settings.prompts) if length < longest]
    for length in prompts * 3:
        steps.add(length, 2)
        steps.drain()
    for batch, context in itertools.product(lengths(settings.batches), lengths(settings.contexts)):
        fits = batch * (context + NUM_DECODES) < built.engine.blocks.num_total * built.layout.block_size
        if fits and context < longest and batch <= built.engine.config.max_num_seqs:
            for _ in range(batch):
                steps.add(context, NUM_DECODES)
            steps.drain(prompts[:4])
    return {size: statistics.median(taken) for size, taken in steps.taken.items()}


def lengths(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def parts(size: StepSize) -> tuple[int, ...]:
    """What the coefficients multiply."""
    return 1, size.num_seqs, size.num_context_tokens, size.num_prompt_tokens, size.num_prompt_pairs


def fit(taken: dict[StepSize, float]) -> list[float]:
    """Microseconds: constant, per sequence, per context token, per prompt token, per prompt pair."""
    rows = np.array([parts(size) for size in taken])
    times = np.array(list(taken.values()))[:, None] * US
    return _non_negative(rows / times, np.ones(len(rows)))


def _non_negative(rows: Any, wanted: Any) -> list[float]:
    """The solution of least squares without negative numbers: of all choices of columns, the best that has none."""
    best, least = [0.0] * rows.shape[1], float("inf")
    for columns in itertools.chain.from_iterable(
        itertools.combinations(range(rows.shape[1]), count) for count in range(1, rows.shape[1] + 1)
    ):
        chosen, *_ = np.linalg.lstsq(rows[:, columns], wanted, rcond=None)
        error = float(((rows[:, columns] @ chosen - wanted) ** 2).sum())
        if (chosen >= 0).all() and error < least - 1e-12:
            least, best = error, [0.0] * rows.shape[1]
            for column, value in zip(columns, chosen, strict=True):
                best[column] = float(value)
    return best


def typical_error(taken: dict[StepSize, float], costs: Sequence[float]) -> float:
    """The median of the relative errors."""
    own = [
        abs(sum(cost * part for cost, part in zip(costs, parts(size), strict=True)) / (US * seconds) - 1)
        for size, seconds in taken.items()
    ]
    return statistics.median(own)


def to_toml(
    settings: FitSettings,
    built: LoadedModel,
    decodes: Sequence[float],
    prompts: Sequence[float],
    served: Served | None = None,
) -> str:
    config, layer, num_layers = built.engine.config, built.layout.layers[0], len(built.layout.layers)
    names = ("constant_us", "per_seq_us", "per_context_token_us", "per_prompt_token_us", "per_prompt_pair_us")
    tables: dict[str, dict[str, object]] = {
        "step": dict(zip(names[:3], map(_rounded, decodes), strict=False)),
        "prompt_step": dict(zip(names, map(_rounded, prompts), strict=True)),
        "link": {"bandwidth_gb_s": settings.link_gb_s, "latency_us": settings.latency_us},
        "model": {
            "num_layers": num_layers,
            "num_kv_heads": layer.num_kv_heads,
            "head_dim": layer.head_dim_k,
            "dtype": layer.dtype,
            "max_model_len": config.max_model_len,
        },
        "node": {
            # A simulated node has blocks of all layers, whatever their windows.
            "num_blocks": built.engine.blocks.num_total * max(map(len, built.layout.layers_of_groups)) // num_layers,
            "max_num_seqs": config.max_num_seqs,
            "layer_groups": built.layer_groups,
            "async_scheduling": config.async_scheduling,
        },
    }
    if served is not None:
        tables["step"]["per_adopted_seq_us"] = _rounded(served.per_adopted_seq_us)
        tables["spread"] = {name: list(map(_rounded, factors)) for name, factors in asdict(served.spread).items()}
    lines = [f'source = "measured by benchmarks.simulation.fit_profile: {built.served_model_name} on {built.device}"']
    for name, table in tables.items():
        lines += ["", f"[{name}]", *(f"{key} = {_literal(value)}" for key, value in table.items())]
    return "\n".join(lines) + "\n"


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")


def _literal(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return f'"{value}"' if isinstance(value, str) else str(value)


def _serve(settings: FitSettings, up: str) -> Coroutine[Any, Any, Answers]:
    prompts = lengths(settings.served_prompts)
    return serve(up, prompts, settings.num_served, settings.served_per_s, settings.seed)


def main(argv: Sequence[str] | None = None) -> None:
    settings = parse(FitSettings, argv)
    built = build(settings)
    built.warm_up()
    taken = measure(settings, built)
    decodes = {size: seconds for size, seconds in taken.items() if not size.has_prompts}
    prompts = {size: seconds for size, seconds in taken.items() if size.has_prompts}
    costs = fit(decodes), fit(prompts)
    for name, sizes, cost in (("decodes", decodes, costs[0]), ("prompts", prompts, costs[1])):
        print(f"{name}: {len(sizes)} kinds of steps, typical error {typical_error(sizes, cost):.1%}")
    settings.output.write_text(to_toml(settings, built, *costs), encoding="utf-8")
    if settings.up is not None:
        answers = asyncio.run(_serve(settings, settings.up))
        served = Served.of(str(settings.output), answers)
        print(served)
        costs = served.added_to(*costs)
        settings.output.write_text(to_toml(settings, built, *costs, served=served), encoding="utf-8")
    print(f"written: {settings.output}")


if __name__ == "__main__":
    main()
