"""The block manager under random operations, each followed by a recount of everything, and its rules one by one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from baton.errors import CacheExhausted
from engine.block_manager import NULL_BLOCK, BlockManager, BlockState
from tests.machines import machine


def hash_of(number: int) -> bytes:
    return number.to_bytes(32, "little")


class BlockManagerMachine(RuleBasedStateMachine):
    """Keeps its own account of tables, pins, loads and the cache's content, and compares."""

    @initialize(num_blocks=st.integers(2, 12))
    def start(self, num_blocks: int) -> None:
        self.blocks = BlockManager(num_blocks)
        self.tables: list[list[int]] = []
        self.num_claimed = 0
        self.readers: list[int] = []
        self.loads: dict[int, bytes | None] = {}  # what each block is being loaded as, if anybody may know
        self.cached: dict[bytes, int] = {}  # all hashes
        self.states = dict.fromkeys(range(1, num_blocks), (BlockState.FREE, 0.0))  # and since when
        self.followed: set[bytes] | None = None  # the hashes, by a snapshot and all changes since

    def holders(self, block: int) -> int:
        return sum(table.count(block) for table in self.tables)

    @rule(n=st.integers(0, 5))
    def allocate(self, n: int) -> None:
        room = self.blocks.num_free + self.blocks.num_cached - self.num_claimed
        if n > room:
            with pytest.raises(CacheExhausted):
                self.blocks.allocate(n)
        else:
            before = self.blocks.num_free
            self.tables.append(self.take(n))
            assert self.blocks.num_free == max(0, before - n), "free blocks go before cached ones"

    @rule(n=st.integers(0, 3))
    def claim(self, n: int) -> None:
        if n <= self.blocks.num_free + self.blocks.num_cached - self.num_claimed:
            self.blocks.claim(n)
            self.num_claimed += n

    @precondition(lambda self: self.num_claimed)
    @rule(data=st.data())
    def unclaim(self, data: st.DataObject) -> None:
        n = data.draw(st.integers(1, self.num_claimed))
        self.blocks.unclaim(n)
        self.num_claimed -= n

    def take(self, n: int) -> list[int]:
        got, evicted = self.blocks.allocate(n)
        assert len(set(got)) == n
        assert evicted.keys() <= set(got)
        for block, block_hash in evicted.items():
            assert self.cached.pop(block_hash) == block, "what is told of an eviction is not so"
        return got

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.blocks.release(self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1))))

    @precondition(lambda self: any(map(any, self.tables)))
    @rule(data=st.data(), number=st.integers(0, 5))
    def seal(self, data: st.DataObject, number: int) -> None:
        block = data.draw(st.sampled_from([b for table in self.tables for b in table if b]))
        if block in self.loads or self.blocks.hash_of(block) is not None:
            return
        self.blocks.seal([block], [hash_of(number)])
        assert (self.blocks.hash_of(block) is not None) is (hash_of(number) not in self.cached)
        self.cached.setdefault(hash_of(number), block)

    @rule(numbers=st.lists(st.integers(0, 5), min_size=1, max_size=3))
    def acquire(self, numbers: list[int]) -> None:
        hits = self.blocks.match([hash_of(n) for n in numbers])
        for block, number in zip(hits, numbers, strict=False):
            assert self.blocks.hash_of(block) == hash_of(number)
            assert self.blocks.state(block) in (BlockState.OWNED, BlockState.CACHED)
        if not self.blocks.can_allocate(0, keep=hits):
            return  # somebody has claimed them
        self.blocks.acquire(hits)
        self.tables.append(hits)

    @precondition(lambda self: any(map(any, self.tables)))
    @rule(data=st.data())
    def pin_read(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from([b for table in self.tables for b in table if b]))
        if block not in self.loads:
            self.blocks.pin_read([block])
            self.readers.append(block)

    @precondition(lambda self: self.readers)
    @rule(data=st.data())
    def unpin_read(self, data: st.DataObject) -> None:
        block = self.readers.pop(data.draw(st.integers(0, len(self.readers) - 1)))
        self.blocks.unpin_read([block])

    @precondition(lambda self: any(map(any, self.tables)))
    @rule(data=st.data(), number=st.none() | st.integers(0, 5))
    def begin_load(self, data: st.DataObject, number: int | None) -> None:
        block = data.draw(st.sampled_from([b for table in self.tables for b in table if b]))
        sole = self.holders(block) == 1 and self.blocks.hash_of(block) is None
        if not sole or block in self.readers or block in self.loads:
            return
        if number is None:
            self.blocks.begin_load([block])
            self.loads[block] = None
        elif hash_of(number) not in self.cached:
            self.blocks.begin_load([block], [hash_of(number)])
            self.loads[block] = hash_of(number)
            self.cached[hash_of(number)] = block

    @precondition(lambda self: self.loads)
    @rule(data=st.data(), fails=st.booleans())
    def end_load(self, data: st.DataObject, fails: bool) -> None:
        block = data.draw(st.sampled_from(sorted(self.loads)))
        block_hash = self.loads.pop(block)
        if fails:
            self.blocks.fail_load([block])
            self.cached.pop(block_hash or b"", None)
        else:
            self.blocks.finish_load([block])
        if block_hash is not None:
            assert self.blocks.match([block_hash]) == ([] if fails else [block])

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), num_more=st.integers(1, 2), hole=st.booleans())
    def share(self, data: st.DataObject, num_more: int, hole: bool) -> None:
        table = data.draw(st.sampled_from(self.tables))
        if self.loads.keys().isdisjoint(table):
            shared = [NULL_BLOCK, *table] if hole else table  # as behind a window
            self.blocks.share(shared, num_more)
            self.tables += [list(shared) for _ in range(num_more)]

    @rule()
    def follow(self) -> None:
        self.blocks.record_changes(True)
        self.followed = set(self.blocks.hashes())

    @rule()
    def follow_no_more(self) -> None:
        self.blocks.record_changes(False)
        self.followed = None

    @rule()
    def take_changes(self) -> None:
        changes = self.blocks.take_changes()
        if self.followed is None:
            assert not changes
        else:
            self.followed -= {one for one, is_held in changes.items() if not is_held}
            self.followed |= {one for one, is_held in changes.items() if is_held}
            assert self.followed == self.cached.keys() == set(self.blocks.hashes())
            assert not self.blocks.take_changes()

    @invariant()
    def whole(self) -> None:
        if hasattr(self, "blocks"):
            self.blocks.check_integrity(self.tables, [self.readers], [[*self.loads]])
            assert self.blocks.counts_by_state()[BlockState.LOADING] == len(self.loads)
            assert all(self.blocks.find(known) == block for known, block in self.cached.items())
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
        self.blocks.fail_load([*self.loads])
        assert self.blocks.num_free + self.blocks.num_cached == self.blocks.num_total


BlockManagerMachine.TestCase.settings = machine(max_examples=150, steps=40)
TestBlockManager = BlockManagerMachine.TestCase


def test_a_block_has_a_state_since_it_entered_it() -> None:
    blocks = BlockManager(3)
    block, other = blocks.allocate(2).blocks
    seen = [(blocks.state(block), blocks.since_s(block))]
    for now, change in enumerate(
        [
            lambda: blocks.release([other]),
            lambda: blocks.begin_load([block], [hash_of(1)]),
            lambda: blocks.finish_load([block]),
            lambda: blocks.share([block], 1),
            lambda: blocks.pin_read([block]),
            lambda: blocks.pin_read([block]),
            lambda: blocks.unpin_read([block]),
            lambda: blocks.release([block]),
            lambda: blocks.unpin_read([block]),
            lambda: blocks.release([block]),
            lambda: blocks.acquire([block]),
            lambda: blocks.share([block], 1),
            lambda: blocks.release([block]),
            lambda: blocks.release([block]),
            lambda: blocks.allocate(2),
            lambda: blocks.release([block]),
        ],
        1,
    ):
        blocks.now = now
        change()
        seen.append((blocks.state(block), blocks.since_s(block)))
    free, cached, owned, in_flight = BlockState.FREE, BlockState.CACHED, BlockState.OWNED, BlockState.IN_FLIGHT
    assert seen[:4] == [(owned, 0), (owned, 0), (BlockState.LOADING, 2), (owned, 3)]
    assert seen[4:9] == [(owned, 3)] + [(in_flight, 5)] * 4
    assert seen[9:] == [(owned, 9), (cached, 10)] + [(owned, 11)] * 3 + [(cached, 14), (owned, 15), (free, 16)]
    blocks.check_integrity([[other]])


def test_more_blocks_than_there_are_take_none() -> None:
    blocks = BlockManager(4)
    blocks.claim(2)
    with pytest.raises(CacheExhausted, match="2 KV blocks asked for, 3 free and 0 cached, 2 of them claimed"):
        blocks.allocate(2)
    assert blocks.num_free == 3
    blocks.allocate(1)


def test_the_leaves_of_the_least_recently_used_prefix_are_evicted_first() -> None:
    blocks = BlockManager(7)
    old, new = blocks.allocate(3).blocks, blocks.allocate(3).blocks
    for number, block in enumerate(old + new):
        blocks.seal([block], [hash_of(number)])
    blocks.release(old)
    blocks.release(new)
    assert [blocks.allocate(1).blocks[0] for _ in range(6)] == old[::-1] + new[::-1]


def test_a_hit_makes_a_block_recently_used() -> None:
    blocks = BlockManager(3)
    for number in (0, 1):
        (block,) = blocks.allocate(1).blocks
        blocks.seal([block], [hash_of(number)])
        blocks.release([block])
    hit = blocks.match([hash_of(0)])
    blocks.acquire(hit)
    blocks.release(hit)
    blocks.allocate(1)
    assert blocks.match([hash_of(0)])
    assert not blocks.match([hash_of(1)])


def test_the_first_to_seal_wins_and_a_duplicate_becomes_free() -> None:
    blocks = BlockManager(3)
    first, second = blocks.allocate(2).blocks
    blocks.seal([first], [hash_of(1)])
    assert blocks.hash_of(first) == hash_of(1)
    blocks.seal([second], [hash_of(1)])
    assert blocks.hash_of(second) is None
    assert blocks.match([hash_of(1)]) == [first]
    blocks.release([first, second])
    assert (blocks.state(first), blocks.state(second)) == (BlockState.CACHED, BlockState.FREE)


def test_a_block_in_flight_is_no_hit_and_settles_with_its_last_pin() -> None:
    blocks = BlockManager(2)
    (block,) = blocks.allocate(1).blocks
    blocks.seal([block], [hash_of(1)])
    blocks.pin_read([block, block])
    blocks.release([block])
    for _ in range(2):
        assert blocks.state(block) is BlockState.IN_FLIGHT
        assert not blocks.match([hash_of(1)])
        assert not blocks.can_allocate(1)
        blocks.unpin_read([block])
    assert blocks.state(block) is BlockState.CACHED


@pytest.mark.parametrize("end", [BlockManager.finish_load, BlockManager.fail_load])
def test_a_load_without_a_hash_whose_owner_let_go_ends_in_a_free_block(
    end: Callable[[BlockManager, list[int]], None],
) -> None:
    blocks = BlockManager(2)
    (block,) = blocks.allocate(1).blocks
    blocks.begin_load([block])
    blocks.release([block])
    assert not blocks.can_allocate(1)
    end(blocks, [block])
    assert blocks.state(block) is BlockState.FREE


def test_blocks_to_be_acquired_do_not_count_as_room() -> None:
    blocks = BlockManager(3)
    table = blocks.allocate(1).blocks
    blocks.seal([table[0]], [hash_of(1)])
    blocks.release(table)
    assert blocks.can_allocate(2)
    assert not blocks.can_allocate(2, keep=table)
    assert blocks.can_allocate(1, keep=table)


def test_eviction_is_told_with_what_the_block_was() -> None:
    blocks = BlockManager(4)
    first, second, _ = table = blocks.allocate(3).blocks
    blocks.seal([first], [hash_of(1)])
    blocks.seal([second], [hash_of(2)])
    blocks.release(table)
    assert not blocks.allocate(1).evicted
    got, evicted = blocks.allocate(2)
    assert list(evicted.items()) == [(second, hash_of(2)), (first, hash_of(1))]
    assert got == [second, first]
    assert [blocks.find(hash_of(number)) for number in (1, 2)] == [None, None]


def test_a_block_is_no_hit_while_it_is_loading_and_one_when_it_is_loaded() -> None:
    blocks = BlockManager(3)
    table = blocks.allocate(2).blocks
    blocks.begin_load(table, [hash_of(1), hash_of(2)])
    assert blocks.counts_by_state()[BlockState.LOADING] == 2
    assert blocks.match([hash_of(1)]) == []
    assert blocks.is_loading(hash_of(1))
    blocks.finish_load(table[:1])
    assert not blocks.is_loading(hash_of(1))
    assert blocks.is_loading(hash_of(2))
    assert blocks.match([hash_of(1), hash_of(2)]) == table[:1]
    assert [blocks.state(block) for block in table] == [BlockState.OWNED, BlockState.LOADING]


def test_a_load_whose_owner_let_go_ends_cached_or_free() -> None:
    blocks = BlockManager(3)
    table = blocks.allocate(2).blocks
    blocks.begin_load(table, [hash_of(1), hash_of(2)])
    blocks.release(table)
    assert not blocks.can_allocate(1), "it may still be written"
    blocks.finish_load(table[:1])
    blocks.fail_load(table[1:])
    assert [blocks.state(block) for block in table] == [BlockState.CACHED, BlockState.FREE]
    assert blocks.match([hash_of(1)]) == table[:1]
    assert blocks.find(hash_of(2)) is None


def test_what_is_computed_meanwhile_does_not_take_the_hash_of_a_load() -> None:
    blocks = BlockManager(3)
    loading, computed = blocks.allocate(2).blocks
    blocks.begin_load([loading], [hash_of(1)])
    blocks.seal([computed], [hash_of(1)])
    assert blocks.hash_of(computed) is None
    blocks.fail_load([loading])
    blocks.seal([computed], [hash_of(1)])
    assert blocks.hash_of(computed) == hash_of(1)
    blocks.seal([loading], [hash_of(1)])
    assert blocks.hash_of(loading) is None


@pytest.mark.parametrize(
    "misuse",
    [
        lambda blocks, block: blocks.release([block, block]),
        lambda blocks, block: blocks.acquire([block]),
        lambda blocks, block: (blocks.seal([block], [hash_of(1)]), blocks.begin_load([block])),
        lambda blocks, block: (blocks.begin_load([block]), blocks.seal([block], [hash_of(1)])),
        lambda blocks, block: (blocks.begin_load([block]), blocks.pin_read([block])),
        lambda blocks, block: (blocks.pin_read([block]), blocks.begin_load([block])),
        lambda blocks, block: (blocks.begin_load([block]), blocks.begin_load([block])),
        lambda blocks, block: (blocks.begin_load([block], [hash_of(1)]), blocks.acquire([block])),
        lambda blocks, block: blocks.begin_load([block], [hash_of(1), hash_of(2)]),
        lambda blocks, block: blocks.begin_load([*blocks.allocate(1).blocks, block], [hash_of(1), hash_of(1)]),
        lambda blocks, block: blocks.finish_load([block]),
        lambda blocks, block: blocks.fail_load([block]),
        lambda blocks, block: blocks.unpin_read([block]),
        lambda blocks, block: blocks.share([block + 1], 1),
        lambda blocks, block: blocks.check_integrity([]),
        lambda blocks, block: blocks.check_integrity([[block]], read=[[block]]),
    ],
)
def test_misuse_is_caught(misuse) -> None:
    blocks = BlockManager(3)
    (block,) = blocks.allocate(1).blocks
    with pytest.raises(AssertionError):
        misuse(blocks, block)


def test_a_prefix_that_somebody_owns_takes_nothing_from_what_can_be_allocated() -> None:
    """It is not among the blocks that could be evicted, so keeping it costs none."""
    blocks = BlockManager(6)
    table = blocks.allocate(3).blocks
    for i, block in enumerate(table):
        blocks.seal([block], [hash_of(i)])
    assert blocks.can_allocate(2, keep=table)
    blocks.release(table[2:])
    assert blocks.can_allocate(2, keep=table)
    assert blocks.can_allocate(3, keep=table[:2])
    assert not blocks.can_allocate(3, keep=table)
    blocks.acquire(table)
    assert len(blocks.allocate(2).blocks) == 2


def test_changes_of_the_prefix_cache_are_recorded_while_somebody_follows() -> None:
    blocks = BlockManager(4)
    table, _ = blocks.allocate(2)
    blocks.seal([table[0]], [hash_of(1)])
    assert blocks.take_changes() == {}, "nobody follows"
    blocks.record_changes(True)
    assert blocks.hashes() == [hash_of(1)]
    blocks.seal([table[1]], [hash_of(2)])
    assert blocks.take_changes() == {hash_of(2): True}
    blocks.release(table)
    table, _ = blocks.allocate(3)
    assert blocks.take_changes() == {hash_of(1): False, hash_of(2): False}, "evicted"
    blocks.begin_load(table[:1], [hash_of(3)])
    assert blocks.take_changes() == {hash_of(3): True}
    blocks.fail_load(table[:1])
    assert blocks.take_changes() == {hash_of(3): False}
    blocks.record_changes(False)
    assert blocks.hashes() == []
