"""Groups a node's movers: one sender or one receiver per rank.

All ranks hold the same blocks under the same numbers, each its own slice of them (`KvLayout.ranks`). A part goes from
one rank of a node to one rank of another; all parts of a request form one plan (`PartPlanner`) under one lease.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Generic, TypeVar

from baton.audit import KvSlot
from baton.layout import KvLayout
from baton.node_info import Route
from kv_transfer.copies import Mark
from kv_transfer.mover import KvMover
from kv_transfer.parts import PartPlanner, PlannedPart
from kv_transfer.receiver import KvReceiver, PeerDisconnected, ReceiverEvent
from kv_transfer.sender import KvSender, SenderEvent

Mover = TypeVar("Mover", bound=KvMover)


def rank_name(peer: str, rank: int) -> str:
    """The name of another node's rank in transports and in movers' events."""
    return f"{peer}/{rank}"


def peer_of(name: str) -> str:
    """The node of the rank with that name."""
    return name.rpartition("/")[0]


class _Ranks(Generic[Mover]):
    """ranks: in rank order. Engine's thread only, except `connect`, `disconnect` and `close`, which any thread may
    call."""

    def __init__(self, ranks: Sequence[Mover]) -> None:
        self.ranks = tuple(ranks)
        self.layout: KvLayout = ranks[0].layout
        assert [mover.rank for mover in ranks] == list(range(len(self.layout.ranks)))
        self.verify = ranks[0].verify
        self.num_slots = sum(mover.num_slots for mover in ranks)
        self.part_blocks = min(mover.part_blocks for mover in ranks)
        """The smallest `KvMover.part_blocks` of all ranks."""
        self._connected: dict[str, Sequence[Route]] = {}

    def connect(self, peer: str, routes: Sequence[Route], timeout_s: float) -> None:
        """Connect ranks of this node with ranks of another. Raises TransferError; some ranks may then be connected, so
        call `disconnect`."""
        self._connected[peer] = routes
        deadline = time.monotonic() + timeout_s
        for route in routes:
            left_s = max(0.0, deadline - time.monotonic())
            self.ranks[route.rank].transport.connect(rank_name(peer, route.peer_rank), route.address, left_s)

    def disconnect(self, peer: str) -> None:
        """Does nothing for a peer that is not connected."""
        for route in self._connected.pop(peer, ()):
            self.ranks[route.rank].transport.disconnect(rank_name(peer, route.peer_rank))

    def close(self) -> None:
        """End all transfers and threads."""
        for mover in self.ranks:
            mover.transport.close()

    def slots(self) -> list[KvSlot]:
        """For the audit: the slots of all ranks, numbered consecutively."""
        entries = chain.from_iterable(mover.slots() for mover in self.ranks)
        return [dataclasses.replace(entry, slot=slot, peer=peer_of(entry.peer)) for slot, entry in enumerate(entries)]

    def warm_up(self) -> None:
        """Compile the GPU kernels that parts need. Call once, before the first part."""
        for mover in self.ranks:
            mover.warm_up()

    @contextlib.contextmanager
    def batched(self) -> Iterator[None]:
        """See KvMover."""
        with contextlib.ExitStack() as stack:
            for mover in self.ranks:
                stack.enter_context(mover.batched())
            yield

    @property
    def num_free_slots(self) -> int:
        """The sum over all ranks. On any thread."""
        return sum(mover.num_free_slots for mover in self.ranks)

    def check_integrity(self) -> None:
        for mover in self.ranks:
            mover.check_integrity()


class SenderRanks(_Ranks[KvSender]):
    """The senders of a prefill node."""

    def planner(self, receiver: KvLayout, part_blocks: int) -> PartPlanner:
        """The planner for parts to a node of that layout and with such slots."""
        return PartPlanner(self.layout, receiver, (self.part_blocks, part_blocks), self.layout)

    def send(self, peer: str, lease: int, number: int, part: PlannedPart, blocks: Sequence[int], checked: bool) -> bool:
        """Send the part of that number from these blocks. See KvSender."""
        name = rank_name(peer, part.target)
        return self.ranks[part.source].send(
            name, lease, number, blocks, part.kv_slice, checked, part.layers, part.groups
        )

    def drain(self, peer: str, lease: int, part: int, planner: PartPlanner) -> bool:
        """See KvSender. planner: the one for that peer."""
        pair = planner.pair_of(part)
        return self.ranks[pair.source].drain(rank_name(peer, pair.target), lease, part)

    def poll(self) -> Iterable[SenderEvent]:
        """Events of all ranks since the last call; peers are named by `rank_name`."""
        return chain.from_iterable([mover.poll() for mover in self.ranks])


class ReceiverRanks(_Ranks[KvReceiver]):
    """The receivers of a decode node."""

    def planner(self, sender: KvLayout, part_blocks: int) -> PartPlanner:
        """The planner for parts from a node of that layout and with such slots."""
        return PartPlanner(sender, self.layout, (part_blocks, self.part_blocks), self.layout)

    @property
    def num_freed_slots(self) -> int:
        """The sum over all ranks. See KvReceiver."""
        return sum(mover.num_freed_slots for mover in self.ranks)

    @property
    def num_damaged_pieces(self) -> int:
        return sum(mover.num_damaged_pieces for mover in self.ranks)

    def mark(self) -> list[Mark]:
        """All work queued so far on each rank's device. See KvReceiver."""
        return [mover.mark() for mover in self.ranks]

    def expect(
        self,
        peer: str,
        lease: int,
        number: int,
        part: PlannedPart,
        blocks: Sequence[int],
        not_before: Sequence[Mark],
        is_last: bool,
        uploads: bool = True,
    ) -> bool:
        """Expect the part of that number in these blocks. is_last: no later part goes to the same rank. See
        KvReceiver."""
        name = rank_name(peer, part.source)
        mover = self.ranks[part.target]
        mark = not_before[part.target]
        return mover.expect(
            name, lease, number, blocks, part.kv_slice, mark, is_last, part.layers, part.groups, uploads
        )

    def polls_soon(self, soon: bool) -> None:
        """See KvReceiver."""
        for mover in self.ranks:
            mover.polls_soon(soon)

    def withdraw(self, lease: int) -> None:
        """See KvReceiver."""
        for mover in self.ranks:
            mover.withdraw(lease)

    def poll(self) -> Iterable[ReceiverEvent]:
        """Events of all ranks since the last call; peers are named by `rank_name`. The loss of a peer by one rank comes
        after what has landed on the others."""
        events = chain.from_iterable([mover.poll() for mover in self.ranks])
        return sorted(events, key=lambda event: isinstance(event, PeerDisconnected))
