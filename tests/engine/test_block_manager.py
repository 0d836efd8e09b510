"""The block manager under random operations, each followed by a recount of everything, and its rules one by one."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from baton.errors import CacheExhausted
from engine.block_manager import BlockManager, BlockState
from tests.machines import machine

BLOCK_SIZE = 4


def name(number: int) -> bytes:
    return number.to_bytes(32, "little")


class BlockManagerMachine(RuleBasedStateMachine):
    """Keeps its own account of tables, pins and the cache's content, and compares."""

    @initialize(num_blocks=st.integers(2, 12))
    def start(self, num_blocks: int) -> None:
        self.blocks = BlockManager(num_blocks, BLOCK_SIZE)
        self.tables: list[list[int]] = []
        self.readers: list[int] = []
        self.writers: list[int] = []
        self.heard: set[bytes] | None = None
        self.states = dict.fromkeys(range(1, num_blocks), (BlockState.FREE, 0.0))  # and since when

    def holders(self, block: int) -> int:
        return sum(table.count(block) for table in self.tables)

    @rule(n=st.integers(0, 5))
    def allocate(self, n: int) -> None:
        room = self.blocks.num_free + self.blocks.num_cached
        if n > room:
            with pytest.raises(CacheExhausted):
                self.blocks.allocate(n)
        else:
            before = self.blocks.num_free
            got = self.blocks.allocate(n)
            assert len(set(got)) == n
            assert self.blocks.num_free == max(0, before - n), "free blocks go before cached ones"
            self.tables.append(got)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.blocks.release(self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1))))

    @precondition(lambda self: any(self.tables))
    @rule(data=st.data(), number=st.integers(0, 5))
    def seal(self, data: st.DataObject, number: int) -> None:
        block = data.draw(st.sampled_from([b for table in self.tables for b in table]))
        if block in self.writers or self.blocks.hash_of(block) is not None:
            return
        taken = bool(self.blocks.match([name(number)])) or any(
            self.blocks.hash_of(b) == name(number) for b in range(1, self.blocks.num_total + 1)
        )
        assert self.blocks.seal(block, name(number)) is not taken

    @rule(numbers=st.lists(st.integers(0, 5), min_size=1, max_size=3))
    def acquire(self, numbers: list[int]) -> None:
        hits = self.blocks.match([name(n) for n in numbers])
        for block, number in zip(hits, numbers, strict=False):
            assert self.blocks.hash_of(block) == name(number)
            assert self.blocks.state(block) is not BlockState.IN_FLIGHT
        self.blocks.acquire(hits)
        self.tables.append(hits)

    @precondition(lambda self: any(self.tables))
    @rule(data=st.data())
    def pin_read(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from([b for table in self.tables for b in table]))
        if block not in self.writers:
            self.blocks.pin_read([block])
            self.readers.append(block)

    @precondition(lambda self: self.readers)
    @rule(data=st.data())
    def unpin_read(self, data: st.DataObject) -> None:
        block = self.readers.pop(data.draw(st.integers(0, len(self.readers) - 1)))
        self.blocks.unpin_read([block])

    @precondition(lambda self: any(self.tables))
    @rule(data=st.data())
    def pin_write(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from([b for table in self.tables for b in table]))
        sole = self.holders(block) == 1 and self.blocks.hash_of(block) is None
        if sole and block not in self.readers + self.writers:
            self.blocks.pin_write([block])
            self.writers.append(block)

    @precondition(lambda self: self.writers)
    @rule()
    def unpin_write(self) -> None:
        self.blocks.unpin_write([self.writers.pop()])

    @rule(num_forks=st.integers(1, 3), num_full=st.integers(0, 2), partial=st.integers(0, BLOCK_SIZE - 1))
    def fork(self, num_forks: int, num_full: int, partial: int) -> None:
        if not self.blocks.can_allocate(num_full + num_forks):
            return
        table, spares = self.blocks.allocate(num_full + 1), self.blocks.allocate(num_forks - 1)
        tables, copies = self.blocks.fork(table, num_full * BLOCK_SIZE + partial, spares)
        assert len(tables) == num_forks
        assert {own[-1] for own in tables} == {table[-1], *spares}
        assert all(own[:-1] == table[:-1] for own in tables)
        assert copies == ([(table[-1], spare) for spare in spares] if partial else [])
        self.tables += tables

    @rule()
    def take_events(self) -> None:
        events = self.blocks.take_events()
        assert not set(events.stored) & set(events.removed)
        self.heard = (self.heard or set()) - set(events.removed) | set(events.stored)
        assert self.heard == set(self.blocks._block_of)

    @invariant()
    def whole(self) -> None:
        if hasattr(self, "blocks"):
            self.blocks.check_integrity(self.tables, [self.readers], [self.writers])
            self.check_ages()

    def check_ages(self) -> None:
        """A block's age is that of its state; a block may have been evicted and taken again at once."""
        now = self.blocks.now
        for block, (before, since) in self.states.items():
            state = self.blocks.state(block)
            fresh = state is not before or self.blocks.since_s(block) == now
            self.states[block] = state, now if fresh else since
            if state is not BlockState.FREE:
                assert self.blocks.since_s(block) == self.states[block][1]
        self.blocks.now += 1

    def teardown(self) -> None:
        if not hasattr(self, "blocks"):
            return
        for table in self.tables:
            self.blocks.release(table)
        self.blocks.unpin_read(self.readers)
        self.blocks.unpin_write(self.writers)
        assert self.blocks.num_free + self.blocks.num_cached == self.blocks.num_total


BlockManagerMachine.TestCase.settings = machine(max_examples=150, steps=40)
TestBlockManager = BlockManagerMachine.TestCase


def test_the_leaves_of_the_least_recently_used_prefix_are_evicted_first() -> None:
    blocks = BlockManager(7, BLOCK_SIZE)
    old, new = blocks.allocate(3), blocks.allocate(3)
    for number, block in enumerate(old + new):
        blocks.seal(block, name(number))
    blocks.release(old)
    blocks.release(new)
    assert [blocks.allocate(1)[0] for _ in range(6)] == old[::-1] + new[::-1]


def test_a_hit_makes_a_block_recently_used() -> None:
    blocks = BlockManager(3, BLOCK_SIZE)
    for number in (0, 1):
        (block,) = blocks.allocate(1)
        blocks.seal(block, name(number))
        blocks.release([block])
    hit = blocks.match([name(0)])
    blocks.acquire(hit)
    blocks.release(hit)
    blocks.allocate(1)
    assert blocks.match([name(0)])
    assert not blocks.match([name(1)])


def test_the_first_to_seal_wins_and_a_duplicate_becomes_free() -> None:
    blocks = BlockManager(3, BLOCK_SIZE)
    first, second = blocks.allocate(2)
    assert blocks.seal(first, name(1))
    assert not blocks.seal(second, name(1))
    assert blocks.match([name(1)]) == [first]
    blocks.release([first, second])
    assert (blocks.state(first), blocks.state(second)) == (BlockState.CACHED, BlockState.FREE)


def test_a_block_in_flight_is_no_hit_and_settles_with_its_last_pin() -> None:
    blocks = BlockManager(2, BLOCK_SIZE)
    (block,) = blocks.allocate(1)
    blocks.seal(block, name(1))
    blocks.pin_read([block, block])
    blocks.release([block])
    for _ in range(2):
        assert blocks.state(block) is BlockState.IN_FLIGHT
        assert not blocks.match([name(1)])
        assert not blocks.can_allocate(1)
        blocks.unpin_read([block])
    assert blocks.state(block) is BlockState.CACHED


def test_a_write_whose_owner_let_go_ends_in_a_free_block() -> None:
    blocks = BlockManager(2, BLOCK_SIZE)
    (block,) = blocks.allocate(1)
    blocks.pin_write([block])
    blocks.release([block])
    assert not blocks.can_allocate(1)
    blocks.unpin_write([block])
    assert blocks.state(block) is BlockState.FREE


def test_blocks_to_be_acquired_do_not_count_as_room() -> None:
    blocks = BlockManager(3, BLOCK_SIZE)
    table = blocks.allocate(1)
    blocks.seal(table[0], name(1))
    blocks.release(table)
    assert blocks.can_allocate(2)
    assert not blocks.can_allocate(2, keep=table)
    assert blocks.can_allocate(1, keep=table)


def test_events_are_net_and_the_first_call_tells_all() -> None:
    blocks = BlockManager(2, BLOCK_SIZE)
    table = blocks.allocate(1)
    blocks.seal(table[0], name(1))
    assert blocks.take_events().stored == [name(1)]
    assert blocks.take_events().stored == []
    blocks.release(table)
    table = blocks.allocate(1)
    blocks.seal(table[0], name(2))
    events = blocks.take_events()
    assert (events.stored, events.removed) == ([name(2)], [name(1)])


@pytest.mark.parametrize(
    "misuse",
    [
        lambda blocks, block: blocks.release([block, block]),
        lambda blocks, block: blocks.acquire([block]),
        lambda blocks, block: (blocks.seal(block, name(1)), blocks.pin_write([block])),
        lambda blocks, block: (blocks.pin_write([block]), blocks.seal(block, name(1))),
        lambda blocks, block: (blocks.pin_write([block]), blocks.pin_read([block])),
        lambda blocks, block: (blocks.pin_read([block]), blocks.pin_write([block])),
        lambda blocks, block: blocks.unpin_read([block]),
        lambda blocks, block: blocks.check_integrity([]),
        lambda blocks, block: blocks.check_integrity([[block]], read=[[block]]),
    ],
)
def test_misuse_is_caught(misuse) -> None:
    blocks = BlockManager(3, BLOCK_SIZE)
    (block,) = blocks.allocate(1)
    with pytest.raises(AssertionError):
        misuse(blocks, block)


def test_a_prefix_that_somebody_owns_takes_nothing_from_what_can_be_allocated() -> None:
    """It is not among the blocks that could be evicted, so keeping it costs none."""
    blocks = BlockManager(6, BLOCK_SIZE)
    table = blocks.allocate(3)
    for i, block in enumerate(table):
        blocks.seal(block, name(i))
    assert blocks.can_allocate(2, keep=table)
    blocks.release(table[2:])
    assert blocks.can_allocate(2, keep=table)
    assert blocks.can_allocate(3, keep=table[:2])
    assert not blocks.can_allocate(3, keep=table)
    blocks.acquire(table)
    assert len(blocks.allocate(2)) == 2
