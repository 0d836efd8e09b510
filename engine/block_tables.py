"""The block tables of an engine's sequences: the blocks that a sequence finds in the prefix cache, those that it gets
in addition, and those that it gives back once no token will read them again. `baton.table_shape` says what a table
looks like.

When a sequence is admitted, it gets blocks for all of its tokens. If there are groups with a window, that would be too
many: then it claims as many as it will hold at a time, gets a step's columns when the step is scheduled, and claims as
many blocks again as it gives back behind the window. So it always has blocks to go on with, unless those that it gives
back are shared. Then it may have to wait for a sequence that still reads them, which is not as far.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq

from baton.block_hash import BlockHash, of_group
from engine.block_manager import NULL_BLOCK, BlockManager
from engine.config import EngineConfig
from engine.prefix_cache import Evicted
from engine.sequence import Sequence


class BlockTables:
    """The cost of a call is proportional to the parts of tables that it is given. `blocks` owns and counts the
    blocks."""

    def __init__(self, config: EngineConfig, blocks: BlockManager) -> None:
        self.shape = config.table_shape
        self.has_windows = self.shape.has_windows
        self._width = self.shape.width
        self._block_size = config.block_size
        self._num_in_flight = config.num_in_flight_tokens
        self._blocks = blocks

    def num_columns(self, table: Seq[int]) -> int:
        return len(table) // self._width

    # ---- the prefix cache ----

    def match(self, hashes: Seq[BlockHash]) -> tuple[list[int], BlockHash | None]:
        """The table of the longest prefix of `hashes` after which everything that the next token reads is cached, and
        the name (a hash) of a block that cut this prefix short, if one is being loaded. Changes nothing."""
        if self._width == 1 and not self.has_windows:
            hits = self._blocks.match(hashes)
            return hits, next(filter(self._blocks.is_loading, hashes[len(hits) : len(hits) + 1]), None)
        num, missing = len(hashes), list[BlockHash]()
        for group, window in enumerate(self.shape.windows):
            if window is None:
                found = len(self._blocks.match(_names(hashes[:num], group)))
                missing += _names(hashes[found:num][:1], group)  # at most one
                num = found
        while self.has_windows and (gap := self._last_gap(hashes, num)) is not None:
            missing.append(of_group(hashes[gap[0]], gap[1]))
            num = gap[0]
        table = [NULL_BLOCK] * (num * self._width)
        for group in range(self._width):
            first = self.shape.first_column(group, num * self._block_size)
            table[first * self._width + group :: self._width] = self._blocks.match(_names(hashes[first:num], group))
        return table, next(filter(self._blocks.is_loading, missing), None)

    def _last_gap(self, hashes: Seq[BlockHash], num: int) -> tuple[int, int] | None:
        """(column, group) of the last block that the token after `num` columns reads and that is not cached: no hit
        goes beyond that column. None: there is no such block."""
        for group, window in enumerate(self.shape.windows):
            if window is not None:
                for column in range(num - 1, self.shape.first_column(group, num * self._block_size) - 1, -1):
                    if not self._blocks.match((of_group(hashes[column], group),)):
                        return column, group
        return None

    def match_from(self, hashes: Seq[BlockHash], num_tokens: int) -> list[list[int]]:
        """For each group, the cached blocks from the first column that a token after `num_tokens` reads up to the first
        block that is not cached. Changes nothing."""
        firsts = (self.shape.first_column(group, num_tokens) for group in range(self._width))
        return [self._blocks.match(_names(hashes[first:], group)) for group, first in enumerate(firsts)]

    def ends_of(self, found: Seq[Seq[int]], num_tokens: int) -> tuple[int, ...]:
        """For each group, the column after the last one that `match_from` found."""
        return tuple(self.shape.first_column(group, num_tokens) + len(blocks) for group, blocks in enumerate(found))

    def table_of(self, found: Seq[Seq[int]], num_tokens: int, lacking: Seq[int], fresh: Seq[int]) -> list[int]:
        """A table with the blocks that `match_from` found, and `fresh` blocks in the entries `lacking`, which include
        the table's last entry."""
        table = [NULL_BLOCK] * (lacking[-1] + 1)
        for group, blocks in enumerate(found):
            first = self.shape.first_column(group, num_tokens)
            table[first * self._width + group : (first + len(blocks)) * self._width : self._width] = blocks
        for entry, block in zip(lacking, fresh, strict=True):
            table[entry] = block
        return table

    def seal(self, table: Seq[int], hashes: Seq[BlockHash], first: int) -> None:
        """Seal the columns from `first` on, which must be full. hashes: of all columns up to the last one to seal."""
        for group in range(self._width):
            names = list(_names(hashes[first:], group))
            blocks = table[first * self._width + group :: self._width][: len(names)]
            if NULL_BLOCK in blocks:
                pairs = [(block, name) for block, name in zip(blocks, names, strict=True) if block != NULL_BLOCK]
                blocks, names = [block for block, _ in pairs], [name for _, name in pairs]
            self._blocks.seal(blocks, names)

    # ---- a sequence's blocks ----

    def admit(self, seq: Sequence, hits: list[int]) -> bool:
        """Give the sequence the hits, as returned by `match`, and claims to the blocks for all tokens after them.
        Returns False if too few blocks are left."""
        num_columns, first = self.shape.num_columns(seq.num_tokens), self.num_columns(hits)
        needed = self._num_needed(hits, num_columns - first)
        if not self._blocks.can_allocate(needed, keep=hits):
            return False
        self._blocks.acquire(hits)
        self._blocks.claim(needed)
        seq.block_table, seq.num_claimed_blocks, seq.num_promised_columns = hits, needed, num_columns
        seq.rewind(first * self._block_size)
        return True

    def _num_needed(self, hits: list[int], num_columns: int) -> int:
        """How many blocks `num_columns` columns need in addition to the hits. Hits that no other sequence holds count
        towards them: they are given back when they fall behind their window, and then claimed."""
        if not self.has_windows:
            return num_columns * self._width
        needed = self.shape.most_held(num_columns, self._num_in_flight)
        for group, window in enumerate(self.shape.windows):
            if window is not None:
                found = (block for block in hits[group :: self._width] if block != NULL_BLOCK)
                own = sum(not self._blocks.num_owners(block) for block in found)
                most = self.shape.most_in_window(window, self._num_in_flight)
                needed -= max(0, min(num_columns, most) - (most - own))
        return needed

    def cover(self, seq: Sequence, num_tokens: int) -> Evicted:
        """Give the sequence the columns for its first `num_tokens` tokens, or as many of them as there are blocks for.
        Returns the blocks that were evicted for this."""
        lacking = (self.shape.num_columns(num_tokens) - self.num_columns(seq.block_table)) * self._width
        room = seq.num_claimed_blocks + max(0, self._blocks.num_unclaimed)
        taken = max(0, min(lacking, room // self._width * self._width))
        self._unclaim(seq, min(taken, seq.num_claimed_blocks))
        blocks, evicted = self._blocks.allocate(taken)
        seq.block_table += blocks
        return evicted

    def is_growing(self, seq: Sequence) -> bool:
        """Whether the sequence was admitted with claims, and does not have all of its columns yet."""
        return len(seq.block_table) < seq.num_promised_columns * self._width

    def num_covered_tokens(self, seq: Sequence) -> int:
        """How many tokens the sequence's columns cover."""
        return self.num_columns(seq.block_table) * self._block_size

    def give_back_read(self, seq: Sequence, before: int) -> None:
        """Release the blocks that the token after `before` tokens read and that the sequence's next token does not
        read. As long as the sequence is growing, claim as many again."""
        table, released = seq.block_table, 0
        for entry in self.shape.fallen_behind(before, seq.num_computed_tokens):
            self._blocks.release((table[entry],))
            table[entry] = NULL_BLOCK
            released += 1
        if released and self.is_growing(seq):
            columns = seq.num_promised_columns - self.num_columns(table)
            lacking = self.shape.most_held(columns, self._num_in_flight) - seq.num_claimed_blocks
            claimed = max(0, min(released, lacking, self._blocks.num_unclaimed))
            self._blocks.claim(claimed)
            seq.num_claimed_blocks += claimed

    def give_back_behind(self, table: list[int], num_computed: int) -> None:
        """Release the blocks of a table that no token after `num_computed` reads."""
        for entry in self.shape.fallen_behind(0, num_computed):
            self._blocks.release((table[entry],))
            table[entry] = NULL_BLOCK

    def release(self, seq: Sequence) -> None:
        """Release all of the sequence's blocks and claims."""
        self._blocks.release(self.take(seq))

    def take(self, seq: Sequence) -> list[int]:
        """Take the table out of the sequence, and drop its claims. The table's blocks are the caller's from now on."""
        self.give_up_claims(seq)
        table, seq.block_table = seq.block_table, []
        return table

    def give_up_claims(self, seq: Sequence) -> None:
        """Drop the sequence's claims: it gets further columns as any generating sequence does."""
        self._unclaim(seq, seq.num_claimed_blocks)
        seq.num_promised_columns = 0

    def _unclaim(self, seq: Sequence, n: int) -> None:
        self._blocks.unclaim(n)
        seq.num_claimed_blocks -= n

    def fork(
        self, table: Seq[int], num_computed: int, spare_blocks: Seq[int]
    ) -> tuple[list[list[int]], list[tuple[int, int]]]:
        """Split one table into forks: one keeps the table, and each column of spare blocks makes one more. Returns the
        tables, and the blocks to copy, as (source, destination).

        `table` covers the computed tokens and the next one: `num_computed // block_size` full columns, which all forks
        share, and one more, which the next step of each fork writes. The first fork keeps that last column, and the
        others take the spares for it; if the column is partly filled, its content must be copied. The caller has
        allocated `table` and the spares; they become the forks'.
        """
        width = self._width
        end = num_computed // self._block_size * width
        shared, last = table[:end], table[end:]
        assert len(last) == width, f"{len(table)} blocks for {num_computed} tokens and the next"
        others = [spare_blocks[first : first + width] for first in range(0, len(spare_blocks), width)]
        if others:
            self._blocks.share(shared, len(others))
        tables = [[*shared, *own] for own in (last, *others)]
        partial = num_computed % self._block_size > 0
        return tables, [pair for own in others for pair in zip(last, own, strict=True)] if partial else []

    # ---- checks ----

    def check_integrity(self, seq: Sequence) -> None:
        """Assert that a running sequence has exactly the blocks that its next token reads, and that it claims only
        blocks that it does not have yet."""
        lacking = seq.num_promised_columns * self._width - len(seq.block_table)
        assert seq.num_claimed_blocks <= max(0, lacking), f"{seq.attempt_id} claims {seq.num_claimed_blocks}"
        for group in range(self._width):
            first = self.shape.first_column(group, seq.num_computed_tokens)
            for column, block in enumerate(seq.block_table[group :: self._width]):
                where = f"{seq.attempt_id}: column {column} of group {group}"
                assert (block == NULL_BLOCK) == (column < first), f"{where} is {block}, read from {first} on"


def _names(hashes: Seq[BlockHash], group: int) -> Iterator[BlockHash] | Seq[BlockHash]:
    """The names (hashes) of the group's blocks in these columns."""
    return (of_group(block_hash, group) for block_hash in hashes) if group else hashes
