"""baton's side of `benchmarks.engine.cpu`: the engine as a node builds it."""

from __future__ import annotations

import time
from itertools import count
from pathlib import Path

import torch

from baton.messages import AttemptId
from baton.sampling import SamplingParams
from benchmarks.engine.bench import EngineBenchSettings, step
from engine.engine import Engine
from engine.sequence import Sequence
from node.build import build

_SETTINGS = {
    "fp32": ("float32", None),
    "bf16": ("bfloat16", None),
    "int8": ("bfloat16", "int8"),
    "awq": ("bfloat16", None),
}


def open_runner(name: str, dtype: str, folder: Path, threads: int) -> EngineRunner:
    torch.set_num_threads(threads)
    return EngineRunner(dtype, folder)


class EngineRunner:
    """See `benchmarks.engine.cpu.side.Runner`."""

    def __init__(self, dtype: str, folder: Path) -> None:
        dtype, quantization = _SETTINGS[dtype]
        settings = EngineBenchSettings(
            model=str(folder),
            load_format="safetensors",
            device="cpu",
            dtype=dtype,
            quantization=quantization,
            max_num_seqs=8,
            max_num_batched_tokens=1024,
            max_model_len=2048,
            num_gpu_blocks_override=1024,
        )
        built = build(settings)
        built.warm_up()
        self._engine = Engine(built.engine.config, built.runner)
        self._numbers = count()

    def generate(self, prompts: list[list[int]], num_tokens: int) -> tuple[list[list[int]], list[float]]:
        answers: dict[AttemptId, list[int]] = {}
        for prompt in prompts:
            number = next(self._numbers)
            sampling = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
            attempt_id, now = AttemptId(0, f"bench-{number}", 0), time.monotonic()
            seq = Sequence(attempt_id, [0], tuple(prompt), sampling, cache_salt=f"bench-{number}", arrived_s=now)
            answers[attempt_id] = []
            self._engine.add(seq)
        times, since = [], time.perf_counter()
        while not all(len(tokens) == num_tokens for tokens in answers.values()):
            result = step(self._engine)
            for sampled in result.sampled:
                answers[sampled.sequence.attempt_id].append(sampled.token)
            if all(answers.values()) and result.sampled:
                times.append((time.perf_counter() - since) * 1e3)
                since = time.perf_counter()
        while step(self._engine).again:
            pass
        return list(answers.values()), times
