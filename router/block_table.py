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

_KEY_BYTES = 8
_KEYS_PER_HASH = HASH_BYTES // _KEY_BYTES
_FIRST_WINDOW = 64
_MAX_SHARED_MASKS = 4096


class BlockTable:
    """`len`: blocks that some node holds."""

    def __init__(self) -> None:
        self._places: dict[bytes, int] = {}
        self._keys = bytearray()
        self._masks: list[int] = []
        self._free = array("q")  # places; the last one freed is the next one used
        self._shared: dict[int, int] = {}  # one object for all equal masks

    def __len__(self) -> int:
        return len(self._places)

    def find(self, block_hash: BlockHash) -> int | None:
        """The block's place, where it stays while any node holds it."""
        return self._places.get(block_hash[:_KEY_BYTES])

    def mask(self, place: int) -> int:
        return self._masks[place]

    def add(self, block_hash: BlockHash) -> int:
        """A place for a block that has none. The caller sets its mask."""
        key = block_hash[:_KEY_BYTES]
        if self._free:
            place = self._free.pop()
            self._keys[_KEY_BYTES * place : _KEY_BYTES * (place + 1)] = key
        else:
            place = len(self._masks)
            self._keys += key
            self._masks.append(0)
        self._places[key] = place
        return place

    def set_mask(self, place: int, mask: int) -> None:
        """Without a node left, the block loses its place."""
        if len(self._shared) >= _MAX_SHARED_MASKS:
            self._shared.clear()
        self._masks[place] = self._shared.setdefault(mask, mask)
        if not mask:
            del self._places[bytes(self._keys[_KEY_BYTES * place : _KEY_BYTES * (place + 1)])]
            self._free.append(place)

    def leading(self, block_hashes: Sequence[BlockHash]) -> Iterator[tuple[int, int]]:
        """(number, mask) of runs of leading blocks that the same nodes hold. Together, the runs are all blocks before
        the first one that no node holds; neighbouring runs may be of the same nodes."""
        if not block_hashes or self.find(block_hashes[0]) is None:
            return
        start, size = 0, _FIRST_WINDOW
        while start < len(block_hashes):
            window = _keys_of(block_hashes[start : start + size])
            at = 0
            while at < len(window):
                place = self._places.get(window[at : at + _KEY_BYTES])
                if place is None:
                    return
                next_, there = at + _KEY_BYTES, _KEY_BYTES * (place + 1)
                if window[next_ : next_ + _KEY_BYTES] != self._keys[there : there + _KEY_BYTES]:
                    yield 1, self._masks[place]  # it came alone, as those that a batch of decodes fills
                    at = next_
                    continue
                number = self._num_equal(window[at:], place)
                yield from _runs(self._masks[place : place + number])
                at += _KEY_BYTES * number
            start, size = start + size, 2 * size

    def _num_equal(self, window: bytes, place: int) -> int:
        """How many blocks of the window, of which the first one is at `place`, are neighbours there."""
        there = self._keys[_KEY_BYTES * place : _KEY_BYTES * place + len(window)]
        if window == there:
            return len(window) // _KEY_BYTES
        equal, end = 1, len(there) // _KEY_BYTES + 1  # the first `equal` blocks are neighbours, the first `end` are not
        step = 1
        while equal + 1 < end:
            tried = min(equal + step, end - 1)
            part = slice(_KEY_BYTES * equal, _KEY_BYTES * tried)
            if window[part] == there[part]:
                equal, step = tried, 2 * step
            else:
                end, step = tried, 1
        return equal


def _keys_of(block_hashes: Sequence[BlockHash]) -> bytes:
    return memoryview(b"".join(block_hashes)).cast("Q")[::_KEYS_PER_HASH].tobytes()


def _runs(masks: list[int]) -> Iterator[tuple[int, int]]:
    """How often each mask follows itself, and the mask."""
    if masks.count(masks[0]) == len(masks):  # quick, since equal masks are one object
        yield len(masks), masks[0]
        return
    last, begin = masks[0], 0
    for at, mask in enumerate(masks):
        if mask != last:
            yield at - begin, last
            last, begin = mask, at
    yield len(masks) - begin, last
