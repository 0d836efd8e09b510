"""What a sequence finds, gets, claims and gives back, group by group."""

from __future__ import annotations

import pytest

from baton.block_hash import of_group
from engine.block_manager import NULL_BLOCK, BlockManager, BlockState
from engine.block_tables import BlockTables
from engine.config import EngineConfig
from engine.holdings import Holding
from engine.sequence import Sequence
from tests.engine.counting import make as make_engine
from tests.engine.counting import run, sequence

BLOCK_SIZE, WINDOW, CHUNK = 4, 10, 8
MOST = (WINDOW - 1 + CHUNK + BLOCK_SIZE - 1) // BLOCK_SIZE + 1
"""Columns of the group with a window that a sequence needs at a time."""


class Rig:
    """Tables of two groups, the second with a window; a pool without a sequence in it."""

    def __init__(self, num_blocks: int = 100, windows: tuple[int | None, ...] = (None, WINDOW)) -> None:
        self.config = EngineConfig(
            num_blocks=num_blocks + 1, max_model_len=52, vocab_size=100, block_size=BLOCK_SIZE,
            max_num_batched_tokens=CHUNK, windows=windows,
        )  # fmt: skip
        self.blocks = BlockManager(num_blocks + 1)
        self.tables = BlockTables(self.config, self.blocks)

    def hits(self, seq: Sequence) -> list[int]:
        return self.tables.match(seq.block_hashes((seq.num_tokens - 1) // BLOCK_SIZE, BLOCK_SIZE))[0]

    def compute(self, seq: Sequence, num_tokens: int) -> None:
        """As a step does that is scheduled and retires."""
        self.tables.cover(seq, num_tokens)
        before, seq.num_computed_tokens = seq.num_computed_tokens, num_tokens
        hashes = seq.block_hashes(num_tokens // BLOCK_SIZE, BLOCK_SIZE)
        self.tables.seal(seq.block_table, hashes, before // BLOCK_SIZE)
        self.tables.give_back_read(seq, before)
        self.tables.check_integrity(seq)

    def compute_all(self, seq: Sequence) -> None:
        assert self.tables.admit(seq, self.hits(seq))
        while seq.num_computed_tokens < seq.num_tokens:
            self.compute(seq, min(seq.num_tokens, seq.num_computed_tokens + CHUNK))


def test_a_prompt_claims_what_it_needs_at_a_time_and_gets_a_chunk_at_a_time() -> None:
    rig = Rig()
    seq = sequence(50)
    assert rig.tables.admit(seq, [])
    assert (seq.num_claimed_blocks, rig.blocks.num_claimed) == (13 + MOST, 13 + MOST) == (18 + 1, 19)
    assert rig.config.most_blocks(50) == 13 + MOST
    rig.compute(seq, 8)
    assert (len(seq.block_table), seq.num_claimed_blocks) == (4, 15), "two columns, nothing to give back"
    rig.compute(seq, 16)
    assert seq.block_table[1::2][:1] == [NULL_BLOCK], "of tokens 0..3: the next one reads from 7 on"
    assert seq.num_claimed_blocks == 12, "of the two columns, and one block is claimed anew"
    while seq.num_computed_tokens < 50:
        rig.compute(seq, min(50, seq.num_computed_tokens + CHUNK))
    assert not rig.tables.is_growing(seq)
    assert rig.blocks.num_claimed == seq.num_claimed_blocks == 0
    held = [block for block in seq.block_table if block != NULL_BLOCK]
    assert len(held) == rig.tables.shape.num_held(50) == 13 + 3
    rig.tables.release(seq)
    rig.blocks.check_integrity([])


def test_a_table_is_sealed_without_the_columns_that_it_has_no_blocks_for() -> None:
    """As when it was taken over after a handoff: blocks behind the window have not come."""
    rig = Rig()
    seq = sequence(17)
    rig.tables.cover(seq, 16)
    rig.tables.give_back_behind(seq.block_table, 16)
    assert seq.block_table[1::2] == [NULL_BLOCK, *seq.block_table[3::2]]
    rig.blocks.check_integrity([seq.block_table])
    hashes = seq.block_hashes(4, BLOCK_SIZE)
    rig.tables.seal(seq.block_table, hashes, 0)
    names = [[of_group(block_hash, group) for block_hash in hashes] for group in range(2)]
    assert [rig.blocks.find(name) for name in names[0]] == seq.block_table[::2]
    assert [rig.blocks.find(name) for name in names[1]] == [None, *seq.block_table[3::2]]


@pytest.mark.parametrize("partial", [0, 3])
@pytest.mark.parametrize("num_forks", [1, 3])
def test_forks_share_full_columns_and_have_a_last_one_each(num_forks: int, partial: int) -> None:
    rig = Rig()
    table, spares = rig.blocks.allocate(2 * 3).blocks, rig.blocks.allocate(2 * (num_forks - 1)).blocks
    rig.blocks.release(table[1:2])
    table[1] = NULL_BLOCK  # behind the window
    tables, copies = rig.tables.fork(table, 2 * BLOCK_SIZE + partial, spares)
    assert tables == [[*table[:4], *own] for own in (table[4:], spares[:2], spares[2:])[:num_forks]]
    assert copies == (list(zip(table[4:] * (num_forks - 1), spares, strict=True)) if partial else [])
    rig.blocks.check_integrity(tables)


def test_nobody_else_gets_what_a_prompt_has_claimed() -> None:
    rig = Rig(num_blocks=13 + MOST + 2)
    seq = sequence(50)
    assert rig.tables.admit(seq, [])
    assert rig.blocks.num_unclaimed == 2
    assert not rig.tables.admit(sequence(50, first=9), [])
    while seq.num_computed_tokens < 50:
        rig.blocks.allocate(rig.blocks.num_unclaimed)
        rig.compute(seq, min(50, seq.num_computed_tokens + CHUNK))
    assert not rig.tables.is_growing(seq)


def test_a_prompt_that_ends_early_gives_its_claims_up() -> None:
    rig = Rig()
    seq = sequence(50)
    assert rig.tables.admit(seq, [])
    rig.compute(seq, 8)
    rig.tables.release(seq)
    assert (rig.blocks.num_claimed, seq.num_claimed_blocks, seq.num_promised_columns) == (0, 0, 0)


def test_a_hit_takes_the_last_window_of_a_group_that_has_one() -> None:
    rig = Rig()
    first = sequence(50, first=1)
    rig.compute_all(first)
    rig.tables.release(first)
    again = sequence(45, first=1)
    hits = rig.hits(again)
    assert rig.tables.num_columns(hits) == 11
    assert [block != NULL_BLOCK for block in hits[1::2]] == [False] * 8 + [True] * 3, "44 tokens: read from 35 on"
    assert all(hits[::2])


@pytest.mark.parametrize(("lost", "left"), [(10, 10), (9, 9), (8, 8), (7, 11)])
def test_a_hit_ends_before_a_block_that_is_read_and_gone(lost: int, left: int) -> None:
    """Of the eleven columns; what is behind the window is not needed."""
    rig = Rig()
    first = sequence(50, first=1)
    rig.compute_all(first)
    rig.tables.release(first)
    name = of_group(first.block_hashes(12, BLOCK_SIZE)[lost], 1)
    block = rig.blocks.find(name)
    assert block is not None
    rig.blocks.acquire([block])
    rig.blocks.pin_read([block])  # not to be had for as long as it is in flight
    assert rig.tables.num_columns(rig.hits(sequence(45, first=1))) == left


@pytest.mark.parametrize(
    ("windows", "cached", "loading", "num_hits", "wanted"),
    [
        ((None,), [(0, 0)], [(1, 0)], 1, (1, 0)),
        ((None,), [], [(1, 0)], 0, None),  # behind one that nobody loads
        ((None, WINDOW), [], [(0, 0), (0, 1)], 0, (0, 0)),
        ((None, WINDOW), [(0, 0), (0, 1), (1, 0)], [(1, 1)], 1, (1, 1)),
        ((None, WINDOW), [(0, 1), (1, 0), (1, 1)], [(2, 0)], 0, None),
        ((None, WINDOW), [(0, 0), (1, 0), (1, 1), (2, 0), (2, 1)], [], 0, None),
    ],
)
def test_a_sequence_waits_for_the_block_that_cuts_its_hit_short_if_that_is_being_loaded(
    windows: tuple[int | None, ...],
    cached: list[tuple[int, int]],
    loading: list[tuple[int, int]],
    num_hits: int,
    wanted: tuple[int, int] | None,
) -> None:
    """Blocks by column and group, of three columns."""
    rig = Rig(windows=windows)
    hashes = sequence(13).block_hashes(3, BLOCK_SIZE)
    names = {(column, group): of_group(hashes[column], group) for column in range(3) for group in range(2)}
    rig.blocks.seal(rig.blocks.allocate(len(cached)).blocks, [names[it] for it in cached])
    rig.blocks.begin_load(rig.blocks.allocate(len(loading)).blocks, [names[it] for it in loading])
    hits, awaited = rig.tables.match(hashes)
    assert (rig.tables.num_columns(hits), awaited) == (num_hits, wanted and names[wanted])


def test_a_lease_gets_the_blocks_that_are_cached_and_fresh_ones_for_the_others() -> None:
    rig = Rig()
    first = sequence(50, first=1)
    rig.compute_all(first)
    rig.tables.release(first)
    hashes = first.block_hashes(5, BLOCK_SIZE)
    blocks = [[rig.blocks.find(of_group(block_hash, group)) for block_hash in hashes] for group in range(2)]
    assert blocks[1][3] is not None
    rig.blocks.acquire([blocks[1][3]])
    rig.blocks.pin_read([blocks[1][3]])
    found = rig.tables.match_from(hashes, 20)
    assert found == [blocks[0], [blocks[1][2]]], "20 tokens: the window is read from 11 on"
    assert rig.tables.ends_of(found, 20) == (5, 3)
    table = rig.tables.table_of(found, 20, [7, 9, 10, 11], [91, 92, 93, 94])
    assert table[::2] == [*blocks[0], 93]
    assert table[1::2] == [NULL_BLOCK, NULL_BLOCK, blocks[1][2], 91, 92, 94]


def test_hits_that_nobody_else_has_count_for_what_a_prompt_needs() -> None:
    """Else a prompt with a hit might need more blocks than it does without, and never be admitted."""
    rig = Rig(num_blocks=13 + MOST)
    first = sequence(50, first=1)
    rig.compute_all(first)
    rig.tables.release(first)
    again = sequence(50, first=1)
    rig.compute_all(again)
    assert again.num_computed_tokens == 50


def test_hits_that_somebody_else_has_do_not_come_back() -> None:
    rig = Rig()
    first = sequence(30, first=1)
    rig.compute_all(first)
    own, shared = sequence(50, first=1), sequence(50, first=1)
    hits = rig.hits(own)
    owned = [bool(rig.blocks.num_owners(block)) for block in hits[1::2] if block != NULL_BLOCK]
    assert owned == [False, True, True], "the first one is behind the window of the prompt that has the others"
    assert rig.tables.admit(shared, hits)
    assert shared.num_claimed_blocks == 6 + (MOST - 1), "for six columns after the hit"
    rig.tables.release(shared)
    rig.tables.release(first)
    assert rig.tables.admit(own, rig.hits(own))
    assert own.num_claimed_blocks == 6 + (MOST - 3), "all three come back"


def test_blocks_that_others_keep_make_a_prompt_wait_and_not_fail() -> None:
    """What it gives back is still somebody else's, and there is nothing besides."""
    rig = Rig(num_blocks=13 + MOST + 8)
    seq, thief = sequence(50, first=1), sequence(50, first=1)
    assert rig.tables.admit(seq, [])
    for end in (8, 16):
        rig.compute(seq, end)
    hits = rig.hits(thief)
    rig.blocks.acquire(hits)  # as a shorter prompt that waits for its decode node
    taken = rig.blocks.allocate(rig.blocks.num_unclaimed).blocks
    while seq.num_computed_tokens < 50:
        before = seq.num_computed_tokens
        rig.tables.cover(seq, min(50, before + CHUNK))
        covered = min(50, rig.tables.num_covered_tokens(seq))
        if covered == before:
            break
        rig.compute(seq, covered)
    assert before < 50, "it waits"
    rig.blocks.release(taken)
    rig.compute(seq, min(50, before + CHUNK))
    assert seq.num_computed_tokens > before
    rig.blocks.release(hits)


def test_a_chunk_is_as_long_as_there_are_blocks_for() -> None:
    """Somebody has what it gives back, and all that is not claimed; then nobody does."""
    engine, model = make_engine(windows=(None, 6), num_blocks=60, max_num_batched_tokens=8)
    engine.add(seq := sequence(40))
    for _ in range(2):
        engine.compute(engine.schedule(0.0))
    hits, _ = engine.tables.match(seq.block_hashes(4, BLOCK_SIZE))
    engine.blocks.acquire(hits)
    kept = [*filter(None, hits), *engine.allocate(engine.blocks.num_unclaimed)]
    others = [Holding("lease", "", seq.attempt_id, (), 0.0, kept)]
    for _ in range(8):
        engine.compute(engine.schedule(0.0))
        engine.check_integrity(others)
        kept += engine.allocate(max(0, engine.blocks.num_unclaimed))
    assert seq.num_computed_tokens < 40, "it waits"
    assert {chunk.length for batch in model.batches for chunk in batch} > {8}
    engine.blocks.release(kept)
    run(engine)
    assert seq.num_output_tokens == 4
    assert engine.blocks.counts_by_state()[BlockState.OWNED] == engine.blocks.num_claimed == 0


def test_a_prompt_that_finds_no_block_for_its_next_tokens_is_in_no_step() -> None:
    """Others have what it gives back, and all that is not claimed; then nobody does."""
    engine, model = make_engine(windows=(None, 6), num_blocks=60, max_num_batched_tokens=8)
    engine.add(seq := sequence(40))
    kept: list[int] = []
    for _ in range(8):
        engine.compute(engine.schedule(0.0))
        kept += (read := [block for block in seq.block_table if block != NULL_BLOCK and block not in kept])
        engine.blocks.share(read, 1)
        kept += engine.allocate(max(0, engine.blocks.num_unclaimed))
        engine.check_integrity([Holding("lease", "", seq.attempt_id, (), 0.0, kept)])
    assert engine.tables.is_growing(seq), "it waits, and keeps its place"
    assert 0 < seq.num_computed_tokens < 40
    assert min(chunk.length for batch in model.batches for chunk in batch) > 0
    engine.blocks.release(kept)
    run(engine)
    assert seq.num_output_tokens == 4
