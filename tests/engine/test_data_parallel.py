"""Nodes that divide experts among them: each has the logits that it would have alone, whatever the others compute."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel, Qwen2MoeConfig

from engine.engine import Engine
from engine.model.expert_counts import ExpertCounts
from engine.model.experts import expert_modules
from engine.model.parallel.data_parallel import DataParallel
from engine.model.parallel.eplb import Eplb
from engine.model.parallel.expert_slots import expert_slots
from engine.model.parallel.group import OneRank, RankGroup
from engine.sequence import Sequence
from engine.step import Begun, Chunk
from tests.engine import counting, tiny_models
from tests.engine.counting import Counting, sequence
from tests.engine.rank_threads import TIMEOUT_S, Load, Together, in_threads, ranked_runner
from tests.engine.test_expert_parallel import FAMILIES
from tests.engine.test_model_families import SIZES, sequences
from tests.engine.test_sharding import LogitsOf, fill_biases
from tests.engine.thread_ranks import Post, ThreadRanks

torch.set_num_threads(1)

SHARED = Qwen2MoeConfig(
    **tiny_models.SHAPE,
    num_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=32,
    shared_expert_intermediate_size=48,
)
MODELS = {**FAMILIES, "qwen2_moe": SHARED}
CI = {
    ("gpt_oss", 2, 2, None),
    ("qwen2_moe", 2, 2, "fp8"),
    ("glm4_moe", 4, 1, None),
}
CASES = [
    pytest.param(*case, marks=[] if case in CI else pytest.mark.full)
    for family in MODELS
    for num_nodes, num_ranks in ((2, 1), (2, 2), (4, 1))
    for quantization in (None, "fp8")
    if (case := (family, num_nodes, num_ranks, quantization))
]
NUM_STEPS = 4


class Always:
    """Waves that never end."""

    running = True

    def start(self) -> None:
        """They have started."""

    def end(self) -> None:
        """They go on."""


def steps_of(node: int) -> dict[int, list[Chunk]]:
    """By the number of the step: none of the nodes has one in each, in some there is one node alone, in the last none.
    Their sizes differ."""
    a, b = sequences([40 + 7 * node, 21])
    end = len(a.tokens)
    steps = {
        0: [Chunk.of(a, 0, end - 9)],
        1: [Chunk.of(a, end - 9, 8), Chunk.of(b, 0, 20)],
        2: [Chunk.of(a, end - 1, 1), Chunk.of(b, 20, 1)],
    }
    return {number: steps[number] for number in steps if node == 0 or number != node % 2}


def logits(load: Load, num_ranks: int, steps: dict[int, list[Chunk]], together: Together | None = None) -> torch.Tensor:
    """Of all steps, one below the other."""
    with ranked_runner(num_ranks, load, LogitsOf, together=together) as (runner, _):
        assert isinstance(runner, LogitsOf)
        rows: list[torch.Tensor] = []
        for number in range(NUM_STEPS):
            if number in steps:
                rows += runner(*steps[number])
            assert runner.keep_up(number in steps) == (runner._waves.running)
        return torch.stack(rows)


@pytest.mark.parametrize(("family", "num_nodes", "num_ranks", "quantization"), CASES)
def test_logits_are_those_of_a_node_alone(
    family: str, num_nodes: int, num_ranks: int, quantization: str | None, tmp_path: Path
) -> None:
    folder = tiny_models.save(MODELS[family], tmp_path)
    fill_biases(folder)
    load = Load(folder, SIZES, fused=True, whole_experts=True, quantization=quantization)
    together = logits_together(load, num_nodes, num_ranks)
    check_alone(Load(folder, SIZES, fused=True, quantization=quantization), together)


@pytest.mark.parametrize(("num_nodes", "num_ranks"), [(2, 2), pytest.param(4, 1, marks=pytest.mark.full)])
def test_experts_change_places_between_nodes(num_nodes: int, num_ranks: int, tmp_path: Path) -> None:
    """Before a step on all of them alike, also on those that have none."""
    folder = tiny_models.save(MODELS["qwen3_moe"], tmp_path)
    decided: list[Eplb] = []

    def eplb(model: PreTrainedModel) -> Eplb:
        counts = ExpertCounts.of(model, num_nodes * num_ranks, model)
        assert counts is not None
        decided.append(Eplb(counts.total, expert_slots(model), window_size=1, step_interval=1))
        return decided[-1]

    load = Load(folder, SIZES, fused=True, whole_experts=True, num_redundant_experts=4)
    check_alone(Load(folder, SIZES, fused=True), logits_together(load, num_nodes, num_ranks, eplb))
    assert len(decided) == num_nodes
    assert all(one.num_rebalances == decided[0].num_rebalances > 0 for one in decided)
    for layers in zip(*(one._slots for one in decided), strict=True):
        assert all((slots.placement == layers[0].placement).all() for slots in layers)


def logits_together(
    load: Load, num_nodes: int, num_ranks: int, eplb: Callable[[PreTrainedModel], Eplb | None] = lambda model: None
) -> list[torch.Tensor]:
    """Of each node."""
    post, size = Post(), num_nodes * num_ranks

    def of_node(node: int) -> torch.Tensor:
        def join(rank: int) -> DataParallel:
            return DataParallel(ThreadRanks(post, rank * num_nodes + node, size, TIMEOUT_S), num_nodes)

        return logits(load, num_ranks, steps_of(node), Together(join, Always(), eplb))

    with ThreadPoolExecutor(num_nodes) as pool:
        return list(pool.map(of_node, range(num_nodes), timeout=TIMEOUT_S))


def check_alone(load: Load, together: list[torch.Tensor]) -> None:
    for node, own in enumerate(together):
        alone = logits(load, 1, steps_of(node))
        assert own.shape == alone.shape
        error = (own - alone).norm(dim=-1) / alone.norm(dim=-1)
        assert float(error.max()) < 1e-5


def test_each_expert_is_on_one_rank(tmp_path: Path) -> None:
    """Of all nodes; a shared expert's columns likewise."""
    folder, models = tiny_models.save(SHARED, tmp_path), {}

    def run(group: RankGroup) -> None:
        load = Load(folder, SIZES, fused=False, whole_experts=True)
        with ranked_runner(1, load, LogitsOf, together=Together(lambda _: DataParallel(group, 2))) as (runner, _):
            models[group.rank] = runner.model

    with in_threads(2, run) as group:
        run(group)
    whole: Any = tiny_models.reference(folder)
    modules: list[Any] = [module for _, module in expert_modules(whole)]
    for index, module in enumerate(modules):
        parts: list[Any] = [expert_modules(models[rank])[index][1] for rank in (0, 1)]
        assert torch.equal(torch.cat([part.down_proj for part in parts]), module.down_proj)
    shared = [models[rank].model.layers[0].mlp.shared_expert.down_proj.weight for rank in (0, 1)]
    assert torch.equal(torch.cat(shared, 1), whole.model.layers[0].mlp.shared_expert.down_proj.weight)
    assert (
        models[0].model.layers[0].self_attn.q_proj.weight.shape == whole.model.layers[0].self_attn.q_proj.weight.shape
    )


class Seeing(OneRank):
    """One of several ranks, which sees what all of them give. calls: what each of them gives in each call."""

    def __init__(self, rank: int, calls: list[list[torch.Tensor]]) -> None:
        self.rank, self.size, self.calls = rank, len(calls[0]), iter(calls)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        given = next(self.calls)
        assert torch.equal(x, given[self.rank])
        return torch.cat(given, -1)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.size

    def part(self, size: int) -> RankGroup:
        assert size == self.size
        return self


@settings(deadline=None)
@given(st.lists(st.integers(0, 5), min_size=2, max_size=4), st.booleans())
def test_rows_go_and_come_back(num_rows: list[int], meets: bool) -> None:
    """Whatever number each node has, in a step or outside; also of a part of the columns of another tensor."""
    rows = [(torch.arange(num * 4.0).view(1, num, 4) + 100 * node)[..., :3] for node, num in enumerate(num_rows)]
    numbers = [torch.tensor([num]) for num in num_rows]
    told = [torch.tensor([num, 7 + num]) for num in num_rows]
    padded = [torch.cat([row[0], row.new_zeros(max(num_rows) - row.shape[1], 3)]).view(-1) for row in rows]
    for node, own in enumerate(rows):
        group = Seeing(node, [told, padded] if meets else [numbers, padded])
        data = DataParallel(group, len(num_rows))
        if meets:
            met = data.agree_on_step(num_rows[node], [7 + num_rows[node]])
            assert met.num_tokens_across_dp == num_rows
            assert met.needs == [max((7 + num for num in num_rows if num), default=0)]
            data.begin(met.num_tokens_across_dp)
        everyone = data.gather(own)
        assert torch.equal(everyone, torch.cat(rows, 1))
        assert torch.equal(data.sum_own(everyone), own * len(num_rows))


def test_a_node_alone_gathers_nothing() -> None:
    x, data = torch.randn(1, 3, 4), DataParallel(OneRank())
    assert data.gather(x) is x
    assert data.sum_own(x) is x


def test_the_engine_goes_on_for_others() -> None:
    """With steps of its own, and without."""
    told, others_go_on = [], [True, True, False]

    def keep_up(busy: bool) -> bool:
        told.append(busy)
        return others_go_on[len(told) - 1]

    model: Any = Counting()
    engine = Engine(dataclasses.replace(counting.SIZES), model, keep_up=keep_up)
    engine.add(sequence(5, max_tokens=1))
    assert [engine.compute(engine.schedule(0.0)).again for _ in others_go_on] == others_go_on
    assert told == [True, False, False]


def test_a_node_with_a_step_in_flight_does_not_go_on_without_tokens() -> None:
    """Its own next step follows: else nodes with requests would take turns."""
    told: list[bool] = []

    def keep_up(busy: bool) -> bool:
        told.append(busy)
        return True

    model: Any = Counting()
    model.slow = True
    engine = Engine(dataclasses.replace(counting.SIZES, async_scheduling=True), model, keep_up=keep_up)
    engine.add(sequence(5, max_tokens=3))

    def turn() -> bool:
        return engine.compute(engine.schedule(0.0), wait=False).again

    turn(), turn()
    assert told == [True, True]
    assert not engine.has_room
    assert not turn()
    assert told == [True, True], "it waits for room"
    while engine.num_running:
        for step in model.steps:
            step.running = False
        assert turn(), "the one that ends the last request goes on for the others, after its results are told"
        assert all(told), "it has a step of its own"
    turn()
    assert told[-1] is False


def test_each_step_is_a_wave(tmp_path: Path) -> None:
    """Which this node begins, or another."""

    class Counted:
        def __init__(self) -> None:
            self.running, self.calls = False, list[str]()

        def start(self) -> None:
            self.running = True
            self.calls.append("start")

        def end(self) -> None:
            self.running = False
            self.calls.append("end")

    waves = Counted()
    load = Load(tiny_models.save(tiny_models.CONFIGS["llama"], tmp_path), SIZES, fused=False)
    with ranked_runner(1, load, together=Together(waves=waves)) as (runner, _):
        assert not runner.keep_up(False)
        seq: Sequence = sequences([5])[0]
        runner.launch([Chunk.of(seq, 0, 5)])
        assert waves.calls == ["start", "end"]
        assert not runner.keep_up(True)
        waves.running = True
        assert runner.keep_up(True), "busy, but another node has begun a step"
        assert waves.calls == ["start", "end"]
        assert not runner.keep_up(False)
        assert waves.calls == ["start", "end", "end"]


def test_a_launch_has_begun_when_the_forward_is_launched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order = []
    load = Load(tiny_models.save(tiny_models.CONFIGS["llama"], tmp_path), SIZES, fused=False)
    with ranked_runner(1, load) as (runner, _):
        for owner, name in ((runner.rank, "compute"), (runner._sampler, "prepare")):
            call = getattr(owner, name)
            monkeypatch.setattr(owner, name, lambda *given, call=call, name=name: (order.append(name), call(*given))[1])
        runner.launch([Chunk.of(sequences([5])[0], 0, 5)], lambda _: order.append("begun"))
    assert order == ["compute", "begun", "prepare"]


def test_a_launch_costs_what_it_takes_without_the_wait_for_others() -> None:
    now, told = 0.0, []

    class Waiting(Counting):
        def launch(self, chunks: Any, begun: Begun = lambda waited_s: None) -> Any:
            nonlocal now
            now, self.waited_s = now + 0.005, 0.003
            return super().launch(chunks, begun)

    model: Any = Waiting()
    engine = Engine(dataclasses.replace(counting.SIZES), model, clock=lambda: now)
    pace: Any = engine._timing.pace
    pace.launched = lambda *_, waited_s, **__: told.append(waited_s)
    pace.retired = lambda _: None
    engine.add(sequence(5, max_tokens=3))
    model.slow = True
    engine.compute(engine.schedule(0.0), wait=False)
    assert told == [0.003]
    assert [round(step.launch_s, 6) for step in engine._in_flight] == [0.002]
