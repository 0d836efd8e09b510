"""KV blocks and the nodes that hold each, laid out so that a prompt's blocks are found at once.

    keys    | a0 | a1 | a2 | a3 | b0 | b1 | -- | c0 |    places, in the order in which blocks came
    masks   |  3 |  3 |  3 |  1 |  2 |  2 |  0 |  1 |    the nodes that hold the block, one bit each
    places  {a0: 0, a1: 1, ...}

Nodes publish the blocks of a prompt in their order, so they are neighbours here, and a lookup compares whole runs of
them. One lookup in a dict for each of 512 blocks would take as long as 512 waits for memory.

A key is the first eight bytes of the block hash, which saves memory. Among 2^22 blocks, two have the same key in one of
two million routers, and placement then has a wrong hint.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence

from baton.block_hash import HASH_BYTES, BlockHash

_KEYS_PER_HASH = HASH_BYTES // 8
_ALL_BITS = 2**64 - 1
_FIRST_WINDOW = 64
_MAX_SHARED_MASKS = 4096


def keys_of(block_hashes: Sequence[BlockHash]) -> array[int]:
    return array("Q", memoryview(b"".join(block_hashes)).cast("Q")[::_KEYS_PER_HASH].tobytes())


class BlockTable:
    """`len`: blocks that some node holds."""

    def __init__(self) -> None:
        self._places: dict[int, int] = {}
        self._keys = array("Q")
        self._masks: list[int] = []
        self._free = array("I")  # places; the last one freed is the next one used
        self._shared: dict[int, int] = {}  # one object for all equal masks

    def __len__(self) -> int:
        return len(self._places)

    def find(self, key: int) -> int | None:
        """The block's place, where it stays while any node holds it."""
        return self._places.get(key)

    def mask(self, place: int) -> int:
        return self._masks[place]

    def add(self, key: int) -> int:
        """A place for a block that has none. The caller sets its mask."""
        if self._free:
            place = self._free.pop()
            self._keys[place] = key
        else:
            place = len(self._keys)
            self._keys.append(key)
            self._masks.append(0)
        self._places[key] = place
        return place

    def set_mask(self, place: int, mask: int) -> None:
        """Without a node left, the block loses its place."""
        if len(self._shared) >= _MAX_SHARED_MASKS:
            self._shared.clear()
        self._masks[place] = self._shared.setdefault(mask, mask)
        if not mask:
            del self._places[self._keys[place]]
            self._keys[place] ^= _ALL_BITS  # else a run of neighbours would go on here
            self._free.append(place)

    def leading(self, block_hashes: Sequence[BlockHash]) -> Iterator[tuple[int, int]]:
        """(number, mask) of runs of leading blocks that the same nodes hold. Together, the runs are all blocks before
        the first one that no node holds; neighbouring runs may be of the same nodes."""
        start, size = 0, 1  # most prompts are new from the first block on
        while start < len(block_hashes):
            window = keys_of(block_hashes[start : start + size])
            masks = self._leading_masks(window)
            yield from _runs(masks)
            if len(masks) < len(window):
                return
            start, size = start + size, max(2 * size, _FIRST_WINDOW)

    def _leading_masks(self, window: array[int]) -> list[int]:
        """Of each block before the first one that no node holds."""
        keys, masks, num_wanted = self._keys, self._masks, len(window)
        found: list[int] = []
        while (at := len(found)) < num_wanted:
            place = self._places.get(window[at])
            if place is None:
                break
            if at + 1 < num_wanted and place + 1 < len(keys) and window[at + 1] == keys[place + 1]:
                found += masks[place : place + self._num_equal(window[at:], place)]
            else:
                found.append(masks[place])
        return found

    def _num_equal(self, window: array[int], place: int) -> int:
        """How many blocks of the window, of which the first one is at `place`, are neighbours there."""
        there = self._keys[place : place + len(window)]
        if window == there:
            return len(window)
        equal, end = 1, len(there) + 1  # the first `equal` blocks are neighbours, the first `end` are not
        step = 1
        while equal + 1 < end:
            tried = min(equal + step, end - 1)
            if window[equal:tried] == there[equal:tried]:
                equal, step = tried, 2 * step
            else:
                end, step = tried, 1
        return equal


def _runs(masks: list[int]) -> Iterator[tuple[int, int]]:
    """How often each mask follows itself, and the mask."""
    if not masks:
        return
    last, begin = masks[0], 0
    if masks.count(last) < len(masks):  # quick, since equal masks are one object
        for at, mask in enumerate(masks):
            if mask != last:
                yield at - begin, last
                last, begin = mask, at
    yield len(masks) - begin, last
