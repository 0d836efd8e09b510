"""The common part of the engine's benchmarks: flags, the engine as a node builds it, and its step loop."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from random import Random

import torch
from pydantic import Field

from baton.messages import AttemptId
from baton.sampling import SamplingParams
from benchmarks.engine.host import TimedRunner
from benchmarks.engine.shape import ModelShape, shape_of
from benchmarks.harness import ceilings
from engine.engine import Engine
from engine.model.load.loader import LoadFormat
from engine.sequence import Sequence as EngineSequence
from engine.step import StepResult
from node.build import LoadedModel, build
from node.ranks.ranks import Ranks
from node.settings import NodeSettings

MIN_TOKEN = 5  # lower ids are often special tokens


class EngineBenchSettings(NodeSettings):
    """Measures the engine of a node, in this process."""

    model: str = Field("benchmarks/models/llama-3.1-8b", description="as for a node")
    load_format: LoadFormat = Field("dummy", description="as for a node; dummy: random weights")
    max_num_seqs: int = Field(512, ge=1, description="sequences in one step")
    max_num_batched_tokens: int | None = Field(8192, ge=1, description="tokens in one step, as on a prefill node")
    gpu_memory_utilization: float = Field(
        0.7, gt=0, le=1, description="share of a GPU's memory for the engine; answers are checked with a second model"
    )
    quick: bool = Field(False, description="sizes that a CPU can do in seconds: does it run?")
    output: Path | None = Field(None, description="file to write the JSON line to as well")


@dataclass(frozen=True, slots=True)
class Bench:
    """The engine to be measured, and what it is compared with. `runner`: the engine's."""

    settings: EngineBenchSettings
    built: LoadedModel
    engine: Engine
    runner: TimedRunner
    shape: ModelShape
    ceilings: ceilings.Ceilings
    numbers: Iterator[int]

    @property
    def dtype(self) -> torch.dtype:
        """Of activations."""
        found: torch.dtype = self.built.runner.model.dtype
        return found

    def prompt(self, length: int) -> tuple[int, ...]:
        """Random tokens, the same in every run."""
        vocab_size = self.engine.config.vocab_size
        return tuple(Random(f"{next(self.numbers)}").choices(range(MIN_TOKEN, vocab_size), k=length))

    def sequence(self, prompt: tuple[int, ...], sampling: SamplingParams) -> EngineSequence:
        """A sequence that shares no blocks with any other."""
        number = next(self.numbers)
        attempt_id = AttemptId(0, f"bench-{number}", 0)
        return EngineSequence(
            attempt_id, [0], prompt, sampling, cache_salt=f"bench-{number}", arrived_s=time.monotonic() + number * 1e-6
        )


def step(engine: Engine) -> StepResult:
    """One turn of a node's loop."""
    return engine.compute(engine.schedule(time.monotonic()))


def drain(engine: Engine) -> Iterator[StepResult]:
    """Run steps until all sequences have ended."""
    while True:
        result = step(engine)
        yield result
        if not result.again:
            assert not engine.has_work, "the pool is too small for what is measured"
            return


def open_bench(settings: EngineBenchSettings, ranks: Ranks | None = None) -> tuple[Bench, float]:
    """Measure the ceilings, then build the engine; also returns the seconds that building took. Raises ValueError with
    a readable line."""
    device = torch.device("cuda" if settings.device != "cpu" and torch.cuda.is_available() else "cpu")
    note("measuring ceilings")
    sizes = {"num_bytes": ceilings.QUICK_NUM_BYTES, "matmul_size": ceilings.QUICK_MATMUL_SIZE} if settings.quick else {}
    matmul_dtype = torch.float8_e4m3fn if settings.quantization == "fp8" and device.type == "cuda" else None
    bounds = ceilings.measure(device, **sizes, matmul_dtype=matmul_dtype)
    print(bounds)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    note(f"building {settings.model}")
    began = time.monotonic()
    built = build(settings, ranks=ranks)
    built.warm_up()
    build_s = time.monotonic() - began
    if device.type == "cuda":
        gc.collect()
        gc.freeze()  # a collection over all objects of imports and model takes longer than many GPU steps
    runner = TimedRunner(built.runner)
    return (
        Bench(
            settings=settings,
            built=built,
            engine=Engine(built.engine.config, runner),
            runner=runner,
            shape=shape_of(
                built.checkpoint,
                built.runner.model.dtype,
                built.runner.model,
                settings.quantization,
                settings.kv_cache_dtype,
                settings.num_ranks,
                [layer.sliding_window for layer in built.layout.layers],
            ),
            ceilings=bounds,
            numbers=count(),
        ),
        build_s,
    )


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
