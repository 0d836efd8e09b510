"""What nodes of several ranks should have sent and told, whether they are in one process or in two."""

from __future__ import annotations

import itertools
from typing import Any

from baton.node_info import Route
from kv_transfer.parts import PlannedPart
from kv_transfer.ranks import rank_name
from kv_transfer.receiver import PartLanded
from kv_transfer.sender import PartSent
from tests.kv_transfer.rank_cases import Case, carried_by, carried_once
from tests.kv_transfer.rank_node import Pushed

LEASE, NEXT_LEASE = 7, 8


def routes(case: Case, infos: list[bytes], is_sender: bool) -> list[Route]:
    """From each rank to those of the peer whose slice overlaps with its own, as nodes connect."""
    mine, theirs = (case.p, case.d) if is_sender else (case.d, case.p)
    return [
        Route(rank, peer_rank, infos[peer_rank])
        for (rank, held), (peer_rank, theirs_held) in itertools.product(enumerate(mine.ranks), enumerate(theirs.ranks))
        if held.overlap(theirs_held)
    ]


def check_sent(case: Case, plan: tuple[PlannedPart, ...], pushed: list[Pushed], d: str) -> None:
    """The parts went out once each, and with them each cell, by its first holder."""
    assert sorted(entry.header.part for entry in pushed) == list(range(len(plan)))
    found = []
    for rank, peer, header in pushed:
        part = plan[header.part]
        assert (rank, peer) == (part.source, rank_name(d, part.target))
        assert (header.kv_slice, header.num_blocks, header.checked) == (part.kv_slice, part.num_blocks, case.checked)
        assert not header.drain
        found.append((rank, part.target, header.kv_slice, range(part.first, part.first + part.num_blocks)))
    assert carried_by(case, found) == carried_once(case)


def check_told(
    case: Case, lease: int, plan: tuple[PlannedPart, ...], p: list[Any], d: list[Any], names: tuple[str, str]
) -> None:
    """Each rank says of each of its parts what became of it."""
    sent, landed = set(), set()
    for number, part in enumerate(plan):
        sent.add(PartSent(rank_name(names[1], part.target), lease, number))
        landed.add(PartLanded(rank_name(names[0], part.source), lease, number, case.num_bytes(part)))
    assert len(p) == len(d) == len(plan)
    assert (set(p), set(d)) == (sent, landed)


def parts_of(events: list[Any], *kinds: Any) -> list[int]:
    """Of events of these kinds."""
    return sorted(event.part for event in events if isinstance(event, kinds))
