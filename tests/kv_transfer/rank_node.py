"""A node of several ranks, for tests: a mover over a transport for each, their pools, and one side of transfers.

A transfer goes as between real nodes: the receivers grant credits as slots become free, in the order of the plan, and
the senders send parts, or drain them, as far as credits go.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from baton.layout import KvLayout
from baton.node_info import Route
from kv_transfer.async_operation import DONE, AsyncOperation
from kv_transfer.parts import PartHeader, PlannedPart, slot_bytes_for
from kv_transfer.ranks import ReceiverRanks, SenderRanks
from kv_transfer.receiver import KvReceiver
from kv_transfer.sender import KvSender
from kv_transfer.staging import Staging
from kv_transfer.transport import PeerDisconnected
from tests.kv_transfer.rig_node import DEADLINE_S

SENDERS, RECEIVERS = "senders", "receivers"

Bytes = np.ndarray[Any, Any]


class Request(NamedTuple):
    """What of a request travels: the blocks [first, end) of its table, from `grouped_from` on by groups of layers.
    layout, part_blocks: the peer's. table: this node's blocks."""

    layout: KvLayout
    part_blocks: int
    first: int
    end: int
    grouped_from: int
    num_groups: int
    table: tuple[int, ...]
    checked: bool = False


class Pushed(NamedTuple):
    """What a rank handed to its transport, for that rank of a peer."""

    rank: int
    peer: str
    header: PartHeader


class Recording:
    """A transport that keeps what is pushed."""

    def __init__(self, transport: Any, rank: int, pushed: list[Pushed]) -> None:
        self._transport = transport
        self._rank = rank
        self._pushed = pushed

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def push(
        self, peer: str, tag: int, slot: int, num_bytes: int, header: bytes, storing: AsyncOperation = DONE
    ) -> None:
        self._pushed.append(Pushed(self._rank, peer, PartHeader.parse(header)))
        self._transport.push(peer, tag, slot, num_bytes, header, storing)


class _Lease:
    def __init__(self, peer: str, request: Request, plan: tuple[PlannedPart, ...]) -> None:
        self.peer = peer
        self.request = request
        self.plan = plan
        self.num_done = 0  # parts that are expected, or sent, or drained

    def next(self) -> tuple[int, PlannedPart, Sequence[int]]:
        """The next part, its number and its blocks."""
        part = self.plan[self.num_done]
        return self.num_done, part, self.request.table[part.first : part.first + part.num_blocks]


class RankNode:
    """pools: of each rank [num_blocks, bytes of a block there], uint8. part_blocks: of each rank's slots."""

    def __init__(
        self,
        make: Callable[[Staging, Callable[[], None]], Any],
        role: str,
        layout: KvLayout,
        pools: Sequence[Bytes],
        part_blocks: Sequence[int],
        num_slots: int = 4,
        verify: bool = False,
        device: str = "cpu",
        stage: Callable[[int, int, str], Staging] = Staging,
    ) -> None:
        self._woken = threading.Event()
        self._leases: dict[int, _Lease] = {}
        self._pools = [torch.from_numpy(pool).to(device) for pool in pools]
        self._pushed: list[Pushed] = []
        self._events: list[Any] = []
        self.transports: list[Any] = []
        kind: Any = KvSender if role == SENDERS else KvReceiver
        movers: list[Any] = []
        for rank, (pool, most) in enumerate(zip(self._pools, part_blocks, strict=True)):
            staging = stage(num_slots, slot_bytes_for(most, pool.shape[1]), device)
            self.transports.append(Recording(make(staging, self._woken.set), rank, self._pushed))
            movers.append(kind(self.transports[rank], staging, pool, layout, rank, verify=verify))
        self.movers: Any = SenderRanks(movers) if role == SENDERS else ReceiverRanks(movers)

    # ---- connections ----

    def infos(self) -> list[bytes]:
        return [bytes(transport.info()) for transport in self.transports]

    def connect(self, peer: str, routes: Sequence[Route]) -> None:
        self.movers.connect(peer, routes, DEADLINE_S)

    def disconnect(self, peer: str) -> None:
        self.movers.disconnect(peer)

    def close_rank(self, rank: int) -> None:
        """Its transport, as if that rank's process had ended."""
        self.transports[rank].close()

    def close(self) -> None:
        self.movers.close()

    # ---- transfers ----

    def part_blocks(self) -> int:
        return int(self.movers.part_blocks)

    def begin(self, peer: str, lease: int, request: Request) -> tuple[PlannedPart, ...]:
        """The lease's parts."""
        layout, part_blocks, *where = request[:6]
        plan = self.movers.planner(layout, part_blocks).plan(*where)
        self._leases[lease] = _Lease(peer, request, plan)
        return plan

    def post(self, lease: int, at_most: int | None = None) -> int:
        """Expect further parts while slots are free; returns the lease's credits."""
        held = self._leases[lease]
        until = len(held.plan) if at_most is None else min(len(held.plan), held.num_done + at_most)
        marks = self.movers.mark()
        while held.num_done < until:
            number, part, blocks = held.next()
            is_last = all(later.target != part.target for later in held.plan[number + 1 :])
            if not self.movers.expect(held.peer, lease, number, part, blocks, marks, is_last):
                break
            held.num_done += 1
        return held.num_done

    def send(self, lease: int, until: int) -> int:
        """Send parts up to that number while slots are free; returns how many are sent."""
        held = self._leases[lease]
        with self.movers.batched():
            while held.num_done < until:
                number, part, blocks = held.next()
                if not self.movers.send(held.peer, lease, number, part, blocks, held.request.checked):
                    break
                held.num_done += 1
        return held.num_done

    def drain(self, lease: int, until: int) -> int:
        """As `send`, but parts that nobody needs."""
        held = self._leases[lease]
        planner = self.movers.planner(held.request.layout, held.request.part_blocks)
        while held.num_done < until and self.movers.drain(held.peer, lease, held.num_done, planner):
            held.num_done += 1
        return held.num_done

    def withdraw(self, lease: int) -> None:
        self.movers.withdraw(lease)

    # ---- the same, until it is done: for transports with threads of their own ----

    def post_more(self, lease: int) -> int:
        """Wait until the lease has more credits, or all its parts have ended."""
        held = self._leases[lease]
        before, num_parts = held.num_done, len(held.plan)
        self._until(lambda: self.post(lease) > before or self._num_ended(lease) == num_parts)
        return held.num_done

    def send_all(self, lease: int, until: int) -> None:
        self._until(lambda: self.send(lease, until) == until)

    def drain_all(self, lease: int, until: int) -> None:
        self._until(lambda: self.drain(lease, until) == until)

    def wait_ended(self, lease: int, num_parts: int) -> None:
        """Until so many parts have ended, however they did."""
        self._until(lambda: self._num_ended(lease) == num_parts)

    # ---- what happened ----

    def poll(self) -> None:
        self._events += self.movers.poll()

    def events(self) -> list[Any]:
        """Since the last call."""
        self.poll()
        told, self._events = self._events, []
        return told

    def pushed(self) -> list[Pushed]:
        """Since the last call."""
        told = self._pushed[:]
        del self._pushed[: len(told)]
        return told

    def pools(self) -> list[Bytes]:
        return [pool.cpu().numpy() for pool in self._pools]

    def fill(self, blocks: Sequence[int], value: int) -> None:
        """What the blocks' next owner writes, on all ranks."""
        for pool in self._pools:
            pool[list(blocks)] = value

    def require_idle(self) -> None:
        """Every slot is free, in the audit too, and nothing waits for a part."""
        self.movers.check_integrity()
        slots = self.movers.slots()
        assert [entry.slot for entry in slots] == list(range(self.movers.num_slots))
        assert not [entry for entry in slots if entry.state != "free" or entry.peer]
        assert self.movers.num_free_slots == self.movers.num_slots
        assert not any(getattr(mover, "_partial", None) for mover in self.movers.ranks)

    def _num_ended(self, lease: int) -> int:
        return sum(not isinstance(event, PeerDisconnected) and event.lease == lease for event in self._events)

    def _until(self, is_done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while True:
            self._woken.clear()
            self.poll()
            if is_done():
                return
            assert self._woken.wait(max(0.0, deadline - time.monotonic())), f"after {DEADLINE_S} s {self._events}"
