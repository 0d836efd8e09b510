"""Between nodes of any numbers of ranks each head of each layer of each block arrives once, at its place, and nothing
else changes: with slots that are few, leases that die and connections that break."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from baton.layout import KvLayout
from baton.node_info import Route
from kv_transfer.parts import Piece, untag
from kv_transfer.ranks import rank_name
from kv_transfer.receiver import PartFailed, PartLanded, PartRefused, PartUnused
from kv_transfer.sender import PartSent, PeerDisconnected
from kv_transfer.transports.memory import MemoryHub, MemoryTransport
from tests.kv_transfer.rank_cases import Case, Contents, carried_by, carried_once, cases, same_bytes, simple_case
from tests.kv_transfer.rank_node import RECEIVERS, SENDERS, Bytes, Pushed, RankNode
from tests.kv_transfer.rig import Rig

LEASE, NEXT_LEASE = 7, 8
MAX_TURNS = 20_000
NEXT_OWNERS = 0x5A
WHEN = st.integers(0, 12)
Act = Callable[[], object]


def routes(case: Case, infos: list[bytes], is_sender: bool) -> list[Route]:
    """From each rank to those of the peer whose slice overlaps with its own, as nodes connect."""
    mine, theirs = (case.p, case.d) if is_sender else (case.d, case.p)
    return [
        Route(rank, peer_rank, infos[peer_rank])
        for (rank, held), (peer_rank, theirs_held) in itertools.product(enumerate(mine.ranks), enumerate(theirs.ranks))
        if held.overlap(theirs_held)
    ]


def check_sent(case: Case, plan: tuple[Piece, ...], pushed: list[Pushed], d: str) -> None:
    """The parts went out once each, and with them each cell, by its first holder."""
    assert sorted(entry.header.part for entry in pushed) == list(range(len(plan)))
    found = []
    for rank, peer, header in pushed:
        piece = plan[header.part]
        assert (rank, peer) == (piece.source, rank_name(d, piece.target))
        assert (header.what, header.num_blocks, header.checked) == (piece.what, piece.num_blocks, case.checked)
        assert not header.drain
        found.append((rank, piece.target, header.what, range(piece.first, piece.first + piece.num_blocks)))
    assert carried_by(case, found) == carried_once(case)


def check_told(
    case: Case, lease: int, plan: tuple[Piece, ...], p: list[Any], d: list[Any], names: tuple[str, str]
) -> None:
    """Each rank says of each of its parts what became of it."""
    sent, landed = set(), set()
    for part, piece in enumerate(plan):
        sent.add(PartSent(rank_name(names[1], piece.target), lease, part))
        landed.add(PartLanded(rank_name(names[0], piece.source), lease, part, case.num_bytes(piece)))
    assert len(p) == len(d) == len(plan)
    assert (set(p), set(d)) == (sent, landed)


class Scene:
    """A case's nodes in this process. The seed decides what happens next: parts are delivered in any order."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.hub = MemoryHub()
        self.rng = random.Random(case.seed)
        self.contents = Contents(case)
        self.names = ("p", "d")
        case.p.require_compatible(case.d, "d")
        case.d.require_compatible(case.p, "p")
        self.p, self.d = self._senders("p"), self._receivers("d")
        self._connect()
        self.plan: tuple[Piece, ...] = ()
        self.credits = self.num_sent = self.num_delivered = 0

    def _senders(self, name: str) -> RankNode:
        return self._node(name, SENDERS, self.case.p, self.contents.p, self.case.p_part_blocks)

    def _receivers(self, name: str) -> RankNode:
        pools = [pool.copy() for pool in self.contents.d]
        return self._node(name, RECEIVERS, self.case.d, pools, self.case.d_part_blocks)

    def _node(
        self, name: str, role: str, layout: KvLayout, pools: list[Bytes], part_blocks: tuple[int, ...]
    ) -> RankNode:
        ranks = itertools.count()
        return RankNode(
            lambda staging, wake: MemoryTransport(self.hub, rank_name(name, next(ranks)), staging, wake),
            *(role, layout, pools, part_blocks),
            num_slots=self.case.num_slots,
            verify=self.case.checked,
        )

    def _connect(self) -> None:
        self.p.connect(self.names[1], routes(self.case, self.d.infos(), is_sender=True))
        self.d.connect(self.names[0], routes(self.case, self.p.infos(), is_sender=False))

    def replace(self, side: str) -> None:
        """The node was lost, and another comes."""
        if side == "p":
            self.names = ("p2", self.names[1])
            self.p = self._senders("p2")
        else:
            self.names = (self.names[0], "d2")
            self.d = self._receivers("d2")
        self._connect()

    def begin(self, lease: int) -> None:
        ours, theirs = self.case.requests(min(self.p.part_blocks(), self.d.part_blocks()))
        self.plan = self.p.begin(self.names[1], lease, ours)
        assert self.plan == self.d.begin(self.names[0], lease, theirs)
        self.credits = self.num_sent = self.num_delivered = 0

    def run(self, lease: int, until: Callable[[], bool] | None = None) -> None:
        """Until all parts are delivered, or `until`. Each turn does something of what could happen."""
        is_done = until or (lambda: self.num_delivered == len(self.plan))
        for _ in range(MAX_TURNS):
            if is_done():
                return
            self.rng.choice(self._acts(lease))()
        raise AssertionError(f"{self.num_sent} of {len(self.plan)} parts are sent, and it does not go on")

    def run_until_delivered(self, num_parts: int, lease: int = LEASE) -> None:
        """So many, but not all."""
        self.begin(lease)
        self.run(lease, lambda: self.credits > 0 and self.num_delivered >= min(num_parts, len(self.plan) - 1))

    def _acts(self, lease: int) -> list[Act]:
        acts: list[Act] = [self.p.poll, self.d.poll]
        if self.credits < len(self.plan):
            acts.append(lambda: self._post(lease))
        if self.num_sent < self.credits:
            acts.append(lambda: self._send(lease))
        return acts + [self.deliver] * min(2, len(self.hub.pending))

    def _post(self, lease: int) -> None:
        self.credits = self.d.post(lease, self.rng.randint(1, 4))

    def _send(self, lease: int) -> None:
        self.num_sent = self.p.send(lease, min(self.credits, self.num_sent + self.rng.randint(1, 4)))

    def _drain(self) -> None:
        self.num_sent = self.p.drain(LEASE, self.credits)

    def deliver(self) -> None:
        self.hub.deliver(self.rng.randrange(len(self.hub.pending)))
        self.num_delivered += 1

    def use_up_credits(self) -> None:
        """P drains what it has not sent, and all is delivered."""
        for _ in range(MAX_TURNS):
            if self.num_delivered == self.credits:
                return
            acts: list[Act] = [self.p.poll, self.d.poll, self._drain]
            self.rng.choice(acts + [self.deliver] * bool(self.hub.pending))()
        raise AssertionError(f"{self.num_sent} of {self.credits} credits are used up, and it does not go on")

    def end_lease(self) -> list[Any]:
        """D ends it, and others write to its blocks. Returns D's events. Just what they say has landed."""
        self.d.withdraw(LEASE)
        told = self.d.events()
        landed = [self.plan[event.part] for event in told if isinstance(event, PartLanded)]
        assert same_bytes(self.d.pools(), self.contents.d_after(landed))
        self.d.fill(self.case.tables()[1], NEXT_OWNERS)
        return told

    def check_unwritten(self) -> None:
        """Since the lease's end."""
        wanted = [pool.copy() for pool in self.contents.d]
        for pool in wanted:
            pool[list(self.case.tables()[1])] = NEXT_OWNERS
        assert same_bytes(self.d.pools(), wanted)

    def check_transfer(self, lease: int) -> None:
        """A whole one: no credit, slot or connection is missing."""
        self.begin(lease)
        wanted = self.contents.d_in_the_end(self.d.pools())
        self.run(lease)
        assert same_bytes(self.d.pools(), wanted)
        check_sent(self.case, self.plan, self.p.pushed(), self.names[1])
        check_told(self.case, lease, self.plan, self.p.events(), self.d.events(), self.names)
        self.check_idle()

    def check_idle(self) -> None:
        self.p.require_idle()
        self.d.require_idle()
        assert same_bytes(self.p.pools(), Contents(self.case).p)


def parts_of(events: list[Any], *kinds: Any) -> list[int]:
    """Of events of these kinds."""
    return sorted(event.part for event in events if isinstance(event, kinds))


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
    _, part = untag(push.tag)
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
@settings(max_examples=500)
@given(cases(), cases(is_checked=True), WHEN, st.sampled_from("pd"), st.integers(0, 23))
def test_many_more(case: Case, checked: Case, when: int, side: str, rank: int) -> None:
    check_arrival(case)
    check_dead_lease(case, when, side)
    check_broken_connection(case, when, side, rank)
    check_damage(checked, when)


# ---- between processes ----


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

    def begin(self, lease: int) -> tuple[Piece, ...]:
        ours, theirs = self.case.requests(min(node.call("part_blocks") for node in (self.p, self.d)))
        plan: tuple[Piece, ...] = self.p.call("begin", self.d.name, lease, ours)
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
        names = self.p.name, self.d.name
        check_told(self.case, lease, plan, self.p.call("events"), self.d.call("events"), names)
        self.check_idle()
        assert same_bytes(self.p.call("pools"), self.contents.p)

    def check_idle(self) -> None:
        for node in (self.p, self.d):
            node.call("require_idle")


def begin_half(pair: Pair) -> tuple[tuple[Piece, ...], int, int]:
    """The plan, the credits granted, and how many of them P has used."""
    plan = pair.begin(LEASE)
    granted = pair.d.call("post_more", LEASE)
    pair.p.call("send_all", LEASE, granted // 2)
    assert 0 < granted // 2 < granted
    return plan, granted, granted // 2


def check_landed(pair: Pair, plan: tuple[Piece, ...], told: list[Any]) -> None:
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
