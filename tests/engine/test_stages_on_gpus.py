"""Stages on GPUs, as far as a machine without any can tell: who waits for whom, and what is measured before that."""

from __future__ import annotations

import dataclasses
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._C._distributed_c10d import Store

from engine.engine import Engine
from engine.model.parallel.gpus import GpuRanks
from engine.model.parallel.group import ONE_RANK, GlooRanks, RankGroup
from engine.model.parallel.pipeline import Pipeline, Rehearsal
from engine.model.rank import RankModel
from engine.model.runner import TorchModelRunner
from engine.model.staged_step import StagedStep
from engine.model.warm_up import largest_steps, profile_config
from tests.engine import tiny_models
from tests.engine.rank_threads import TIMEOUT_S, Load, in_threads, ranked_runner
from tests.engine.test_model_families import SIZES
from tests.engine.test_parity import ask, run
from tests.engine.test_stages import CONFIGS
from tests.kv_transfer.ordered import OrderedGroup

CPU = torch.device("cpu")
WAIT_S = 10.0


class OrderedPair:
    """In NcclPair's place: one operation after the other, on a thread instead of a stream."""

    def __init__(self, store: Store, rank: int, device: torch.device) -> None:
        self._group = OrderedGroup(store, rank)

    def send(self, x: Tensor) -> Callable[[], None]:
        sent = self._group.send(x.contiguous())
        return lambda: _wait(sent.over)

    def receive(self, x: Tensor) -> None:
        _wait(self._group.receive(x).over)


def _wait(over: threading.Event) -> None:
    assert over.wait(WAIT_S)


def in_pairs(group: GlooRanks) -> RankGroup:
    return GpuRanks(group, CPU, OrderedPair)


def test_what_waits_to_come_holds_up_nothing_that_goes() -> None:
    """Rank 0 waits for logits of a step while it sends hidden states of the next one, to the same rank."""
    hidden, logits = torch.arange(6.0), torch.tensor([7.0])

    def last_stage(ranks: RankGroup) -> None:
        ranks.receive(found := torch.zeros(6), of=0)
        ranks.send(logits if torch.equal(found, hidden) else -logits, to=0)()

    with in_threads(2, last_stage, in_pairs) as ranks:
        came, began = torch.zeros(1), threading.Event()

        def wait() -> None:
            began.set()
            ranks.receive(came, of=1)

        waiting = threading.Thread(target=wait)
        waiting.start()
        began.wait()
        ranks.send(hidden, to=1)()
        waiting.join(TIMEOUT_S)
    assert torch.equal(came, logits)


@pytest.mark.parametrize("stages", [2, 3])
def test_answers_over_pairs_are_those_over_gloo(stages: int, tmp_path: Path) -> None:
    folder = tiny_models.save(CONFIGS["llama"], tmp_path)
    config = dataclasses.replace(SIZES, max_num_batched_tokens=16, async_scheduling=True, num_stages=stages)

    @cache
    def said(over: Callable[[GlooRanks], RankGroup]) -> dict[Any, list[int]]:
        load = Load(folder, config, fused=True, num_stages=stages)
        with ranked_runner(stages, load, over=over) as (runner, _):
            prompts = [tuple(range(10 + n, 40 + 3 * n)) for n in range(4)]
            return run(Engine(config, runner), [ask(str(n), prompt) for n, prompt in enumerate(prompts)])

    assert said(in_pairs) == said(lambda group: group)


@pytest.mark.parametrize("number", range(3))
def test_each_stage_computes_the_largest_steps_alone(number: int, tmp_path: Path) -> None:
    """To measure their memory: before the sizes are known that the stages must have in common."""
    folder = tiny_models.save(CONFIGS["llama"], tmp_path)
    done = []

    def rehearse(group: RankGroup) -> None:
        pipeline = Pipeline(group, 3)
        model, probed = Load(folder, SIZES, fused=True, num_stages=3)(pipeline)
        if pipeline.stage.number != number:
            return  # so that nobody could send anything, or take it
        runner = TorchModelRunner(model, profile_config(SIZES), probed, pipeline=Rehearsal(pipeline))
        for chunks in largest_steps(SIZES):
            done.append(runner.launch(chunks).wait())
            for chunk in chunks:
                runner.forget(chunk.sequence)

    with in_threads(3, rehearse) as group:
        rehearse(group)
    assert [len(choices) for choices in done] == [len(chunks) for chunks in largest_steps(SIZES)]


def test_what_later_stages_follow_is_behind_what_rank_0_did() -> None:
    order = list[int]()

    def later(group: RankGroup) -> None:
        Pipeline(group, 3).follow_rank_0()
        order.append(group.rank)

    with in_threads(3, later, in_pairs) as group:
        pipeline = Pipeline(group, 3)
        order.append(0)
        pipeline.follow_rank_0()
    assert order[0] == 0
    assert sorted(order) == [0, 1, 2]


def test_blocks_are_copied_behind_what_rank_0_did(tmp_path: Path) -> None:
    """A later stage has no other order with the gathers of rank 0, which may still read the blocks."""
    model, probed = Load(tiny_models.save(CONFIGS["llama"], tmp_path), SIZES, fused=False)(Pipeline(ONE_RANK, 1))
    seen = list[float]()

    class Followed(Pipeline):
        def follow_rank_0(self) -> None:
            seen.append(float(rank.pool.tensor[2].sum()))

    last_tokens = torch.zeros(SIZES.max_num_seqs, dtype=torch.int32)
    rank = RankModel(model, SIZES, probed, last_tokens, pipeline=Followed(ONE_RANK, 1))
    rank.pool.tensor[1] = 1.0
    rank.copy_blocks([(1, 2)])
    assert seen == [0.0]
    assert torch.equal(rank.pool.tensor[1], rank.pool.tensor[2])


def test_kv_of_the_first_stage_is_there_when_its_gpu_has_computed_it() -> None:
    """Which is launched, but not done, when the step is."""
    events = deque([False, True, True])
    computed: Any = SimpleNamespace(query=events.popleft)
    steps: Any = SimpleNamespace(num_layers=5, num_own_layers=3)
    logits = Future[Tensor]()
    step = StagedStep(steps, set(), computed, logits, lambda _: pytest.fail("is not sampled"))
    assert [step.num_layers_done(), step.num_layers_done()] == [0, 3]
    logits.set_result(torch.zeros(0))
    assert step.num_layers_done() == 5
