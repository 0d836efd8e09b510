"""Which expert is in which slot: every expert somewhere, the busiest rank no busier, and few moves."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.model.parallel.expert_placement import (
    MIN_GAIN,
    Load,
    Move,
    Placement,
    balanced,
    first_expert,
    first_placement,
    moves,
    num_replicas,
    rank_loads,
    rebalanced,
)


class Case(NamedTuple):
    load: Load
    num_slots: int
    num_ranks: int


@st.composite
def cases(draw: st.DrawFn, *, divisible: bool = False) -> Case:
    """Any numbers of experts and slots that ranks can have, and any load: equal, skewed or none."""
    num_ranks = draw(st.integers(1, 6))
    num_experts = draw(st.integers(1, 4)) * num_ranks if divisible else draw(st.integers(1, 20))
    least = -(-num_experts // num_ranks)
    size = draw(st.integers(least, max(least, min(num_experts, least + 3))))
    largest = draw(st.sampled_from((0, 3, 1000)))
    load = draw(st.lists(st.integers(0, largest), min_size=num_experts, max_size=num_experts))
    return Case(np.array(load, np.int64), size * num_ranks, num_ranks)


def busiest(placement: Placement, case: Case) -> float:
    return float(rank_loads(placement, case.load, case.num_ranks).max())


def check_whole(placement: Placement, case: Case) -> None:
    assert placement.shape == (case.num_slots,)
    assert placement.dtype == np.int32
    assert set(placement.tolist()) == set(range(len(case.load)))


@given(cases())
def test_every_expert_has_a_slot(case: Case) -> None:
    first = first_placement(len(case.load), case.num_slots, case.num_ranks)
    check_whole(first, case)
    check_whole(balanced(case.load, case.num_slots, case.num_ranks), case)
    check_whole(rebalanced(first, case.load, case.num_ranks), case)


@given(cases())
def test_the_loads_of_ranks_are_all_of_it(case: Case) -> None:
    placement = balanced(case.load, case.num_slots, case.num_ranks)
    assert rank_loads(placement, case.load, case.num_ranks).sum() == pytest.approx(case.load.sum())


@given(cases(divisible=True))
def test_no_rank_is_busier_than_the_busiest_of_an_even_division(case: Case) -> None:
    even = case.load.reshape(case.num_ranks, -1).sum(axis=1).max()
    assert busiest(balanced(case.load, case.num_slots, case.num_ranks), case) <= even + 1e-6


@given(cases())
def test_the_same_load_gives_the_same_placement(case: Case) -> None:
    one, other = (balanced(case.load.copy(), case.num_slots, case.num_ranks) for _ in range(2))
    assert (one == other).all()


@given(cases())
def test_replicas_go_where_one_has_most_to_do(case: Case) -> None:
    """What an expert's replicas would have had to do with one less, no other's have to do now, unless every rank has
    that one."""
    counts = num_replicas(case.load, case.num_slots, case.num_ranks)
    assert counts.sum() == case.num_slots
    assert 1 <= counts.min() <= counts.max() <= case.num_ranks
    most = max((case.load[one] / n for one, n in enumerate(counts) if n < case.num_ranks), default=0)
    assert all(case.load[one] / (n - 1) >= most for one, n in enumerate(counts) if n > 1)


@given(cases(), cases())
def test_experts_move_only_if_it_helps(case: Case, before: Case) -> None:
    """From the first placement, or one for another load."""
    current = first_placement(len(case.load), case.num_slots, case.num_ranks)
    if len(before.load) == len(case.load):
        current = balanced(before.load, case.num_slots, case.num_ranks)
    found = rebalanced(current, case.load, case.num_ranks)
    if (found == current).all():
        best = busiest(balanced(case.load, case.num_slots, case.num_ranks), case)
        assert best > (1 - MIN_GAIN) * busiest(current, case) or not case.load.any()
    else:
        assert busiest(found, case) <= (1 - MIN_GAIN) * busiest(current, case)


def test_the_load_of_one_expert_is_shared() -> None:
    """Twelve slots on four ranks, for eight experts of which one has most of the tokens: all four ranks get it."""
    load = np.array([90, 10, 10, 10, 10, 10, 10, 10], np.int64)
    found = balanced(load, 12, 4)
    assert Counter(found.tolist())[0] == 4
    assert all(0 in rank for rank in found.reshape(4, 3).tolist())
    assert rank_loads(found, load, 4).tolist() == [42.5, 42.5, 37.5, 37.5]


def test_a_greedy_division_may_be_worse_than_the_even_one() -> None:
    """The heaviest first: 3 + 2 + 2 beside 3 + 2 + 0."""
    load = np.array([3, 3, 0, 2, 2, 2], np.int64)
    assert sorted(rank_loads(balanced(load, 6, 2), load, 2)) == [6, 6]


def test_two_replicas_on_one_rank_may_be_the_best() -> None:
    """Of three experts with all of the load, two on one rank each and one on both would be 8 beside 4."""
    load = np.array([4, 4, 4, 0, 0, 0, 0, 0], np.int64)
    assert rank_loads(balanced(load, 10, 2), load, 2).tolist() == [6, 6]


def test_what_can_stay_stays() -> None:
    """Whatever the ranks' numbers are, and the slots': two experts change places."""
    load = np.array([10, 6, 1, 1, 2, 1, 1, 1], np.int64)
    for current in ([0, 1, 2, 3, 4, 5, 6, 7], [5, 4, 7, 6, 3, 0, 1, 2]):
        found = rebalanced(np.array(current, np.int32), load, 2)
        assert sorted(rank_loads(found, load, 2)) == [10, 13]
        assert sorted(found[found != current].tolist()) == [0, 4]


def test_what_does_not_help_does_not_happen() -> None:
    current = np.array([4, 5, 6, 7, 2, 3, 0, 1], np.int32)
    load = np.array([95, 95, 95, 95, 100, 100, 100, 100], np.int64)
    assert busiest(balanced(load, 8, 2), Case(load, 8, 2)) < busiest(current, Case(load, 8, 2))
    assert (rebalanced(current, load, 2) == current).all()


def test_an_expert_comes_from_its_own_rank_if_it_is_there() -> None:
    """Else from those that have it in turn."""
    current, new = (np.array(slots, np.int32) for slots in ([0, 1, 2, 0, 3, 4, 3, 5, 2], [0, 0, 3, 0, 2, 1, 3, 5, 2]))
    assert moves(current, new, 3) == [Move(0, 1), Move(4, 2), Move(2, 4), Move(1, 5)]
    assert moves(current, current, 3) == []


def test_experts_that_cannot_be_divided_evenly() -> None:
    """Neighbours overlap, and so do the last ones."""
    assert first_placement(5, 6, 2).tolist() == [0, 1, 2, 2, 3, 4]
    assert first_placement(8, 12, 4).tolist() == [0, 1, 2, 1, 2, 3, 3, 4, 5, 5, 6, 7]
    assert [first_expert(8, 8, 4, rank) for rank in range(4)] == [0, 2, 4, 6]
    assert first_placement(4, 4, 1).tolist() == [0, 1, 2, 3]
