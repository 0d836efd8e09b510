"""The router's index of KV blocks, held against sets of each node's blocks under random events."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from baton.errors import InvalidRequest
from baton.messages import KvEvents
from router.placement.prefix_index import PrefixIndex
from tests.machines import machine

NODES = ("p1", "p2", "d1")
MANY = 1000


def block(number: int) -> bytes:
    return number.to_bytes(32, "little")


def blocks(*numbers: int) -> tuple[bytes, ...]:
    return tuple(map(block, numbers))


def leading(held: set[bytes], wanted: tuple[bytes, ...]) -> int:
    """How many of the wanted blocks come before the first one that is not held."""
    return next((i for i, one in enumerate(wanted) if one not in held), len(wanted))


some_blocks = st.lists(st.integers(0, 11), max_size=6).map(lambda numbers: blocks(*numbers))
node = st.sampled_from(NODES)


class IndexMachine(RuleBasedStateMachine):
    """`held`: what each node that is up holds; None: it lacks a snapshot."""

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex()
        self.held: dict[str, set[bytes] | None] = {}
        self.next: dict[str, int] = {}

    @rule(name=node)
    def node_comes(self, name: str) -> None:
        """Perhaps anew, before its end was noticed."""
        self.index.add(name, MANY)
        self.held[name] = None

    @rule(name=node)
    def node_goes(self, name: str) -> None:
        self.index.forget(name)
        self.held.pop(name, None)

    @rule(name=node, stored=some_blocks, sequence=st.integers(0, 2**64 - 1))
    def snapshot(self, name: str, stored: tuple[bytes, ...], sequence: int) -> None:
        self.index.apply(name, KvEvents(sequence, stored, snapshot=True))
        if name in self.held:
            self.held[name], self.next[name] = set(stored), sequence + 1

    @rule(name=node, stored=some_blocks, removed=some_blocks)
    def change(self, name: str, stored: tuple[bytes, ...], removed: tuple[bytes, ...]) -> None:
        held = self.held.get(name)
        if held is not None:
            self.index.apply(name, KvEvents(self.next[name], stored, removed))
            self.held[name] = held - set(removed) | set(stored)
            self.next[name] += 1

    @precondition(lambda self: self.held)
    @rule(data=st.data(), off=st.sampled_from([-1, 1, 2**40]), stored=some_blocks)
    def gap(self, data: st.DataObject, off: int, stored: tuple[bytes, ...]) -> None:
        name = data.draw(st.sampled_from(sorted(self.held)))
        with pytest.raises(InvalidRequest, match="KV events: number"):
            self.index.apply(name, KvEvents(max(0, self.next.get(name, 0) + off), stored))
        self.held[name] = None

    @rule(wanted=some_blocks)
    def look_up(self, wanted: tuple[bytes, ...]) -> None:
        expected = {name: leading(held or set(), wanted) for name, held in self.held.items()}
        assert self.index.held(wanted) == {name: number for name, number in expected.items() if number}

    @invariant()
    def counts_agree(self) -> None:
        assert len(self.index) == len(set[bytes]().union(*(held or () for held in self.held.values())))
        for name in NODES:
            assert self.index.num_blocks(name) == len(self.held.get(name) or ())


TestIndex = IndexMachine.TestCase
TestIndex.settings = machine(max_examples=25, steps=30)


@pytest.fixture
def index() -> PrefixIndex:
    index = PrefixIndex()
    for name in NODES:
        index.add(name, 8)
    return index


def test_a_hole_ends_the_prefix(index):
    index.apply("p1", KvEvents(0, blocks(1, 2, 3, 4), snapshot=True))
    index.apply("d1", KvEvents(0, blocks(1, 2, 4), snapshot=True))
    index.apply("p2", KvEvents(0, blocks(2, 3, 4), snapshot=True))
    assert index.held(blocks(1, 2, 3, 4)) == {"p1": 4, "d1": 2}
    assert index.held(blocks(2, 3, 9)) == {"p1": 2, "d1": 1, "p2": 2}
    assert index.held(()) == {}


def test_a_node_cannot_hold_more_than_it_has(index):
    index.apply("p1", KvEvents(0, blocks(*range(20)), snapshot=True))
    assert index.num_blocks("p1") == 8
    index.apply("p1", KvEvents(1, blocks(30), blocks(0)))  # it has room again
    assert index.held(blocks(30)) == {"p1": 1}
    index.apply("p1", KvEvents(2, blocks(31)))
    assert index.held(blocks(31)) == {}


def test_all_nodes_together_cannot_fill_the_router():
    index = PrefixIndex(max_blocks=3)
    for name in NODES:
        index.add(name, 8)
    index.apply("p1", KvEvents(0, blocks(1, 2, 3, 4), snapshot=True))
    index.apply("d1", KvEvents(0, blocks(2, 5), snapshot=True))  # the first is there already
    assert len(index) == 3
    assert (index.num_blocks("p1"), index.num_blocks("d1")) == (3, 1)


def test_what_comes_and_goes_leaves_nothing_behind(index):
    index.apply("p1", KvEvents(0, snapshot=True))
    for number in range(1, 4001):
        index.apply("p1", KvEvents(number, blocks(number), blocks(number - 1)))
    assert index.num_blocks("p1") == len(index) == 1
    assert len(index._holders["p1"].stored) < 2000
    index.forget("p1")
    assert len(index) == 0


def test_many_nodes_that_come_and_go_share_a_few_bits(index):
    for number in range(200):
        index.add(f"d{number}", 8)
        index.apply(f"d{number}", KvEvents(0, blocks(1), snapshot=True))
        index.forget(f"d{number - 3}")
    assert max(holder.bit for holder in index._holders.values()) < 2**8
    assert index.held(blocks(1)) == dict.fromkeys(("d197", "d198", "d199"), 1)
