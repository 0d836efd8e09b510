"""Between nodes of any numbers of ranks each head of each layer of each block arrives once, at its place, and nothing
else changes: with slots that are few, leases that die and connections that break."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kv_transfer.parts import PartHeader
from kv_transfer.ranks import rank_name
from kv_transfer.receiver import PartFailed, PartLanded, PartRefused, PartUnused
from kv_transfer.sender import PartSent, PeerDisconnected
from tests.kv_transfer.rank_cases import Case, cases, simple_case
from tests.kv_transfer.rank_checks import LEASE, NEXT_LEASE, parts_of
from tests.kv_transfer.rank_scene import Scene

WHEN = st.integers(0, 12)

# ---- all of it arrives ----

GROUPS = ((0, 2), (1, 3), (4,))
"""Which stages divide differently: the first of three has one layer each of two groups, the last one of the third."""


def check_arrival(case: Case) -> None:
    scene = Scene(case)
    scene.check_transfer(LEASE)


@given(cases())
@example(simple_case((1, 2), (1, 1), form=(False, True), width=1))  # quantized, a head has as many bytes
@example(simple_case((1, 1), (3, 1), groups=GROUPS))
@example(simple_case((2, 1), (2, 1), groups=GROUPS, form=(True, False)))
@example(simple_case((1, 2), (2, 3), groups=GROUPS, form=(False, True)))
def test_each_head_of_each_layer_of_each_block_arrives_once_at_its_place(case: Case) -> None:
    check_arrival(case)


@pytest.mark.parametrize("num_heads", [2, pytest.param(4, marks=pytest.mark.full)])
@pytest.mark.parametrize("stages", list(itertools.product((1, 2), repeat=2)))
@pytest.mark.parametrize("degrees", list(itertools.product((1, 2, 4), repeat=2)))
def test_any_degrees(degrees: tuple[int, int], stages: tuple[int, int], num_heads: int) -> None:
    """With two heads, each is held by two of four ranks."""
    check_arrival(simple_case(degrees, stages, num_heads))


# ---- leases die, connections break, bytes are damaged ----


def check_dead_lease(case: Case, num_parts: int, who_is_first: str) -> None:
    scene = Scene(case)
    scene.run_until_delivered(num_parts)
    told = []
    if who_is_first == "p":
        scene.use_up_credits()
        told += scene.end_lease()
        assert not scene.d.events()
    else:
        told += scene.end_lease()
        scene.use_up_credits()
        late = scene.d.events()
        assert {type(event) for event in late} <= {PartUnused}
        told += late
    scene.check_unwritten()
    assert parts_of(told, PartLanded, PartUnused) == list(range(scene.credits))
    assert parts_of(scene.p.events(), PartSent) == list(range(scene.credits))
    pushed = {entry.header.part: entry for entry in scene.p.pushed()}
    assert sorted(pushed) == list(range(scene.credits))
    for part, (rank, peer, _) in pushed.items():
        assert (rank, peer) == (scene.plan[part].source, rank_name("d", scene.plan[part].target))
    scene.check_idle()
    scene.check_transfer(NEXT_LEASE)


@settings(max_examples=20)
@given(cases(), WHEN, st.sampled_from("pd"))
@example(simple_case((1, 4), (1, 1)), 2, "d")
def test_nothing_lands_of_a_lease_that_died_and_its_credits_are_used_up(case: Case, when: int, first: str) -> None:
    """P gives up and drains its credits before D hears of it, or D ends the lease with parts under way."""
    check_dead_lease(case, when, first)


def check_broken_connection(case: Case, num_parts: int, side: str, rank: int) -> None:
    scene = Scene(case)
    scene.run_until_delivered(num_parts)
    lost = rank_name(side, rank % len((case.p if side == "p" else case.d).ranks))
    scene.hub.kill(lost)
    told = scene.end_lease()
    for node, peer in scene.rng.sample([(scene.p, "d"), (scene.d, "p")], 2):
        node.disconnect(peer)
    assert not scene.hub.pending
    told += scene.d.events()
    scene.check_unwritten()
    assert parts_of(told, PartLanded, PartFailed) == list(range(scene.credits))
    sent = scene.p.events()
    assert parts_of(sent, PartSent, PartFailed) == list(range(scene.num_sent))
    heard = told if side == "p" else sent
    assert lost in {event.peer for event in heard if isinstance(event, PeerDisconnected)}
    scene.check_idle()
    scene.p.pushed()
    scene.replace(side)
    scene.check_transfer(NEXT_LEASE)


@settings(max_examples=20)
@given(cases(), WHEN, st.sampled_from("pd"), st.integers(0, 23))
def test_nothing_is_written_once_the_connection_of_a_rank_broke(case: Case, when: int, side: str, rank: int) -> None:
    check_broken_connection(case, when, side, rank)


def check_damage(case: Case, num_parts: int) -> None:
    scene = Scene(case)
    scene.run_until_delivered(num_parts)
    scene.run(LEASE, lambda: bool(scene.hub.pending))
    push = scene.hub.pending[0].push
    part = PartHeader.parse(push.header).part
    piece = scene.plan[part]
    if not case.num_bytes(piece):
        return  # no block has a layer in the slice
    byte = scene.rng.randrange(case.num_bytes(piece))
    push.owner.staging.memory(push.slot)[byte] ^= 1 << scene.rng.randrange(8)
    scene.hub.deliver(0)
    scene.num_delivered += 1
    told = scene.end_lease()
    (refused,) = (event for event in told if isinstance(event, PartRefused))
    assert (refused.peer, refused.part) == (rank_name("p", piece.source), part)
    assert [mover.num_damaged_pieces for mover in scene.d.movers.ranks] == [
        int(rank == piece.target) for rank in range(len(case.d.ranks))
    ]
    scene.use_up_credits()
    scene.check_unwritten()
    told += scene.d.events()
    assert parts_of(told, PartLanded, PartUnused, PartRefused) == list(range(scene.credits))
    scene.p.events()
    scene.p.pushed()
    scene.check_idle()
    scene.check_transfer(NEXT_LEASE)


@settings(max_examples=15)
@given(cases(is_checked=True), WHEN)
def test_a_damaged_bit_is_refused_by_the_rank_that_it_was_meant_for(case: Case, when: int) -> None:
    check_damage(case, when)


@pytest.mark.full
@pytest.mark.timeout(600)
@settings(max_examples=500)
@given(cases(), cases(is_checked=True), WHEN, st.sampled_from("pd"), st.integers(0, 23))
def test_many_more(case: Case, checked: Case, when: int, side: str, rank: int) -> None:
    check_arrival(case)
    check_dead_lease(case, when, side)
    check_broken_connection(case, when, side, rank)
    check_damage(checked, when)
