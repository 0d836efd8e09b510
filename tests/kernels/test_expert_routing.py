"""The choice of experts and the order of what they compute: the kernels agree with the reference."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from baton_kernels.experts import Routing, reference, route, route_rows
from baton_kernels.experts.tiling import max_blocks
from tests.kernels.expert_cases import PLACES, RELATIVE, choices
from tests.kernels.poison import poisoned

torch.set_num_threads(1)

ROUTINGS = [
    Routing(4),
    Routing(3, normalized=True),
    Routing(4, "sigmoid", normalized=True, scale=2.5, epsilon=1e-20),
    Routing(3, "sigmoid"),
    Routing(4, "chosen_softmax"),
    Routing(4, "sigmoid", normalized=True, num_groups=4, top_groups=2),
]


# ---- the choice ----


@pytest.mark.parametrize(("device", "dtype"), PLACES)
@pytest.mark.parametrize("routing", ROUTINGS, ids=str)
def test_routing(routing: Routing, device: str, dtype: torch.dtype) -> None:
    from baton_kernels.experts import routing_kernel

    torch.manual_seed(routing.top_k)
    for num_experts in (32, 20) if routing.num_groups == 1 else (32,):
        logits = torch.stack([torch.randperm(num_experts) for _ in range(5)]).to(device, dtype) * 0.125 - 1  # no ties
        bias = torch.rand(num_experts, device=device) * 0.03 if routing.scores == "sigmoid" else None
        with poisoned():
            weights, ids = routing_kernel.route(logits, routing, bias, dtype)
        expected, expected_ids = reference.route(logits, routing, bias, dtype)
        assert torch.equal(ids, expected_ids)
        torch.testing.assert_close(weights, expected)


@pytest.mark.parametrize(("device", "dtype"), PLACES)
@pytest.mark.parametrize("routing", ROUTINGS[1:4], ids=str)
def test_routing_with_the_routers_product(routing: Routing, device: str, dtype: torch.dtype) -> None:
    """In the type of x, rounded as a matmul's result, or in fp32; twice, as the counters must be zero again."""
    from baton_kernels.experts import routing_kernel

    torch.manual_seed(0)
    router, router_bias = torch.randn(18, 300).to(device, dtype), torch.randn(18).to(device, dtype)
    bias = torch.rand(18, device=device) if routing.scores == "sigmoid" else None
    for number, own in enumerate((None, router_bias)):
        x = torch.randn(3, 400).to(device, dtype)[:, :300]
        with poisoned():
            logits, weights, ids = routing_kernel.route_few(
                x, router, own, routing, bias, torch.float32 if number else dtype, dtype
            )
        expected = torch.nn.functional.linear(x.double(), router.double(), None if own is None else own.double())
        torch.testing.assert_close(
            logits.double(), expected, rtol=2 * RELATIVE[dtype], atol=2e-2 if number == 0 else 1e-4
        )
        found, found_ids = reference.route(logits, routing, bias, dtype)
        assert torch.equal(ids, found_ids)
        torch.testing.assert_close(weights, found)


def test_logits_of_routers_on_a_cpu() -> None:
    x, router, router_bias = torch.randn(3, 8).half(), torch.randn(5, 8).half(), torch.randn(5).half()
    logits, weights, ids = route_rows(x, router, ROUTINGS[1], router_bias=router_bias, in_fp32=True)
    whole = torch.nn.functional.linear(x.float(), router.float(), router_bias.float())
    assert torch.equal(logits, whole)
    for actual, expected in zip((weights, ids), route(whole, ROUTINGS[1]), strict=True):
        assert torch.equal(actual, expected)
    assert route_rows(x, router, ROUTINGS[1])[0].dtype == torch.float16


@pytest.mark.filterwarnings("ignore:invalid value")  # numpy's, in the interpreter
def test_routing_of_nan_names_experts() -> None:
    from baton_kernels.experts import routing_kernel

    _, ids = routing_kernel.route(torch.full((2, 20), float("nan")), Routing(3), None, torch.float32)
    assert ids.min() >= 0
    assert ids.max() < 20


def test_groups_that_the_kernel_cannot_have_are_left_to_torch() -> None:
    from baton_kernels.experts import routing_kernel

    assert routing_kernel.can_group(160, 1)
    assert routing_kernel.can_group(256, 8)
    assert not routing_kernel.can_group(160, 8)
    assert not routing_kernel.can_group(256, 3)


def test_routing_on_a_cpu_is_the_reference() -> None:
    logits = torch.randn(4, 9)
    for actual, expected in zip(
        route(logits, ROUTINGS[1]), reference.route(logits, ROUTINGS[1], None, torch.float32), strict=True
    ):
        assert torch.equal(actual, expected)


# ---- the order ----


def check_aligned(ids: Tensor, slots: Tensor | None, num_experts: int, rows: int) -> None:
    """Each choice that counts is once in a block of its expert, and everything else is padding."""
    from baton_kernels.experts.alignment_kernel import align

    with poisoned():
        blocks = align(ids, slots, num_experts, rows)
    kept = ids if slots is None else ids.masked_fill(slots[:, None] <= 0, num_experts)
    order, expert_of = reference.align(kept, num_experts, rows)
    own_order, own_expert_of, own_count = blocks.arguments
    count = int(own_count)
    assert count == len(expert_of) <= blocks.most
    assert own_expert_of[:count].tolist() == expert_of.tolist()
    assert own_order[: count * rows].tolist() == order.tolist()
    real = order[order < ids.numel()]
    assert sorted(real.tolist()) == (kept.flatten() < num_experts).nonzero()[:, 0].tolist()
    assert (kept.flatten()[real] == expert_of.repeat_interleave(rows)[order < ids.numel()]).all()


@settings(max_examples=15)
@given(st.data())
def test_alignment(data: st.DataObject) -> None:
    """However choices are spread, with choices of no expert, and tokens that are padding."""
    num_experts, top_k = data.draw(st.integers(1, 20)), data.draw(st.integers(1, 3))
    rows = data.draw(st.sampled_from([4, 8, 16]))
    ids = data.draw(st.lists(st.lists(st.integers(0, num_experts), min_size=top_k, max_size=top_k), min_size=1))
    slots = data.draw(st.none() | st.lists(st.integers(-1, 3), min_size=len(ids), max_size=len(ids)))
    check_aligned(torch.tensor(ids), None if slots is None else torch.tensor(slots), num_experts, rows)


@pytest.mark.parametrize(
    ("num_tokens", "device"),
    [(200, "cpu"), (4200, "cpu"), *(pytest.param(n, "cuda", marks=pytest.mark.gpu) for n in (200, 4200, 60_000))],
)
def test_alignment_of_many(num_tokens: int, device: str) -> None:
    """More than a chunk; more than a segment."""
    torch.manual_seed(num_tokens)
    ids, _ = choices(num_tokens, 2, 5, "cpu")
    slots = torch.randint(-1, 9, (num_tokens,))
    check_aligned(ids.to(device), slots.to(device), 5, 16)


def test_all_choices_of_one_expert_and_each_of_another() -> None:
    check_aligned(torch.zeros(40, 1, dtype=torch.int64), None, 7, 8)
    check_aligned(torch.arange(7)[:, None], None, 7, 8)
    assert max_blocks(40, 7, 8) >= 5
    assert max_blocks(7, 7, 8) == 7
