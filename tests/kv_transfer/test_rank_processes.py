"""Between nodes that are processes of their own, over real transports, what `test_rank_conformance` says of one
process holds as well."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from kv_transfer.parts import PlannedPart
from kv_transfer.ranks import peer_of
from kv_transfer.receiver import PartFailed, PartLanded, PartUnused, PeerDisconnected
from tests.kv_transfer.rank_cases import Case, Contents, same_bytes, simple_case
from tests.kv_transfer.rank_checks import LEASE, NEXT_LEASE, check_sent, check_told, parts_of, routes
from tests.kv_transfer.rank_node import RECEIVERS, SENDERS
from tests.kv_transfer.rig import Rig


class Pair:
    """A case's nodes, each a process, whose ranks have a transport each. The receiver's slots are fewer than parts."""

    def __init__(self, rig: Rig, case: Case) -> None:
        self.rig = rig
        self.case = case
        self.contents = Contents(case)
        options = {"layout": case.d, "pools": self.contents.d, "part_blocks": case.d_part_blocks}
        self.d = rig.node(RECEIVERS, num_slots=case.num_slots, verify=case.checked, **options)
        self.p = self.new_senders()

    def new_senders(self) -> Any:
        options = {"layout": self.case.p, "pools": self.contents.p, "part_blocks": self.case.p_part_blocks}
        p = self.rig.node(SENDERS, num_slots=self.case.num_slots, **options)
        p.call("connect", self.d.name, routes(self.case, self.d.call("infos"), is_sender=True))
        self.d.call("connect", p.name, routes(self.case, p.call("infos"), is_sender=False))
        return p

    def begin(self, lease: int) -> tuple[PlannedPart, ...]:
        ours, theirs = self.case.requests(*[node.call("part_blocks") for node in (self.p, self.d)])
        plan: tuple[PlannedPart, ...] = self.p.call("begin", self.d.name, lease, ours)
        assert plan == self.d.call("begin", self.p.name, lease, theirs)
        return plan

    def check_transfer(self, lease: int) -> None:
        plan, granted = self.begin(lease), 0
        while granted < len(plan):
            granted = self.d.call("post_more", lease)
            self.p.call("send_all", lease, granted)
        for node in (self.d, self.p):
            node.call("wait_ended", lease, len(plan))
        assert same_bytes(self.d.call("pools"), self.contents.d_in_the_end(self.contents.d))
        check_sent(self.case, plan, self.p.call("pushed"), self.d.name)
        told = self.d.call("events")
        # The loss of a rank that the transport noticed before the node let go of it may be told late.
        told = [e for e in told if not (isinstance(e, PeerDisconnected) and peer_of(e.peer) != self.p.name)]
        check_told(self.case, lease, plan, self.p.call("events"), told, (self.p.name, self.d.name))
        self.check_idle()
        assert same_bytes(self.p.call("pools"), self.contents.p)

    def check_idle(self) -> None:
        for node in (self.p, self.d):
            node.call("require_idle")


def begin_half(pair: Pair) -> tuple[tuple[PlannedPart, ...], int, int]:
    """The plan, the credits granted, and how many of them P has used."""
    plan = pair.begin(LEASE)
    granted = pair.d.call("post_more", LEASE)
    pair.p.call("send_all", LEASE, granted // 2)
    assert 0 < granted // 2 < granted
    return plan, granted, granted // 2


def check_landed(pair: Pair, plan: tuple[PlannedPart, ...], told: list[Any]) -> None:
    landed = [plan[event.part] for event in told if isinstance(event, PartLanded)]
    assert same_bytes(pair.d.call("pools"), pair.contents.d_after(landed))


PROCESS_CASES = [
    simple_case((4, 2), (1, 2)),
    simple_case((2, 4), (2, 1), num_heads=2, form=(False, True)),
]
OTHER_PROCESS_CASES = [
    simple_case((p, d), stages, num_heads=2)
    for p, d in itertools.product((1, 2, 4), repeat=2)
    for stages in ((1, 2), (2, 1))
]


@pytest.mark.parametrize(
    "case", [*PROCESS_CASES, *(pytest.param(case, marks=pytest.mark.full) for case in OTHER_PROCESS_CASES)]
)
def test_ranks_of_processes(rank_rig: Rig, case: Case) -> None:
    pair = Pair(rank_rig, case)
    pair.check_transfer(LEASE)


def test_a_lease_dies_between_processes(rank_rig: Rig) -> None:
    pair = Pair(rank_rig, PROCESS_CASES[0])
    plan, granted, num_sent = begin_half(pair)
    pair.d.call("withdraw", LEASE)
    pair.p.call("drain_all", LEASE, granted)
    for node in (pair.d, pair.p):
        node.call("wait_ended", LEASE, granted)
    told = pair.d.call("events")
    assert parts_of(told, PartLanded, PartUnused) == list(range(granted))
    assert set(parts_of(told, PartLanded)) <= set(range(num_sent))
    check_landed(pair, plan, told)
    pair.p.call("events")
    pair.p.call("pushed")
    pair.check_idle()
    pair.check_transfer(NEXT_LEASE)


def test_a_rank_is_lost_between_processes(rank_rig: Rig) -> None:
    rank_rig.cuts = True
    pair = Pair(rank_rig, PROCESS_CASES[0])
    plan, granted, num_sent = begin_half(pair)
    pair.p.call("close_rank", 1)
    pair.d.call("withdraw", LEASE)
    pair.d.call("disconnect", pair.p.name)
    pair.p.call("disconnect", pair.d.name)
    pair.d.call("wait_ended", LEASE, granted)
    pair.p.call("wait_ended", LEASE, num_sent)
    told = pair.d.call("events")
    assert parts_of(told, PartLanded, PartUnused, PartFailed) == list(range(granted))
    check_landed(pair, plan, told)
    pair.check_idle()
    pair.p = pair.new_senders()
    pair.check_transfer(NEXT_LEASE)
