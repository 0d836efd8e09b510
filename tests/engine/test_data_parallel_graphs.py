"""Data parallel nodes replay the same graph, or launch a step op by op: each has the logits that it would have alone.
The graphs are stand-ins (`cpu_graphs`)."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.model.parallel.data_parallel import DataParallel
from engine.model.rank_step import EAGER, RankStep
from engine.step import Chunk
from tests.engine import tiny_models
from tests.engine.rank_threads import TIMEOUT_S, Load, Together, ranked_runner
from tests.engine.test_data_parallel import Always
from tests.engine.test_model_families import SIZES, sequences
from tests.engine.test_sharding import LogitsOf
from tests.engine.thread_ranks import Post, ThreadRanks

torch.set_num_threads(1)

DECODE_SIZES = [1, 4]
NUM_STEPS = 6
REPLAYED = [1, 2]
"""The steps of decodes on both nodes, and on one alone; not those with a prompt, for which there are no graphs: the
reference of attention, which the stand-ins use, has to know a prompt's length."""


class Logged(LogitsOf):
    """Remembers what kinds of steps its rank computed, True if replayed, and how many rows experts saw then: in all,
    and without padding."""

    kinds: list[bool]
    rows: list[tuple[int, int] | None]

    def _compute(self, step: RankStep, *arguments: Any) -> Tensor:
        logits = super()._compute(step, *arguments)
        slots = self.rank._steps[0].row_slot_mapping
        self.kinds.append(step.graph != EAGER)
        self.rows.append(None if slots is None else (len(slots), int(slots.count_nonzero())))
        return logits


def steps_of(node: int) -> dict[int, list[Chunk]]:
    """By number; none of the nodes has a step in the last one."""
    a, b = sequences([40 + 7 * node, 21])
    last_of_a, last_of_b = (Chunk.of(seq, seq.num_tokens - 1, 1) for seq in (a, b))
    prompts = [Chunk.of(a, 0, a.num_tokens - 1), Chunk.of(b, 0, 20)]
    if node == 0:
        return {0: prompts, 1: [last_of_a], 2: [last_of_a, last_of_b], 3: [Chunk.of(b, 10, 11)], 4: [last_of_a]}
    return {0: prompts, 1: [last_of_a, last_of_b], 4: [last_of_a, Chunk.of(b, 10, 11)]}


def logits(load: Load, num_ranks: int, node: int, together: Together | None) -> tuple[Tensor, Logged]:
    """Of all steps, one below the other, and of what they were."""
    with ranked_runner(num_ranks, load, Logged, together=together) as (runner, _):
        assert isinstance(runner, Logged)
        runner.kinds, runner.rows = [], []
        if together is not None:
            runner.capture(DECODE_SIZES, 0)
        rows, steps = list[Tensor](), steps_of(node)
        for number in range(NUM_STEPS):
            if number in steps:
                rows += runner(*steps[number])
            runner.keep_up(number in steps)
        return torch.stack(rows), runner


@pytest.mark.usefixtures("graphs_of_a_cpu")
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_logits_are_those_of_a_node_alone(num_ranks: int, tmp_path: Path) -> None:
    """All nodes replay what has room for the largest of them, idle ones as well; without that graph none does."""
    folder, post = tiny_models.save(tiny_models.MIXTURES["qwen3_moe"], tmp_path), Post()
    load = Load(folder, SIZES, fused=True, whole_experts=True)

    def of_node(node: int) -> tuple[Tensor, Logged]:
        def join(rank: int) -> DataParallel:
            return DataParallel(ThreadRanks(post, rank * 2 + node, num_ranks * 2, TIMEOUT_S), 2)

        return logits(load, num_ranks, node, Together(join, Always()))

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(of_node, range(2), timeout=TIMEOUT_S))
    for node, (own, logged) in enumerate(found):
        alone, _ = logits(Load(folder, SIZES, fused=True), 1, node, None)
        assert logged.kinds == [number in REPLAYED for number in range(NUM_STEPS - 1)]
        assert logged.rows == [None, (2 * 4, 1 + 2), (2 * 4, 2), None, None]
        assert own.shape == alone.shape
        error = (own - alone).norm(dim=-1) / alone.norm(dim=-1)
        assert float(error.max()) < 1e-5
