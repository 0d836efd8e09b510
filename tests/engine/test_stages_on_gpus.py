"""Stages on GPUs, as far as a machine without any can tell: who waits for whom, and what is measured before that."""

from __future__ import annotations

import dataclasses
import threading
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import cache, partial
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch._C._distributed_c10d import Store

from engine.engine import Engine
from engine.model.parallel.gpus import GpuRanks
from engine.model.parallel.group import ONE_RANK, GlooRanks, RankGroup
from engine.model.parallel.pipeline import Pipeline, ProfilingPipeline
from engine.model.parallel.stages import Stage
from engine.model.rank import RankModel
from engine.model.runner import TorchModelRunner
from engine.model.staged_step import StagedStep, StagedSteps
from engine.model.warm_up import largest_steps, profile_config
from engine.step import Choice, LaunchedStep
from tests.engine import tiny_models
from tests.engine.rank_threads import TIMEOUT_S, Load, in_threads, ranked_runner
from tests.engine.test_model_families import SIZES
from tests.engine.test_parity import ask, run
from tests.engine.test_stages import CONFIGS
from tests.kv_transfer.ordered import OrderedGroup

CPU = torch.device("cpu")
WAIT_S = 10.0


class OrderedPair:
    """In NcclPair's place: one operation after the other, on a thread instead of a stream. queued: is called when a
    receive is in that order."""

    def __init__(
        self, store: Store, rank: int, device: torch.device, queued: Callable[[], None] = lambda: None
    ) -> None:
        self._group, self._queued = OrderedGroup(store, rank), queued

    def send(self, x: Tensor) -> Callable[[], None]:
        sent = self._group.send(x.contiguous())
        return lambda: _wait(sent.over)

    def receive(self, x: Tensor) -> None:
        received = self._group.receive(x)
        self._queued()
        _wait(received.over)


def _wait(over: threading.Event) -> None:
    assert over.wait(WAIT_S)


def in_pairs(group: GlooRanks) -> RankGroup:
    return GpuRanks(group, CPU, OrderedPair)


def test_what_waits_to_come_holds_up_nothing_that_goes() -> None:
    """Rank 0 waits for logits of a step while it sends hidden states of the next one, to the same rank."""
    hidden, logits = torch.arange(6.0), torch.tensor([7.0])
    queued = threading.Event()

    def telling(group: GlooRanks) -> RankGroup:
        return GpuRanks(group, CPU, partial(OrderedPair, queued=queued.set)) if group.rank == 0 else in_pairs(group)

    def last_stage(ranks: RankGroup) -> None:
        Pipeline(ranks, 2)
        ranks.receive(found := torch.zeros(6), of=0)
        ranks.send(logits if torch.equal(found, hidden) else -logits, to=0)()

    with in_threads(2, last_stage, telling) as ranks:
        Pipeline(ranks, 2)  # makes the pairs
        queued.clear()
        came = torch.zeros(1)
        waiting = threading.Thread(target=ranks.receive, args=(came, 1))
        waiting.start()
        assert queued.wait(TIMEOUT_S)
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
        runner = TorchModelRunner(model, profile_config(SIZES), probed, pipeline=ProfilingPipeline(pipeline))
        for chunks in largest_steps(SIZES):
            done.append(runner.launch(chunks).wait())
            for chunk in chunks:
                runner.forget(chunk.sequence)

    with in_threads(3, rehearse) as group:
        rehearse(group)
    assert [len(choices) for choices in done] == [len(chunks) for chunks in largest_steps(SIZES)]


@pytest.mark.parametrize("rank", [0, 2])
def test_what_a_stage_keeps_of_what_it_sent_is_measured(rank: int) -> None:
    """Hidden states, and logits of the last stage."""
    peers = SimpleNamespace(rank=0, size=1)
    place: Any = SimpleNamespace(everyone=SimpleNamespace(rank=rank), stage=Stage(rank, 3), peers=peers)
    profiling = ProfilingPipeline(place)
    sent = list[weakref.ref[Tensor]]()
    for _ in range(5):
        x = torch.zeros(4, 8)
        sent.append(weakref.ref(x))
        (profiling.send_logits if profiling.stage.is_last else profiling.send_hidden)(x)
    del x
    assert [ref() is not None for ref in sent] == [False, False, True, True, True]


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


def staged_steps(arrived: SimpleQueue[Tensor], wake: Callable[[], None] | None = None) -> StagedSteps:
    """Of two stages; each tensor is a step's logits."""
    place: Any = SimpleNamespace(
        stage=Stage(0, 2),
        everyone=SimpleNamespace(device=CPU),
        receive_logits=lambda num_rows, vocab_size: arrived.get(timeout=TIMEOUT_S),
    )
    return StagedSteps(place, 1, 5, wake)


NO_SCORES: Any = SimpleNamespace(scored=torch.zeros(0, 2), num_tokens=1, num_logits=1)


def test_nobody_waits_for_a_gpu_that_samples_behind_the_next_step() -> None:
    """A step is not done when its logits are there, but when its tokens are; its KV is there before."""
    arrived, woken = SimpleQueue[Tensor](), threading.Semaphore(0)
    steps, sampled = staged_steps(arrived, woken.release), list[float]()
    is_over = [False, False]

    def launch(number: int) -> StagedStep:
        over: Any = SimpleNamespace(is_done=lambda: is_over[number], wait=lambda: [[Choice(number)]])

        def sample(logits: Tensor) -> LaunchedStep:
            sampled.append(float(logits))
            return cast(LaunchedStep, over)

        return steps.launched([], NO_SCORES, lambda *_: None, sample)

    first, second = launch(0), launch(1)
    assert (first.is_done(), first.num_layers_done(), sampled) == (False, 3, [])
    for logits in (7.0, 8.0):
        arrived.put(torch.tensor(logits))
        assert woken.acquire(timeout=TIMEOUT_S)
    assert [first.num_layers_done(), second.num_layers_done()] == [5, 5]
    assert (first.is_done(), sampled) == (False, [7.0, 8.0])
    is_over[0] = True
    assert (first.is_done(), second.is_done(), sampled) == (True, False, [7.0, 8.0])
    assert first.wait() == [[Choice(0)]]


def test_a_last_stage_that_hangs_is_a_lost_rank() -> None:
    class Late(Future[Tensor]):
        def result(self, timeout: float | None = None) -> Tensor:
            assert timeout is not None
            return super().result(0)

    steps = staged_steps(SimpleQueue())
    step = StagedStep(steps, set(), None, Late(), lambda _: pytest.fail("is not sampled"))
    with pytest.raises(RuntimeError, match="no logits from the last stage"):
        step.sample()
