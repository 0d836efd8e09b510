"""Mixtures of experts divided among ranks: logits are those of one rank, with a part of each expert on every rank, and
with whole experts."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    AfmoeConfig,
    Cohere2MoeConfig,
    ExaoneMoeConfig,
    GptOssConfig,
    Olmo2Config,
    PhimoeConfig,
    PreTrainedModel,
    Qwen2MoeConfig,
    SolarOpenConfig,
)

from baton_kernels.experts import reference
from engine.model.errors import UnsupportedModel
from engine.model.expert_counts import ExpertCounts
from engine.model.experts import NAMES, expert_modules, weights_of
from engine.model.fast.forwards import logits_as_served
from engine.model.fast.target import Target
from engine.model.load import loader
from engine.model.load.checkpoint import Checkpoint
from engine.model.load.skeleton import build_skeleton
from engine.model.parallel.data_parallel import DataParallel
from engine.model.parallel.experts import expert_cuts, sum_block
from engine.model.parallel.group import ONE_RANK, OneRank, RankGroup
from engine.model.parallel.part import RankPart
from engine.model.parallel.pipeline import Pipeline
from engine.model.parallel.sharding import Place, shard
from tests.engine import tiny_models
from tests.engine.rank_threads import Load, in_threads
from tests.engine.test_model_families import SIZES
from tests.engine.test_sharding import check_same, fill_biases

torch.set_num_threads(1)

FAMILIES = {
    "gpt_oss": GptOssConfig(**tiny_models.SHAPE, sliding_window=20, num_local_experts=4, num_experts_per_tok=2),
    **tiny_models.MIXTURES,
}
CI = {
    ("gpt_oss", 2, False, True),
    ("gpt_oss", 4, True, False),
    ("qwen3_moe", 4, True, True),
    ("glm4_moe", 2, False, True),
    ("mixtral", 2, True, False),
    ("olmoe", 4, True, True),
    ("granite_moe", 2, False, False),
    ("minimax_m2", 4, False, False),
}
CASES = [
    pytest.param(*case, marks=[] if case in CI else pytest.mark.full)
    for family in FAMILIES
    for size in (2, 4)
    for whole in (False, True)
    for fused in (False, True)
    if (case := (family, size, whole, fused))
]


def save_all(families: Mapping[str, Any], root: Path) -> dict[str, Path]:
    """Checkpoints of these configurations, each in a folder of its name."""
    saved = {name: tiny_models.save(config, root / name) for name, config in families.items()}
    for folder in saved.values():
        fill_biases(folder)
    return saved


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A checkpoint of each family, with biases and norms of all values. Not to be changed."""
    return save_all(FAMILIES, tmp_path_factory.mktemp("mixtures"))


@pytest.mark.parametrize(("family", "size", "whole", "fused"), CASES)
def test_logits_and_kv_are_those_of_one_rank(
    family: str, size: int, whole: bool, fused: bool, folders: dict[str, Path]
) -> None:
    check_same(folders[family], size, fused=fused, whole_experts=whole)


# ---- what a rank has ----


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize(
    ("family", "quantization"),
    [
        ("gpt_oss", "fp8"),
        ("qwen3_moe", "fp8"),
        ("minimax_m2", None),
        *(pytest.param(family, None, marks=pytest.mark.full) for family in ("gpt_oss", "qwen3_moe")),
    ],
)
def test_a_rank_has_its_part_to_the_bit(
    family: str, quantization: str | None, whole: bool, folders: dict[str, Path]
) -> None:
    """Also of what is quantized as it loads, whose scales the ranks share."""
    one = loader.load_model(Checkpoint.open(folders[family]), quantization=quantization)
    for rank, model in load_all(folders[family], 4, quantization=quantization, whole_experts=whole).items():
        for (name, module), (_, own) in zip(expert_modules(one), expert_modules(model), strict=True):
            parameters = dict(module.named_parameters())
            assert dict(own.named_parameters()).keys() == parameters.keys()
            for kind, tensor in parameters.items():
                expected = part_of(kind, tensor, rank, 4, whole=whole, in_pairs=family == "gpt_oss")
                assert torch.equal(getattr(own, kind), expected), f"{name}.{kind} of rank {rank}"


def part_of(kind: str, tensor: torch.Tensor, rank: int, size: int, *, whole: bool, in_pairs: bool) -> torch.Tensor:
    """As it is known, written down once more. in_pairs: gpt-oss, where outputs come last, and gate and up alternate."""
    if whole:
        return tensor.chunk(size)[rank]
    if kind == "down_proj_bias":
        return tensor if rank == 0 else torch.zeros_like(tensor)
    if in_pairs:
        return tensor.chunk(size, dim=1 if kind == "down_proj" else -1)[rank]
    if kind == "down_proj":
        return tensor.chunk(size, dim=2)[rank]
    gate, up = tensor.chunk(2, dim=1)
    return torch.cat([gate.chunk(size, dim=1)[rank], up.chunk(size, dim=1)[rank]], dim=1)


def load_all(folder: Path, size: int, **how: Any) -> dict[int, PreTrainedModel]:
    models: dict[int, PreTrainedModel] = {}
    load = Load(folder, SIZES, fused=False, **how)

    def run(group: RankGroup) -> None:
        models[group.rank], _ = load(Pipeline(group, 1))

    with in_threads(size, run) as group:
        run(group)
    return models


@pytest.mark.parametrize("whole", [False, True])
def test_an_mlp_is_summed_once(whole: bool, folders: dict[str, Path]) -> None:
    """Also one with shared experts; besides, each attention, and the embedding once."""
    sums: list[tuple[int, ...]] = []

    class Counted(OneRank):
        rank, size = 1, 2

        def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
            sums.append(tuple(x.shape))
            return x

        def all_gather(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cat([x, x], dim=-1)

    model: Any = loader.load_model(Checkpoint.open(folders["glm4_moe"]), part=RankPart(Counted(), whole_experts=whole))
    module: Any = model.model.layers[1].mlp
    assert hasattr(module, "shared_experts")
    for layer, num_sums in ((model.model.layers[0].mlp, 1), (module, 1)):
        sums.clear()
        layer(torch.randn(1, 5, 64))
        assert sums == [(1, 5, 64)] * num_sums


def test_tokens_that_chose_experts_of_others_get_zeros_here(folders: dict[str, Path]) -> None:
    one: Any = loader.load_model(Checkpoint.open(folders["qwen3_moe"])).get_submodule("model.layers.1.mlp.experts")
    of = weights_of(one)
    assert of is not None
    x, ids = torch.randn(3, 64), torch.tensor([[0, 5, 6], [1, 0, 2], [5, 7, 4]])
    weights = torch.rand(3, 3) + 0.1
    models = load_all(folders["qwen3_moe"], 4, whole_experts=True)
    total = torch.zeros(3, 64)
    for rank, model in models.items():
        module: Any = model.get_submodule("model.layers.1.mlp.experts")
        share = weights_of(module)
        assert share is not None
        assert (share.num_experts, share.global_num_experts) == (2, of.num_experts)
        result = module(x, top_k_weights=weights, top_k_index=ids)
        mine = ((ids == 2 * rank) | (ids == 2 * rank + 1)).any(-1)
        assert (result.abs().sum(-1) > 0).tolist() == mine.tolist()
        total += result
    torch.testing.assert_close(total, reference.experts(x, ids, weights, of), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("family", "whole"), [("gpt_oss", True), ("qwen3_moe", False)])
def test_random_weights(family: str, whole: bool, tmp_path: Path) -> None:
    FAMILIES[family].save_pretrained(tmp_path)

    def run(group: RankGroup) -> None:
        model = loader.load_model(
            Checkpoint.open(tmp_path), load_format="dummy", part=RankPart(group, whole_experts=whole)
        )
        for _, module in expert_modules(model):
            assert all(0.1 < getattr(module, name).std() < 0.5 for name in NAMES)

    with in_threads(2, run) as group:
        run(group)


# ---- what is refused ----


def skeleton(family: str, **changes: Any) -> PreTrainedModel:
    config = {**tiny_models.CONFIGS, **FAMILIES}[family]
    return build_skeleton(type(config)(**{**config.to_dict(), **changes}), torch.float32, "eager")


@pytest.mark.parametrize(
    ("family", "changes", "whole", "why"),
    [
        (
            "mixtral",
            {"num_local_experts": 6},
            True,
            "--enable-expert-parallel: model.layers.0.mlp.experts: 6 experts cannot be divided among 4 ranks",
        ),
        (
            "qwen3_moe",
            {"moe_intermediate_size": 30},
            False,
            "model.layers.0.mlp.experts: 30 features of each expert (--enable-expert-parallel divides whole experts) "
            "cannot be divided among 4 ranks",
        ),
    ],
)
def test_what_cannot_be_divided_is_named(family: str, changes: dict[str, Any], whole: bool, why: str) -> None:
    with pytest.raises(UnsupportedModel, match=re.escape(why)):
        shard(skeleton(family, **changes), Place(0, 4), whole_experts=whole)


def test_whole_experts_are_for_mixtures() -> None:
    part = RankPart(whole_experts=True)
    part.require_possible(skeleton("mixtral"))
    with pytest.raises(UnsupportedModel, match="--enable-expert-parallel: llama is not a mixture of experts"):
        part.require_possible(skeleton("llama"))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda module: setattr(module, "has_gate", False), "its experts are not gated MLPs"),
        (lambda module: setattr(module, "_apply_gate", torch.relu), "its gate is none of"),
        (lambda module: module.register_parameter("more", nn.Parameter(torch.zeros(4))), "they have more"),
    ],
)
@pytest.mark.parametrize("whole", [False, True])
def test_experts_of_other_forms_are_refused(change: Any, why: str, whole: bool) -> None:
    module: Any = expert_modules(skeleton("mixtral"))[0][1]
    change(module)
    with pytest.raises(UnsupportedModel, match=f"these experts cannot be divided among ranks: {why}"):
        expert_cuts("experts", module, 0, 2, whole=whole)


def test_a_block_that_does_more_than_to_add_is_refused(folders: dict[str, Path]) -> None:
    """Two ranks with the same results have twice their sum."""

    class Doubled(OneRank):
        def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2

    model: Any = loader.load_model(Checkpoint.open(folders["glm4_moe"]))
    block = model.model.layers[1].mlp
    parts = [block.experts, block.shared_experts.down_proj]
    sum_block("mlp", block, parts, torch.randn(1, 3, 64), DataParallel(Doubled()))
    del block.forward
    with pytest.raises(UnsupportedModel, match="mlp: its experts cannot be divided among ranks: it does not just add"):
        sum_block("mlp", block, parts[:1], torch.randn(1, 3, 64), DataParallel(Doubled()))
    block.forward = lambda x, positions: x
    with pytest.raises(UnsupportedModel, match=r"it takes more than hidden states: .*positions"):
        sum_block("mlp", block, parts, torch.randn(1, 3, 64), DataParallel(Doubled()))


def test_shared_experts_with_a_gate_of_their_own(tmp_path: Path) -> None:
    """Qwen2-MoE: what they add is multiplied, which a sum at the end is, too."""
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    folder = tiny_models.save(
        Qwen2MoeConfig(**tiny_models.SHAPE, **sizes, shared_expert_intermediate_size=48), tmp_path
    )
    fill_biases(folder)
    check_same(folder, 4, fused=True, whole_experts=True)


WIDTHS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
INCOMPLETE = {
    "afmoe": AfmoeConfig(**tiny_models.SHAPE, **WIDTHS, num_experts=4, num_shared_experts=1, num_dense_layers=1),
    "cohere2_moe": Cohere2MoeConfig(**tiny_models.SHAPE, **WIDTHS, num_experts=4, num_shared_experts=2),
    "phimoe": PhimoeConfig(**tiny_models.SHAPE, num_local_experts=4, lm_head_bias=True),
    "exaone_moe": ExaoneMoeConfig(**tiny_models.SHAPE, **WIDTHS, num_experts=4, num_shared_experts=1),
    "solar_open": SolarOpenConfig(**tiny_models.SHAPE, **WIDTHS, n_routed_experts=4, n_shared_experts=1),
}


@pytest.mark.parametrize(
    "family",
    [pytest.param(family, marks=[] if family == "afmoe" else pytest.mark.full) for family in INCOMPLETE],
)
def test_what_plans_omit(family: str, tmp_path: Path) -> None:
    """Shared experts; and of AFMoE attention, with a gate of its own."""
    folder = tiny_models.save(INCOMPLETE[family], tmp_path)
    fill_biases(folder)
    check_same(folder, 2, fused=False)


def test_norms_over_all_heads_of_a_dense_model(tmp_path: Path) -> None:
    folder = tiny_models.save(Olmo2Config(**{**tiny_models.SHAPE, "head_dim": 8}), tmp_path)
    fill_biases(folder)
    check_same(folder, 4, fused=True)


def test_attention_without_a_plan_is_refused() -> None:
    """As Granite-MoE's in transformers, of which this is another."""
    model = skeleton("granite_moe")
    model.config.model_type = "granite_other"
    with pytest.raises(UnsupportedModel, match="granite_other has no tensor-parallel plan for its attention"):
        shard(model, Place(0, 2))


def test_a_norm_of_other_width_is_refused() -> None:
    model: Any = skeleton("olmoe")
    model.model.layers[0].self_attn.k_norm.weight = nn.Parameter(torch.ones(8))
    with pytest.raises(UnsupportedModel, match=r"k_proj: a norm of \[\(8,\)\] after its 16 features cannot be divided"):
        shard(model, Place(0, 2))
    model = skeleton("olmoe")
    model.model.layers[0].self_attn.gate = nn.Linear(2, 2)
    with pytest.raises(UnsupportedModel, match="q_proj has the tensor-parallel style colwise_gather_output"):
        shard(model, Place(0, 2))


@pytest.mark.parametrize("whole", [False, True])
def test_sums_in_16_bits_are_close_enough(whole: bool, folders: dict[str, Path]) -> None:
    """Over eight ranks, with shared experts. The bias that stays in fp32 is on every rank."""

    def run(group: RankGroup) -> None:
        model = loader.load_model(
            Checkpoint.open(folders["glm4_moe"]), "bfloat16", part=RankPart(group, whole_experts=whole)
        )
        gate: Any = model.get_submodule("model.layers.1.mlp.gate")
        assert gate.e_score_correction_bias.dtype == torch.float32
        assert gate.e_score_correction_bias.std() > 0.1

    with in_threads(8, run) as group:
        run(group)


# ---- how evenly experts are chosen ----


@pytest.mark.parametrize("family", ["gpt_oss", pytest.param("qwen3_moe", marks=pytest.mark.full)])
def test_choices_are_counted_as_the_router_made_them(family: str, folders: dict[str, Path]) -> None:
    """The same on one rank and on several, with whole experts too."""
    config = FAMILIES[family]
    counts: dict[tuple[int, bool, int], ExpertCounts] = {}

    def run(group: RankGroup, whole: bool) -> None:
        model, probed = Load(folders[family], SIZES, fused=True, whole_experts=whole)(Pipeline(group, 1))
        found = ExpertCounts.of(model, group.size if whole else 1, probed.layers[0])
        assert found is not None
        assert found.imbalance() == 0
        logits_as_served(Target(model, probed.layers, 128), probed.kv)
        counts[group.size, whole, group.rank] = found

    run(ONE_RANK, whole=False)
    for whole in (False, True):
        with in_threads(2, functools.partial(run, whole=whole)) as group:
            run(group, whole=whole)
    one = counts[1, False, 0].total()
    assert one.shape == (2, config.num_local_experts)
    assert one.sum(axis=1).min() >= config.num_experts_per_tok
    assert len(counts) == 5
    assert all((each.total() == one).all() for each in counts.values())


def count(counts: ExpertCounts, layer: int, tokens: list[int]) -> None:
    """As if so many tokens had chosen each expert."""
    counts._tokens[layer] += torch.tensor(tokens)


def test_the_imbalance_is_that_since_the_last_reading(folders: dict[str, Path]) -> None:
    model = loader.load_model(Checkpoint.open(folders["gpt_oss"]))
    counts = ExpertCounts.of(model, 1, model)
    assert counts is not None
    assert counts.imbalance() == 0
    count(counts, 0, [1, 1, 1, 1])
    count(counts, 1, [0, 8, 0, 0])
    assert counts.imbalance() == pytest.approx((1 + 4) / 2)
    assert counts.imbalance() == pytest.approx((1 + 4) / 2)
    count(counts, 1, [2, 0, 2, 0])
    assert counts.imbalance() == pytest.approx(2)


def test_the_imbalance_of_ranks_with_whole_experts(folders: dict[str, Path]) -> None:
    """Each of two has four of eight experts."""
    model = loader.load_model(Checkpoint.open(folders["gpt_oss"]))
    counts = ExpertCounts.of(model, 2, model)
    assert counts is not None
    assert counts.rank_imbalance() == 0
    count(counts, 0, [3, 1, 0, 0, 4, 4, 2, 2])
    assert counts.rank_imbalance() == pytest.approx(1.5)
    count(counts, 1, [8, 0, 0, 0, 0, 8, 0, 0])
    assert counts.imbalance() == pytest.approx((2 + 4) / 2)
    assert counts.rank_imbalance() == pytest.approx(1)


def test_a_dense_model_has_no_choices_to_count() -> None:
    model = skeleton("llama")
    assert ExpertCounts.of(model, 1, model) is None
