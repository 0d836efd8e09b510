"""Nodes of several ranks: each rank of the receiver ends with the bytes of what it holds, wherever they came from."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from baton.errors import TransferError
from baton.layout import KvLayout, KvSlice, LayerKv, as_quantized
from baton.node_info import Route
from baton_kernels.fp8_kv import dequantize, elements_of, quantize
from kv_transfer.parts import PartPlanner, slot_bytes_for
from kv_transfer.ranks import ReceiverRanks, SenderRanks, peer_of, rank_name
from kv_transfer.receiver import KvReceiver, PartLanded, PartRefused, PartUnused, PeerDisconnected
from kv_transfer.sender import KvSender, PartSent
from kv_transfer.staging import Staging
from kv_transfer.transports.memory import MemoryHub, MemoryTransport
from tests.kv_transfer.wire import CallWire

NUM_BLOCKS, PART_BLOCKS, NUM_SLOTS = 7, 2, 40
LAYERS = (LayerKv(4, 2, 2, "float32"),) * 3
BLOCK_SIZE, HEAD_DIM = 2, 2
QUANTIZED_BLOCK_SIZE = 8
LEASE = 5

ONE = ()
BY_HEADS = (KvSlice(0, 3, 0, 2), KvSlice(0, 3, 2, 4))
BY_LAYERS = (KvSlice(0, 2, 0, 4), KvSlice(2, 3, 0, 4))
BY_BOTH = tuple(KvSlice(*layers, *heads) for layers in ((0, 1), (1, 3)) for heads in ((0, 1), (1, 4)))


@pytest.fixture(params=[False, True], ids=["in-reach", "remote"], autouse=True)
def _remote(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the last rank of each node is on another host."""
    monkeypatch.setattr(End, "is_remote", request.param)


class End:
    """A node's ranks, their pools, and the model's KV of all blocks, of which each pool has its slice: [num_blocks,
    layers, K and V, heads, block_size, head_dim]."""

    is_remote = False

    def __init__(self, hub: MemoryHub, name: str, ranks: tuple[KvSlice, ...], whole: Tensor) -> None:
        """whole: of bytes, [..., heads, bytes of a head's piece], if the pool is quantized."""
        self.name = name
        quantized = whole.dtype == torch.uint8
        block_size = whole.shape[-1] // (HEAD_DIM + 1) if quantized else whole.shape[-2]
        self.layout = KvLayout(tuple(map(as_quantized, LAYERS)) if quantized else LAYERS, block_size, "f", ranks)
        self.pools = [
            whole[:, held.layer_start : held.layer_end, :, held.head_start : held.head_end].contiguous()
            for held in self.layout.ranks
        ]
        self.transports: list[MemoryTransport] = []
        movers: list[Any] = []
        for rank, pool in enumerate(self.pools):
            pool_bytes = pool.view(NUM_BLOCKS, -1).view(torch.uint8)
            slot_bytes = slot_bytes_for(PART_BLOCKS, pool_bytes.shape[1])
            make_link = partial(self._make_link, hub, rank_name(name, rank))
            kind = KvSender if name == "p" else KvReceiver
            if self.is_remote and rank == len(self.pools) - 1:
                remote = CallWire(pool_bytes, self.layout, make_link).pool
                link = remote.open_link(NUM_SLOTS, slot_bytes, PART_BLOCKS, lambda: None)
                movers.append(kind(link.transport, link.staging, remote, self.layout, rank))
            else:
                staging, transport = make_link(NUM_SLOTS, slot_bytes, lambda: None)
                movers.append(kind(transport, staging, pool_bytes, self.layout, rank))
        self.movers: Any = SenderRanks(movers) if name == "p" else ReceiverRanks(movers)

    def _make_link(
        self, hub: MemoryHub, name: str, num_slots: int, slot_bytes: int, wake: Callable[[], None]
    ) -> tuple[Staging, MemoryTransport]:
        staging = Staging(num_slots, slot_bytes, "cpu")
        self.transports.append(MemoryTransport(hub, name, staging, wake))
        return staging, self.transports[-1]

    def connect(self, other: End) -> None:
        ranks = itertools.product(range(len(self.transports)), range(len(other.transports)))
        self.movers.connect(other.name, [Route(m, t, other.transports[t].info()) for m, t in ranks], 1.0)


def as_bytes(heads: Tensor) -> Tensor:
    """[..., block_size, head_dim] as a quantized pool has it, [..., bytes of a head's piece]."""
    elements, scales = quantize(heads)
    return torch.cat((elements.view(torch.uint8).flatten(-2), scales), dim=-1)


class Pair:
    def __init__(
        self,
        p: tuple[KvSlice, ...],
        d: tuple[KvSlice, ...],
        forms: tuple[bool, bool] = (False, False),
        block_size: int = BLOCK_SIZE,
    ) -> None:
        """forms: whether the pools are quantized."""
        self.hub = MemoryHub()
        shape = (NUM_BLOCKS, len(LAYERS), 2, 4, block_size, HEAD_DIM)
        exact = torch.randn(shape, generator=torch.Generator().manual_seed(1))
        self.whole = as_bytes(exact) if forms[0] else exact
        self.p = End(self.hub, "p", p, self.whole)
        nothing = torch.zeros(shape)
        self.d = End(self.hub, "d", d, as_bytes(nothing) * 0 if forms[1] else nothing)
        self.p.connect(self.d)
        self.d.connect(self.p)
        self.planner = self.p.movers.planner(self.d.layout, PART_BLOCKS)
        assert self.planner.pairs == self.d.movers.planner(self.p.layout, PART_BLOCKS).pairs

    def move(self, sources: list[int], targets: list[int], num_groups: int, checked: bool) -> list[Any]:
        """Blocks of p to blocks of d; what d was told."""
        parts = self.planner.plan(0, len(sources), 1, num_groups)
        marks = self.d.movers.mark()
        for number, piece in enumerate(parts):
            blocks = targets[piece.first : piece.first + piece.num_blocks]
            assert self.d.movers.expect("p", LEASE, number, piece, blocks, marks, number + 1 == len(parts))
        with self.p.movers.batched():
            for number, piece in enumerate(parts):
                blocks = sources[piece.first : piece.first + piece.num_blocks]
                assert self.p.movers.send("d", LEASE, number, piece, blocks, checked)
        self.hub.deliver_all()
        sent = list(self.p.movers.poll())
        assert {(type(event), peer_of(event.peer)) for event in sent} == {(PartSent, "d")}
        assert len(sent) == len(parts)
        self.p.movers.check_integrity()
        return list(self.d.movers.poll())


@pytest.mark.parametrize("checked", [False, True])
@pytest.mark.parametrize("num_groups", [1, 3])
@pytest.mark.parametrize(
    ("p", "d"),
    [
        (ONE, ONE),
        (BY_HEADS, ONE),
        (ONE, BY_HEADS),
        (BY_HEADS, BY_HEADS),
        (BY_LAYERS, ONE),
        (ONE, BY_LAYERS),
        (BY_HEADS, BY_LAYERS),
        (BY_BOTH, BY_HEADS),
        (BY_HEADS * 2, BY_BOTH),
        (BY_LAYERS, BY_HEADS * 2),
    ],
)
def test_each_rank_gets_what_it_holds(
    p: tuple[KvSlice, ...], d: tuple[KvSlice, ...], num_groups: int, checked: bool
) -> None:
    pair = Pair(p, d)
    sources, targets = [6, 1, 3, 2, 5], [2, 4, 1, 6, 3]
    landed = pair.move(sources, targets, num_groups, checked)
    assert {type(event) for event in landed} == {PartLanded}
    want = torch.zeros_like(pair.whole)
    want[targets] = pair.whole[sources]
    for held, pool in zip(pair.d.layout.ranks, pair.d.pools, strict=True):
        assert torch.equal(pool, want[:, held.layer_start : held.layer_end, :, held.head_start : held.head_end])
    num_bytes = len(sources) * sum(map(pair.d.layout.num_bytes, pair.d.layout.ranks))
    assert sum(event.num_bytes for event in landed) == num_bytes
    pair.d.movers.check_integrity()
    assert pair.d.movers.num_free_slots == pair.d.movers.num_slots


@pytest.mark.parametrize("checked", [False, True])
@pytest.mark.parametrize("num_groups", [1, 3])
@pytest.mark.parametrize(("p", "d"), [(ONE, ONE), (BY_HEADS, ONE), (ONE, BY_BOTH), (BY_LAYERS, BY_HEADS)])
@pytest.mark.parametrize("forms", [(False, True), (True, False), (True, True)])
def test_a_pool_that_is_not_quantized_converts(
    forms: tuple[bool, bool], p: tuple[KvSlice, ...], d: tuple[KvSlice, ...], num_groups: int, checked: bool
) -> None:
    pair = Pair(p, d, forms, QUANTIZED_BLOCK_SIZE)
    pair.p.layout.require_compatible(pair.d.layout, "d")
    pair.d.layout.require_compatible(pair.p.layout, "p")
    sources, targets = [6, 1, 3, 2, 5], [2, 4, 1, 6, 3]
    landed = pair.move(sources, targets, num_groups, checked)
    assert {type(event) for event in landed} == {PartLanded}
    sent = pair.whole if forms[0] else as_bytes(pair.whole)
    want = torch.zeros_like(sent)
    want[targets] = sent[sources]
    if not forms[1]:
        elements = elements_of(want, QUANTIZED_BLOCK_SIZE, HEAD_DIM)
        want = dequantize(elements, want[..., QUANTIZED_BLOCK_SIZE * HEAD_DIM :], torch.float32)
    for held, pool in zip(pair.d.layout.ranks, pair.d.pools, strict=True):
        assert torch.equal(pool, want[:, held.layer_start : held.layer_end, :, held.head_start : held.head_end])
    narrow = pair.p.layout.sent(pair.d.layout)
    assert sum(event.num_bytes for event in landed) == len(sources) * narrow.block_bytes
    assert pair.d.movers.num_free_slots == pair.d.movers.num_slots


@pytest.mark.parametrize(("p", "d"), [(BY_HEADS, ONE), (ONE, BY_HEADS)])
def test_checksums_are_of_what_lies_together_at_the_sender(p: tuple[KvSlice, ...], d: tuple[KvSlice, ...]) -> None:
    pair = Pair(p, d)
    (first, *_) = parts = pair.planner.plan(0, 2)
    for number, piece in enumerate(parts):
        assert pair.d.movers.expect("p", LEASE, number, piece, [1, 2], [None] * 2, False)
        assert pair.p.movers.send("d", LEASE, number, piece, [3, 4], checked=True)
    damaged = pair.hub.pending[0].push
    damaged.owner.staging.memory(damaged.slot)[first.num_bytes] ^= 1
    pair.hub.deliver_all()
    told = list(pair.d.movers.poll())
    assert sorted(type(event).__name__ for event in told) == ["PartLanded", "PartRefused"]
    assert pair.d.movers.num_damaged_pieces == 1


def test_a_part_for_another_rank_is_refused() -> None:
    """What the tag names is not believed: the header says which heads these are."""
    pair = Pair(BY_HEADS, ONE)
    mine, other = pair.planner.plan(0, 1)
    assert pair.d.movers.expect("p", LEASE, 0, mine, [1], [None], True)
    assert pair.p.movers.send("d", LEASE, 0, dataclasses.replace(other, source=1), [3], checked=False)
    pair.hub.deliver_all()
    (refused,) = pair.d.movers.poll()
    assert isinstance(refused, PartRefused)
    assert "expected" in refused.error.message
    assert not pair.d.pools[0].any()


def test_credits_are_drained_by_the_rank_that_each_was_meant_for() -> None:
    pair = Pair(BY_HEADS, BY_LAYERS)
    parts = pair.planner.plan(0, 5)
    assert len(parts) == 2 * 4
    for number, piece in enumerate(parts):
        assert pair.d.movers.expect("p", LEASE, number, piece, [1, 2, 3, 4][: piece.num_blocks], [None] * 2, False)
    for number in range(len(parts)):
        assert pair.p.movers.drain("d", LEASE, number, pair.planner)
    pair.hub.deliver_all()
    assert {type(event) for event in pair.d.movers.poll()} == {PartUnused}
    assert pair.d.movers.num_free_slots == pair.d.movers.num_slots


def test_slots_are_numbered_on_from_rank_to_rank_and_name_the_node() -> None:
    pair = Pair(BY_HEADS, ONE)
    for number, piece in enumerate(pair.planner.plan(0, 1)):
        assert pair.p.movers.send("d", LEASE, number, piece, [3], checked=False)
    slots = pair.p.movers.slots()
    assert [slot.slot for slot in slots] == list(range(2 * NUM_SLOTS))
    assert [(slot.slot, slot.peer, slot.part) for slot in slots if slot.lease] == [(0, "d", 0), (NUM_SLOTS, "d", 1)]


def test_a_node_whose_rank_is_lost_is_told_by_its_name_and_cut_off_whole() -> None:
    pair = Pair(BY_HEADS, ONE)
    pair.hub.kill(rank_name("p", 1))
    (lost,) = pair.d.movers.poll()
    assert isinstance(lost, PeerDisconnected)
    assert peer_of(lost.peer) == "p"
    pair.d.movers.disconnect("p")
    assert {type(event) for event in pair.p.movers.ranks[0].poll()} == {PeerDisconnected}, "the rank that lives"
    assert not pair.d.transports[0].links
    pair.d.movers.disconnect("p")  # harmless


def test_what_has_landed_is_told_before_the_loss_of_its_peer_by_another_rank() -> None:
    """All of it may be here: then the peer is no longer needed. Each rank is connected with all of the peer's."""
    pair = Pair(BY_HEADS, BY_HEADS)
    for number, piece in enumerate(pair.planner.plan(0, 1)):
        assert pair.d.movers.expect("p", LEASE, number, piece, [1], [None] * 2, True)
        assert pair.p.movers.send("d", LEASE, number, piece, [3], checked=False)
    pair.hub.deliver_all()
    pair.hub.kill(rank_name("p", 0))
    assert [type(event) for event in pair.d.movers.poll()] == [PartLanded] * 2 + [PeerDisconnected] * 2


def test_all_ranks_of_a_peer_are_cut_off() -> None:
    pair = Pair(BY_HEADS, BY_LAYERS)
    assert [len(transport.links) for transport in pair.d.transports] == [2, 2]
    pair.d.movers.disconnect("p")
    assert not any(transport.links for transport in pair.d.transports + pair.p.transports)


def test_a_peer_whose_rank_cannot_be_reached_is_refused() -> None:
    pair = Pair(BY_HEADS, ONE)
    pair.hub.kill(rank_name("p", 1))
    with pytest.raises(TransferError, match="cannot be reached"):
        pair.d.connect(pair.p)


def test_planners_of_both_ends_agree_when_slots_differ() -> None:
    pair = Pair(BY_BOTH, BY_HEADS)
    ours = pair.p.movers.planner(pair.d.layout, 1).plan(1, 6, 3, 2)
    whole = PartPlanner(pair.p.layout, pair.d.layout, (PART_BLOCKS, 1))
    assert ours == whole.plan(1, 6, 3, 2) != pair.planner.plan(1, 6, 3, 2)
