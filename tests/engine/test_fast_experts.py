"""Fast experts and routers of mixtures, and the sums that they leave to norms: only where they are exact."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from baton_kernels.experts import ExpertWeights, experts
from baton_kernels.unfinished import ChosenParts, unfinished
from engine.model.expert_counts import ExpertCounts
from engine.model.fast.forwards import NUM_TOKENS
from tests.engine.fused_models import built, check_same_as_own, fused, logits

torch.set_num_threads(1)

MIXTURES = ["gpt-oss", "qwen3 moe", "mixtral", "olmoe", "granite moe", "glm4 moe", "minimax m2"]


def mixture_layers(model: PreTrainedModel) -> list[Any]:
    return [module for module in model.modules() if hasattr(module, "experts")]


@pytest.mark.parametrize("family", MIXTURES)
def test_experts_and_their_choice(family: str) -> None:
    model = built(family)
    probed, report = fused(model)
    number = len(mixture_layers(model))
    assert number
    assert (report.taken_back, report.pieces["experts"].fused, report.pieces["routing"].fused) == (None, number, number)
    check_same_as_own(model, probed, family)


def test_experts_with_another_gate() -> None:
    def mutate(model: PreTrainedModel) -> None:
        experts = mixture_layers(model)[0].experts
        experts._apply_gate = lambda gate_up: F.silu(gate_up.chunk(2, -1)[0]).clamp(max=0.5) * gate_up.chunk(2, -1)[1]

    model = built("qwen3 moe")
    mutate(model)
    probed, report = fused(model)
    (name, why), *others = report.pieces["experts"].refused
    assert (name, others) == ("model.layers.0.mlp.experts", [])
    assert why.startswith("its gate is none of silu, ")
    check_same_as_own(model, probed, "qwen3 moe", mutate)


def test_experts_that_compute_something_else(monkeypatch: pytest.MonkeyPatch) -> None:
    experts_class = type(mixture_layers(built("mixtral"))[0].experts)
    own = inspect.unwrap(experts_class.forward)
    monkeypatch.setattr(experts_class, "forward", lambda self, x, ids, weights: own(self, x, ids, weights.square()))
    model = built("mixtral")
    probed, report = fused(model)
    assert {why for _, why in report.pieces["experts"].refused} == {"differs"}
    check_same_as_own(model, probed, "mixtral")


@pytest.mark.parametrize("family", ["qwen3 moe", "glm4 moe"])
def test_routers_that_choose_otherwise(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    router_class = type(mixture_layers(built(family))[0].gate)
    own = router_class.forward

    def squared(self: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits, weights, ids = own(self, x)
        return logits, weights.square(), ids

    monkeypatch.setattr(router_class, "forward", squared)
    model = built(family)
    probed, report = fused(model)
    assert report.pieces["routing"].fused == 0
    assert {why for _, why in report.pieces["routing"].refused} == {"differs"}
    check_same_as_own(model, probed, family)


def test_a_rule_that_chooses_the_same_for_most_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bias that is added to logits (Kolibri), and not to the sigmoids that weights are made of (MiniMax-M2)."""
    router_class = type(mixture_layers(built("minimax m2"))[0].gate)

    def forward(self: Any, x: Tensor, e_score_correction_bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = F.linear(x, self.weight)
        ids = (logits + e_score_correction_bias).topk(self.top_k).indices
        weights = logits.sigmoid().gather(1, ids)
        return logits, weights / weights.sum(-1, keepdim=True), ids

    def mutate(model: PreTrainedModel) -> None:
        for layer in mixture_layers(model):
            layer.gate.weight *= 0.1
            layer.e_score_correction_bias.copy_(torch.linspace(0, 3, 8))

    monkeypatch.setattr(router_class, "forward", forward)
    model = built("minimax m2")
    mutate(model)
    probed, report = fused(model)
    assert [why for _, why in report.pieces["routing"].refused] == ["differs", "differs"]
    check_same_as_own(model, probed, "minimax m2", mutate)


def test_a_rule_whose_weights_do_not_show_what_was_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a single expert they may always be 1. Here tokens with small logits choose by the bias."""
    router_class = type(mixture_layers(built("qwen3 moe"))[0].gate)

    def forward(self: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = F.linear(x, self.weight)
        ids = (logits + torch.linspace(0.1, 0, 8)).topk(1).indices
        return logits, torch.ones_like(ids, dtype=x.dtype), ids

    monkeypatch.setattr(router_class, "forward", forward)
    model = built("qwen3 moe")
    probed, report = fused(model)
    assert [why for _, why in report.pieces["routing"].refused] == ["differs", "differs"]
    check_same_as_own(model, probed, "qwen3 moe")


def test_the_bias_of_a_choice_is_found_where_it_is_zero() -> None:
    """A fresh model's is; what a checkpoint has then counts."""

    def mutate(model: PreTrainedModel) -> None:
        for layer in mixture_layers(model):
            bias = layer.gate.e_score_correction_bias
            bias.copy_(torch.linspace(0, 0.5, len(bias))[torch.randperm(len(bias), generator=torch.Generator())])

    model = built("glm4 moe")
    with torch.no_grad():
        for layer in mixture_layers(model):
            layer.gate.e_score_correction_bias.zero_()
    probed, report = fused(model)
    assert report.pieces["routing"].fused == 1
    mutate(model)
    check_same_as_own(model, probed, "glm4 moe", mutate)


SUMS_IN_NORMS = {"gpt-oss": 2, "qwen3 moe": 2, "mixtral": 2, "olmoe": 2, "glm4 moe": 0, "minimax m2": 0}
"""How many blocks do no more than to add up their experts' results: none with shared experts, or a bias of its own."""


@pytest.fixture
def left_to_norms(monkeypatch: pytest.MonkeyPatch) -> list[ChosenParts]:
    """Makes experts on a CPU leave their sums, too, each with a tensor of NaN. Returns what they have left."""
    left: list[ChosenParts] = []

    def leaving(
        x: Tensor, ids: Tensor, weights: Tensor, of: ExpertWeights, slots: None, *, leaves_sum: bool = False
    ) -> Tensor:
        if not leaves_sum:
            return experts(x, ids, weights, of, slots)
        parts = [experts(x, *one, of) for one in zip(ids.split(1, 1), weights.split(1, 1), strict=True)]
        left.append(ChosenParts(torch.stack(parts, 1).flatten(0, 1), ids, slots, of.num_experts))
        return unfinished(torch.full_like(x, float("nan")), left[-1])

    monkeypatch.setattr("engine.model.experts.experts", leaving)
    return left


@pytest.mark.parametrize("family", SUMS_IN_NORMS)
def test_the_sums_that_experts_leave_to_the_norm_after_them(family: str, left_to_norms: list[ChosenParts]) -> None:
    """Every layer's, whether the block returns a tensor or a tuple."""
    model, number = built(family), SUMS_IN_NORMS[family]
    probed, report = fused(model)
    assert (report.taken_back, report.pieces["expert_sum"].found) == (None, number)
    assert report.pieces["expert_sum"].fused == number
    left_to_norms.clear()
    found = logits(model, probed)
    assert len(left_to_norms) == 2 * number
    assert found.isfinite().all()
    check_same_as_own(model, probed, family)


def test_no_sums_are_left_to_norms_that_do_not_get_the_very_tensor(left_to_norms: list[ChosenParts]) -> None:
    model = built("qwen3 moe")
    model.model.layers[0].register_forward_hook(lambda module, given, out: out.view(out.shape))
    probed, report = fused(model)
    assert (report.taken_back, report.pieces["residual_norm"].fused) == (None, 2)
    left_to_norms.clear()
    check_same_as_own(model, probed, "qwen3 moe")
    assert not left_to_norms


def test_no_sums_are_left_where_a_block_does_more_with_them(
    monkeypatch: pytest.MonkeyPatch, left_to_norms: list[ChosenParts]
) -> None:
    block_class = type(mixture_layers(built("mixtral"))[0])
    own = block_class.forward
    monkeypatch.setattr(block_class, "forward", lambda self, x: own(self, x) * 1.5)
    model = built("mixtral")
    probed, report = fused(model)
    assert {why for _, why in report.pieces["expert_sum"].refused} == {"does more than to add up its experts' results"}
    left_to_norms.clear()
    check_same_as_own(model, probed, "mixtral")
    assert not left_to_norms


def test_no_sums_are_left_where_a_forward_was_replaced(left_to_norms: list[ChosenParts]) -> None:
    """As where ranks sum: even if it computes the same for now."""
    model = built("mixtral")
    for block in mixture_layers(model):
        block.forward = block.forward
    probed, report = fused(model)
    assert not report.pieces["expert_sum"].found
    left_to_norms.clear()
    check_same_as_own(model, probed, "mixtral")
    assert not left_to_norms


def test_choices_are_counted_where_norms_do_the_sums(left_to_norms: list[ChosenParts]) -> None:
    """Hooks of a module of experts run as ever."""
    model = built("qwen3 moe")
    probed, _ = fused(model)
    counts = ExpertCounts.of(model, 1, probed.layers[0])
    assert counts is not None
    logits(model, probed)
    assert left_to_norms
    assert (counts.total().sum(1) == NUM_TOKENS * left_to_norms[0].top_k).all()
