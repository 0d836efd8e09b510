"""One side of `benchmarks.engine.cpu`: reads requests as lines of JSON, and answers each with a line.

Needs what its side needs and nothing else, so that it runs where baton is not installed.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from random import Random
from typing import Any, Protocol

CONTEXT = 128
DECODES = (1, 8)
"""Sequences in a decode step."""
PROMPTS = (128, 1024)
"""Tokens."""
STEPS = 16
ANSWER_TOKENS = 8
_FIRST, _LAST = 1000, 100_000
_BEYOND = 1 << 20


class Runner(Protocol):
    """A model that a side has loaded."""

    def generate(self, prompts: list[list[int]], num_tokens: int) -> tuple[list[list[int]], list[float]]:
        """Greedy answers, one step for all prompts at a time, without an end; and the milliseconds of the prompts and
        of each decode step."""


def prompts(num: int, length: int = CONTEXT, seed: int = 0) -> list[list[int]]:
    """Random tokens, the same for all sides."""
    return [Random(seed * _BEYOND + i * 7919 + length).choices(range(_FIRST, _LAST), k=length) for i in range(num)]


def open_runner(name: str, dtype: str, folder: Path, threads: int) -> Runner:
    module = {"baton": "baton", "llama.cpp": "llama_cpp"}.get(name, "transformers")
    runner: Runner = importlib.import_module(f"benchmarks.engine.cpu.{module}_side").open_runner(
        name, dtype, folder, threads
    )
    return runner


def answer(runner: Runner, request: dict[str, Any], number: int) -> Any:
    match request["kind"]:
        case "answers":
            return runner.generate(prompts(max(DECODES)), ANSWER_TOKENS)[0]
        case "decode":
            return runner.generate(prompts(request["size"], seed=number), STEPS)[1][1:]
        case "prompt":
            return runner.generate(prompts(1, request["size"], seed=number), 1)[1]
        case _:
            return runner.generate(prompts(1, seed=number), 2)[
                0
            ]  # after loading: what the first steps compile and plan


def main() -> None:
    name, dtype, folder, threads = sys.argv[1:]
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print
    runner = open_runner(name, dtype, Path(folder), int(threads))
    for number, line in enumerate(sys.stdin, 1):
        print(json.dumps(answer(runner, json.loads(line), number)), file=out, flush=True)


if __name__ == "__main__":
    main()
