"""Sums over ranks: norms make those that nothing else reads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from engine.model import fast
from engine.model.fast import FusedReport
from engine.model.fast.forwards import logits_as_served
from engine.model.fast.target import Target
from engine.model.load import loader
from engine.model.load.checkpoint import Checkpoint
from engine.model.parallel.group import GlooRanks, RankGroup
from engine.model.parallel.part import RankPart
from engine.model.probe import probe
from tests.engine import tiny_models
from tests.engine.rank_threads import in_threads

torch.set_num_threads(1)

SIZE = 2
MAX_MODEL_LEN = 64


def nothing(model: Any, rank: int) -> None:
    """The model as it is."""


def served(
    folder: Path, mutate: Callable[[Any, int], None] = nothing, group_of: Callable[[RankGroup], RankGroup] = lambda g: g
) -> tuple[Tensor, Tensor, FusedReport]:
    """Of rank 0: logits before and after the fusion, and its report. mutate: changes the model of each rank."""
    found: dict[int, tuple[Tensor, Tensor, FusedReport]] = {}

    def run(group: RankGroup) -> None:
        model: PreTrainedModel = loader.load_model(Checkpoint.open(folder), part=RankPart(group_of(group)))
        mutate(model, group.rank)
        probed = probe(model, MAX_MODEL_LEN)
        target = Target(model, probed.layers, MAX_MODEL_LEN)
        with torch.inference_mode():
            own = logits_as_served(target, probed.kv)
            report = fast.apply(model, probed, MAX_MODEL_LEN)
            after = logits_as_served(target, probed.kv)
        found[group.rank] = own, after, report

    with in_threads(SIZE, run) as group:
        run(group)
    assert torch.equal(found[0][1], found[1][1])
    assert found[0][2].taken_back is None
    return found[0]


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_the_next_norm_makes_the_sum(family: str, tmp_path: Path) -> None:
    """Also where the norm after attention and MLP comes before the residual."""
    own, after, report = served(tiny_models.save(tiny_models.CONFIGS[family], tmp_path))
    assert "sum_norm 4/4" in str(report)
    torch.testing.assert_close(after, own, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "glm4_moe"])
def test_the_next_norm_makes_the_sum_of_experts(family: str, tmp_path: Path) -> None:
    """Of routed and shared experts, and where the block returns more than its results; blocks themselves still sum."""
    own, after, report = served(tiny_models.save({**tiny_models.CONFIGS, **tiny_models.MIXTURES}[family], tmp_path))
    assert "sum_norm 4/4" in str(report)
    torch.testing.assert_close(after, own, atol=1e-4, rtol=1e-4)


def test_a_sum_of_experts_of_which_more_is_made_stays(tmp_path: Path) -> None:
    def mutate(model: Any, rank: int) -> None:
        first = model.model.layers[0]
        first.mlp = Clamped(first.mlp)

    own, after, report = served(tiny_models.save(tiny_models.MIXTURES["qwen3_moe"], tmp_path), mutate)
    assert report.pieces["sum_norm"].fused == 3
    torch.testing.assert_close(after, own, atol=1e-4, rtol=1e-4)


class Clamped(nn.Module):
    def __init__(self, inner: nn.Module, most: float = 0.5) -> None:
        super().__init__()
        self.inner, self.most = inner, most

    def forward(self, x: Tensor) -> Any:
        return self.inner(x).clamp(-self.most, self.most)


def test_a_sum_of_which_more_is_made_stays_with_its_product(tmp_path: Path) -> None:
    """In one layer by the attention, in another by the MLP: the others do not change for that."""

    def mutate(model: Any, rank: int) -> None:
        first, second = model.model.layers
        first.self_attn.o_proj, second.mlp = Clamped(first.self_attn.o_proj), Clamped(second.mlp)

    own, after, report = served(tiny_models.save(tiny_models.CONFIGS["llama"], tmp_path), mutate)
    tally, why = report.pieces["sum_norm"], "more is done with the sum"
    refused = ["model.layers.0.self_attn.o_proj.inner", "model.layers.1.mlp.inner.down_proj"]
    assert tally.refused == [(name, why) for name in refused]
    assert tally.fused == 2
    torch.testing.assert_close(after, own, atol=1e-4, rtol=1e-4)


def test_ranks_leave_the_same_sums_to_norms(tmp_path: Path) -> None:
    """What one of them cannot leave, none does: all sum at the same time."""

    def mutate(model: Any, rank: int) -> None:
        attention = model.model.layers[1].self_attn
        attention.o_proj = Clamped(attention.o_proj, 1e9) if rank else attention.o_proj

    own, after, report = served(tiny_models.save(tiny_models.CONFIGS["llama"], tmp_path), mutate)
    assert report.pieces["sum_norm"].refused == [("model.layers.1.self_attn.o_proj", "another rank refused it")]
    torch.testing.assert_close(after, own, atol=1e-4, rtol=1e-4)


class WithoutNorms(GlooRanks):
    """Makes no sum in a norm, as GPUs do not those of many rows."""

    def __init__(self, group: Any) -> None:
        self.__dict__.update(group.__dict__)

    def norms_sum(self, num_rows: int, row_bytes: int) -> bool:
        return False


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_a_norm_need_not_make_the_sum(family: str, tmp_path: Path) -> None:
    config = {**tiny_models.CONFIGS, **tiny_models.MIXTURES}[family]
    own, after, report = served(tiny_models.save(config, tmp_path), group_of=WithoutNorms)
    assert report.pieces["sum_norm"].fused == 4
    torch.testing.assert_close(after, own, atol=1e-4, rtol=1e-4)
