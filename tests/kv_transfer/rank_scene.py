"""Two nodes of several ranks in one process, where a seed decides what happens next."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

from baton.layout import KvLayout
from kv_transfer.parts import PlannedPart
from kv_transfer.ranks import rank_name
from kv_transfer.receiver import PartLanded
from kv_transfer.transports.memory import MemoryHub, MemoryTransport
from tests.kv_transfer.rank_cases import Case, Contents, same_bytes
from tests.kv_transfer.rank_checks import LEASE, check_sent, check_told, routes
from tests.kv_transfer.rank_node import RECEIVERS, SENDERS, Bytes, RankNode

MAX_TURNS = 20_000
NEXT_OWNERS = 0x5A
Act = Callable[[], object]


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
        self.plan: tuple[PlannedPart, ...] = ()
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
        ours, theirs = self.case.requests(self.p.part_blocks(), self.d.part_blocks())
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
