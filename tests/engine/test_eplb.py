"""Experts that change places between ranks: logits stay those of one rank, weights arrive, and ranks are busy alike."""

from __future__ import annotations

import functools
import re
from array import array
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import GptOssConfig, PreTrainedModel

from engine.model.errors import UnsupportedModel
from engine.model.expert_counts import ExpertCounts
from engine.model.experts import expert_modules
from engine.model.load import loader
from engine.model.load.checkpoint import Checkpoint
from engine.model.load.skeleton import build_skeleton
from engine.model.parallel.eplb import Change, Eplb, LoadWindow
from engine.model.parallel.expert_placement import Placement, balanced, first_placement
from engine.model.parallel.expert_slots import ExpertSlots, expert_slots
from engine.model.parallel.group import OneRank, RankGroup
from engine.model.parallel.sharding import Place, shard
from engine.model.rank import RankModel
from engine.model.runner import TorchModelRunner
from engine.step import Chunk
from tests.engine import tiny_models
from tests.engine.rank_threads import Load, Together, in_threads, ranked_runner
from tests.engine.test_expert_parallel import save_all
from tests.engine.test_model_families import SIZES, sequences
from tests.engine.test_sharding import LogitsOf, fill_biases
from tests.engine.test_stages_on_gpus import in_pairs
from tools.quantize import write

torch.set_num_threads(1)

FAMILIES = {
    "gpt_oss": GptOssConfig(**tiny_models.SHAPE, sliding_window=20, num_local_experts=6, num_experts_per_tok=2),
    "qwen3_moe": tiny_models.MIXTURES["qwen3_moe"],
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A checkpoint of each family, with biases of all values. Not to be changed."""
    return save_all(FAMILIES, tmp_path_factory.mktemp("mixtures"))


def logits_of(
    run: LogitsOf, ranks: list[RankModel], placements: Iterable[dict[int, Placement]] = ()
) -> list[torch.Tensor]:
    """Of a prompt in chunks beside decodes. placements: what layers get before each step but the first."""
    before, size = iter(placements), SIZES.block_size
    for rank in ranks:
        rank.pool.tensor[1:] = float("nan")  # whatever is read must have been written before
    a, b, c = sequences([70, 33, 100])
    rows: list[torch.Tensor] = []
    for chunks in (
        [Chunk.of(a, 0, 30), Chunk.of(b, 0, 32)],
        [Chunk.of(b, 32, 1), Chunk.of(a, 30, 40), Chunk.of(c, 0, 11 * size)],
        [Chunk.of(c, 11 * size, 100 - 11 * size)],
    ):
        rows += run(*chunks)
        for layer, placement in next(before, {}).items():
            rearrange(run, layer, placement)
    return rows


def rearrange(run: TorchModelRunner, layer: int, placement: Placement) -> None:
    """On all ranks, which have done it then."""
    run._others.rearrange_experts(layer, placement)
    run.rank.rearrange_experts(layer, placement)
    run.copy_blocks([])  # ends on all ranks together


def any_placement(num_experts: int, num_slots: int, seed: int) -> Placement:
    """Every expert once, others wherever it happens, twice on one rank as well."""
    rng = np.random.default_rng(seed)
    slots = np.concatenate([np.arange(num_experts), rng.integers(0, num_experts, num_slots - num_experts)])
    return rng.permutation(slots).astype(np.int32)


def check_weights(one: PreTrainedModel, ranks: list[RankModel]) -> None:
    """Each slot has what one rank has of its expert."""
    for layer, (_, whole) in enumerate(expert_modules(one)):
        for number, rank in enumerate(ranks):
            own: Any = expert_modules(rank.model)[layer][1]
            placement = expert_slots(rank.model)[layer].placement
            mine = torch.from_numpy(placement.reshape(len(ranks), -1)[number].astype(np.int64))
            for name, parameter in whole.named_parameters():
                assert torch.equal(getattr(own, name), parameter[mine]), f"{name} of layer {layer} on rank {number}"


@pytest.mark.parametrize(
    ("family", "size", "num_redundant", "quantization", "fused"),
    [
        ("qwen3_moe", 4, 4, None, True),
        ("qwen3_moe", 2, 4, "fp8", True),
        ("gpt_oss", 4, 2, None, True),
        ("qwen3_moe", 2, 0, None, False),
        pytest.param("gpt_oss", 2, 6, "fp8", True, marks=pytest.mark.full),
        pytest.param("gpt_oss", 4, 6, None, False, marks=pytest.mark.full),
    ],
)
def test_logits_are_those_of_one_rank_wherever_experts_are(
    family: str, size: int, num_redundant: int, quantization: str | None, fused: bool, folders: dict[str, Path]
) -> None:
    """Layers change one by one between the chunks of a prompt; every slot has its expert's weights to the bit."""
    num_experts = getattr(FAMILIES[family], "num_local_experts", None) or FAMILIES[family].num_experts
    placed = functools.partial(any_placement, num_experts, num_experts + num_redundant)
    how: dict[str, Any] = {"fused": fused, "quantization": quantization}
    with ranked_runner(1, Load(folders[family], SIZES, **how), LogitsOf) as (runner, ranks):
        assert isinstance(runner, LogitsOf)
        one, expected = runner.model, torch.stack(logits_of(runner, ranks))
    load = Load(folders[family], SIZES, whole_experts=True, num_redundant_experts=num_redundant, **how)
    with ranked_runner(size, load, LogitsOf) as (runner, ranks):
        assert isinstance(runner, LogitsOf)
        check_weights(one, ranks)
        rounds = [{0: placed(1)}, {1: placed(2), 0: placed(3)}, {0: placed(4)}]
        for placements in ([], rounds, [{1: placed(5)}]):
            actual = torch.stack(logits_of(runner, ranks, placements))
            check_weights(one, ranks)
            assert float(((actual - expected).norm(dim=-1) / expected.norm(dim=-1)).max()) < 1e-5
        for layers in zip(*(expert_slots(rank.model) for rank in ranks), strict=True):
            assert all((slots.placement == layers[0].placement).all() for slots in layers)


def test_experts_in_mxfp4(tmp_path: Path) -> None:
    """On a CPU they have the values that the codes stand for."""
    sizes = {"intermediate_size": 64, "num_local_experts": 4, "num_experts_per_tok": 2}
    source = tiny_models.save(GptOssConfig(**{**tiny_models.SHAPE, **sizes}, sliding_window=20), tmp_path / "source")
    fill_biases(source)
    write(source, tmp_path / "mxfp4", "mxfp4")
    one = loader.load_model(Checkpoint.open(tmp_path / "mxfp4"))
    load = Load(tmp_path / "mxfp4", SIZES, fused=True, whole_experts=True, num_redundant_experts=2)
    with ranked_runner(2, load) as (runner, ranks):
        for seed in range(2):
            check_weights(one, ranks)
            rearrange(runner, 0, any_placement(4, 6, seed))
        check_weights(one, ranks)


def test_an_exchange_does_not_read_what_it_has_written(folders: dict[str, Path]) -> None:
    """Ranks, and slots of one rank, that exchange their experts."""
    load = Load(folders["qwen3_moe"], SIZES, fused=False, whole_experts=True, num_redundant_experts=0)
    one = loader.load_model(Checkpoint.open(folders["qwen3_moe"]))
    with ranked_runner(2, load) as (runner, ranks):
        for placement in ([4, 5, 6, 7, 0, 1, 2, 3], [5, 4, 7, 6, 1, 0, 3, 2], [1, 5, 0, 6, 7, 4, 2, 3]):
            rearrange(runner, 1, np.array(placement, np.int32))
            check_weights(one, ranks)


def test_ranks_on_gpus_exchange_experts_over_pairs_that_join_when_first_used() -> None:
    """Two exchange theirs, and a third gets one of each: as with NCCL, whoever sends first waits for who receives."""
    placement = np.array([2, 1, 0, 3, 0, 2], np.int32)
    held: dict[int, list[torch.Tensor]] = {}

    def exchange(group: RankGroup) -> None:
        module = expert_modules(skeleton("mixtral"))[0][1]
        for number, parameter in enumerate(module.parameters()):
            rows = first_placement(4, 6, 3)[2 * group.rank :][:2]
            parameter.data = torch.stack([torch.full(parameter.shape[1:], 10.0 * number + row) for row in rows])
        slots = ExpertSlots(0, module, group, 4)
        slots.rearrange(placement)
        held[group.rank] = [parameter.detach() for parameter in module.parameters()]

    with in_threads(3, exchange, in_pairs) as group:
        exchange(group)
    for rank, parameters in held.items():
        for number, parameter in enumerate(parameters):
            assert parameter.flatten(1)[:, 0].tolist() == [10.0 * number + row for row in placement[2 * rank :][:2]]
    assert len(held) == 3


@pytest.mark.parametrize(("size", "num_redundant"), [(2, 2), (4, 4)])
def test_ranks_get_equally_busy(size: int, num_redundant: int, folders: dict[str, Path]) -> None:
    """Of tokens of two kinds. The load is counted as on one rank, wherever experts are."""
    with ranked_runner(1, Load(folders["qwen3_moe"], SIZES, fused=True)) as (runner, _):
        one = ExpertCounts.of(runner.model, 1, runner.model)
        skewed_steps(runner, 10)
    found: dict[str, Any] = {}

    def make(model: PreTrainedModel) -> Eplb:
        found["before"] = [slots.rank_totals() for slots in expert_slots(model)]
        found["counts"] = ExpertCounts.of(model, size, model)
        found["eplb"] = Eplb(found["counts"].total, expert_slots(model), 2, 4)
        return found["eplb"]

    load = Load(folders["qwen3_moe"], SIZES, fused=True, whole_experts=True, num_redundant_experts=num_redundant)
    with ranked_runner(size, load, together=Together(eplb=make)) as (runner, ranks):
        counts, eplb = found["counts"], found["eplb"]
        imbalances = []
        for _ in range(2):
            skewed_steps(runner, 5)
            imbalances.append((counts.imbalance(), counts.rank_imbalance()))
        assert eplb.num_rebalances == 1
        assert one is not None
        assert (counts.total() == one.total()).all()
        for rank in ranks:
            computed = [slots.rank_totals() for slots in expert_slots(rank.model)]
            assert ((np.stack(computed) - found["before"]).sum(axis=1) == counts.total().sum(axis=1)).all()
    (chosen, before), (chosen_after, after) = imbalances
    assert chosen == pytest.approx(chosen_after), "the router does not know"
    assert before > 1.2
    assert after < 1 + (before - 1) / 4


def skewed_steps(runner: Any, num_steps: int) -> None:
    for _ in range(num_steps):
        (seq,) = sequences([96])
        seq.tokens[:] = array("I", (3, 40) * 48)
        runner.launch([Chunk.of(seq, 0, 96)]).wait()
        runner.forget(seq)


@given(st.integers(1, 12), st.integers(1, 12), st.lists(st.integers(0, 5), max_size=60))
def test_the_window_has_the_last_steps(window: int, interval: int, gains: list[int]) -> None:
    total = np.zeros((1, 1), np.int64)
    measured = LoadWindow(total.copy, window, interval)
    for index, gain in enumerate(gains, start=1):
        total += gain
        found = measured.step()
        assert (found is not None) == (index % interval == 0)
        if found is not None:
            assert int(found[0, 0]) == sum(gains[:index][-window:])
    assert len(measured._began) <= -(-window // interval)


# ---- when ----


class TwoRanks(OneRank):
    """As rank 0 of two sees them."""

    size = 2


def layers(num_layers: int, num_redundant: int = 0) -> list[ExpertSlots]:
    """Four experts in as many slots, and more."""
    model = skeleton("mixtral")
    shard(model, Place(0, 2), whole_experts=True, num_redundant_experts=num_redundant)
    module = expert_modules(model)[0][1]
    return [ExpertSlots(layer, module, TwoRanks(), 4) for layer in range(num_layers)]


def changes(eplb: Eplb, slots: list[ExpertSlots], num_steps: int) -> list[int | None]:
    """The layer that changes before each step, which is done at once."""
    found = []
    for _ in range(num_steps):
        change = eplb.before_step()
        found.append(None if change is None else change.layer)
        if change is not None:
            slots[change.layer]._place(change.placement)
            eplb.changed(change, 0.0)
    return found


def test_one_layer_changes_at_a_time() -> None:
    """From the interval's end on, those for which it helps; then nothing until it helps again."""
    total, slots = np.zeros((4, 4), np.int64), layers(4)
    eplb = Eplb(total.copy, slots, 10, 5)
    assert changes(eplb, slots, 4) == [None] * 4
    total[:] = [9, 9, 1, 1]
    total[2] = 5
    assert changes(eplb, slots, 6) == [0, 1, None, 3, None, None]
    assert eplb.num_rebalances == 1
    assert [sorted(slots[layer].placement[:2].tolist()) for layer in range(4)] == [[0, 2], [0, 2], [0, 1], [0, 2]]
    total += [9, 9, 1, 1]
    assert changes(eplb, slots, 8) == [*[None] * 6, 2, None]
    assert eplb.num_rebalances == 2
    assert changes(eplb, slots, 20) == [None] * 20
    assert eplb.num_rebalances == 2


def test_a_rebalance_ends_before_the_next_begins() -> None:
    """So that the last layers have their turn."""
    total, slots = np.zeros((3, 4), np.int64), layers(3)
    eplb = Eplb(total.copy, slots, 1, 1)
    total[:] = [9, 9, 1, 1]
    assert changes(eplb, slots, 1) == [0]
    total[0] += [9, 1, 9, 1]
    assert changes(eplb, slots, 2) == [1, 2]
    assert eplb.num_rebalances == 1


def test_a_rebalance_is_logged_with_the_time_it_took(caplog: pytest.LogCaptureFixture) -> None:
    total, slots = np.zeros((2, 4), np.int64), layers(2)
    eplb = Eplb(total.copy, slots, 1, 1)
    total[:] = [9, 9, 1, 1]
    with caplog.at_level("INFO", "engine.model.parallel.eplb"):
        for seconds in (0.25, 0.5):
            change = eplb.before_step()
            assert isinstance(change, Change)
            eplb.changed(change, seconds)
    assert caplog.messages == ["experts rebalanced layers=2 slots=4 seconds=0.750 longest_s=0.500"]


def test_replicas_take_turns() -> None:
    """By the choices of their expert, and in other layers from another one on."""
    first, second = layers(2, num_redundant=2)
    for slots in (first, second):
        slots._place(np.array([0, 1, 2, 3, 0, 2], np.int32))
    ids = torch.tensor([[0, 1], [0, 2], [2, 0]])
    assert first.choose(ids).tolist() == [[0, 1], [4, 2], [5, 0]]
    assert second.choose(ids).tolist() == [[4, 1], [0, 5], [2, 4]]


# ---- what is refused ----


def skeleton(family: str) -> PreTrainedModel:
    return build_skeleton({**tiny_models.CONFIGS, **tiny_models.MIXTURES}[family], torch.float32, "eager")


@pytest.mark.parametrize(
    ("size", "num_redundant", "why"),
    [
        (4, 2, "4 experts and 2 redundant ones cannot be divided among 4 ranks"),
        (2, 6, "4 experts and 6 redundant ones are more than one of each on 2 ranks"),
    ],
)
def test_slots_that_cannot_be_are_named(size: int, num_redundant: int, why: str) -> None:
    name = "--eplb-config: num_redundant_experts: model.layers.0.mlp.experts: "
    with pytest.raises(UnsupportedModel, match=re.escape(name + why)):
        shard(skeleton("mixtral"), Place(0, size), whole_experts=True, num_redundant_experts=num_redundant)
    shard(skeleton("mixtral"), Place(0, size), whole_experts=True, num_redundant_experts=4)


def test_experts_that_cannot_be_divided_evenly_can_with_redundant_ones(folders: dict[str, Path]) -> None:
    """Six experts on four ranks."""
    model = build_skeleton(FAMILIES["gpt_oss"], torch.float32, "eager")
    with pytest.raises(UnsupportedModel, match="6 experts cannot be divided among 4 ranks"):
        shard(model, Place(0, 4), whole_experts=True)
    assert first_placement(6, 8, 4).tolist() == [0, 1, 1, 2, 2, 3, 4, 5]
    assert len(balanced(np.ones(6, np.int64), 8, 4)) == 8


def test_how_balanced_the_ranks_were_is_logged_every_so_many_steps(caplog: pytest.LogCaptureFixture) -> None:
    slots = layers(2)
    eplb = Eplb(np.zeros((2, 4), np.int64).copy, slots, 10, 1000, log_every=2)
    with caplog.at_level("INFO", "engine.model.parallel.eplb"):
        for tokens in ([6, 2], [0, 0], [0, 0], [0, 0], [5, 5]):
            for one in slots:
                one._rank_tokens += torch.tensor(tokens)
            eplb.before_step()
        assert caplog.messages == ["experts balancedness=0.667 steps=2"], "nothing to say of the next two steps"
        eplb.before_step()
    assert caplog.messages[1:] == ["experts balancedness=1.000 steps=2"]
