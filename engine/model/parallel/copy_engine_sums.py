"""All-reduces of many rows by copy engines, which leave the SMs to the product that is computed meanwhile.

Each rank sums a shard of the tensor. The other ranks push their parts of the shard into its memory (reduce-scatter);
it adds them, and they pull the sum from there (all-gather):

    send:    after the product: push the other ranks' shards of x to them, and signal each
    sum:     wait for the other ranks' signals; add their parts to the own shard of x; signal all
    gather:  wait for their signals; pull their shards of the sum into x

These are three streams, so that one piece's shards are pulled while the next piece's are pushed. A kernel adds the
parts; copies, signals and waits take no SM, which NCCL's kernels do. After `_low_contention_all_gather` and
`_low_contention_reduce_scatter` of torch's symmetric memory.

Every piece of a tensor has memory and signals of its own, a slot, and the slots are used again for the next tensor.
Nothing is overwritten before it has been read, and no signal is set again before it has been seen:

    - A rank starts a tensor when its streams have pulled all shards of the one before (the caller waits for that).
    - A rank that pulls a shard of the tensor before has the signal that its owner added the parts: so the owner has
      read what this rank pushed, and has seen the signal for it.
    - The owner overwrites its sum after all ranks have pushed to it for the next tensor, which they do after they have
      pulled the sum, and have seen its signal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, Protocol, Self, TypeVar

from torch import Tensor

from baton_kernels.add_parts import add_parts
from baton_kernels.copy_stream import FLAG_BYTES

NUM_SLOTS = 8
SLOT_BYTES = 16 * 1024 * 1024
"""The most pieces of a tensor, and the largest piece."""
PIECE_ROWS = 1024
"""A piece has a multiple of so many rows, but for the last one: with 4096 outputs, one wave of tiles on 132 SMs."""
_ALIGNMENT = 256
"""Of shards in a slot, in bytes."""


def copied_rows(num_rows: int, row_bytes: int) -> int:
    """How many rows the pieces of a tensor have that is summed in pieces; 0: there is no memory for so many."""
    rows = PIECE_ROWS * -(-num_rows // (PIECE_ROWS * NUM_SLOTS))
    return rows if rows * row_bytes <= SLOT_BYTES else 0


class Stream(Protocol):
    """See `baton_kernels.copy_stream.CopyStream`."""

    def follow(self, other: Self) -> None:
        """Let what is queued from now on wait for all that is queued on the other stream so far."""

    def run(self, launch: Callable[[], None]) -> None:
        """Call `launch` with this as the current stream."""

    def copy(self, to: int, of: int, num_bytes: int) -> None:
        """Copy between two addresses."""

    def signal(self, flags: Sequence[int]) -> None:
        """Set flags, when all that was queued before is done."""

    def wait(self, flags: Sequence[int]) -> None:
        """Wait until all flags are set, and set them back."""


S = TypeVar("S", bound=Stream)


class CopyEngineSums(Generic[S]):
    """One rank's side of these all-reduces.

    memory: [num_bytes(size)], uint8, zeros before any rank starts: this rank's memory, which all ranks map. Its owner
    keeps it while this is used.
    addresses: where this rank maps the memory of each rank. current: the caller's stream. make_stream: makes one.
    """

    def __init__(
        self,
        rank: int,
        memory: Tensor,
        addresses: Sequence[int],
        current: Callable[[], S],
        make_stream: Callable[[], S],
    ) -> None:
        self._rank, self._size, self._memory = rank, len(addresses), memory
        self._current = current
        self._send, self._sum, self._gather = make_stream(), make_stream(), make_stream()
        self._others = [(rank + distance) % self._size for distance in range(1, self._size)]
        self._slots = [_Slot(self._size, number, addresses) for number in range(NUM_SLOTS)]

    @staticmethod
    def num_bytes(size: int) -> int:
        """The size of each rank's memory: slots, and each slot's flags."""
        return NUM_SLOTS * (size * _shard_bytes(size) + 2 * size * FLAG_BYTES)

    def start(self, x: Tensor, piece: int) -> Callable[[], None]:
        """Start to overwrite x, which is contiguous, of SLOT_BYTES at most, and needs what is queued on the current
        stream, with its sum over all ranks. All ranks call this for the same pieces, in the same order. piece: its
        number, below NUM_SLOTS, which no other piece has that has not been waited for. After the returned call, what is
        queued on the stream that is current then sees the sum; x must be kept until then."""
        slot, flat, rank = self._slots[piece], x.view(-1), self._rank
        shard = _shard_elements(flat.numel(), self._size, x.itemsize)
        shards = [flat[owner * shard : (owner + 1) * shard] for owner in range(self._size)]
        own, current = shards[rank], self._current()
        self._send.follow(current)
        for other in self._others:
            self._send.copy(slot.part(other, rank), shards[other].data_ptr(), shards[other].nbytes)
        self._send.signal([slot.has_part(other, rank) for other in self._others])

        self._sum.follow(current)
        self._sum.wait([slot.has_part(rank, other) for other in self._others])
        parts, total = slot.shards(self._memory, x, own.numel())
        self._sum.run(lambda: add_parts(own, parts, total))
        self._sum.signal([slot.has_sum(other, rank) for other in self._others])

        self._gather.follow(self._sum)
        self._gather.wait([slot.has_sum(rank, other) for other in self._others])
        for other in self._others:
            self._gather.copy(shards[other].data_ptr(), slot.total(other), shards[other].nbytes)
        self._gather.follow(self._send)  # is over by now; a graph that is captured must get all streams back

        def wait() -> None:
            self._current().follow(self._gather)

        return wait


class _Slot:
    """Where a piece's shards and flags are, as this rank maps them. In a rank's memory, a slot has the parts that the
    other ranks push, in the order of their distance from it, and the sum last."""

    def __init__(self, size: int, number: int, addresses: Sequence[int]) -> None:
        self._size, self._number, self._shard = size, number, _shard_bytes(size)
        self._starts = [address + self._offset for address in addresses]
        flags = NUM_SLOTS * size * self._shard + number * 2 * size * FLAG_BYTES
        self._flags = [address + flags for address in addresses]

    @property
    def _offset(self) -> int:
        return self._number * self._size * self._shard

    def part(self, owner: int, of: int) -> int:
        """Where rank `of` pushes its part of the owner's shard."""
        return self._starts[owner] + ((of - owner) % self._size - 1) * self._shard

    def total(self, owner: int) -> int:
        """Where the sum of the owner's shard is."""
        return self._starts[owner] + (self._size - 1) * self._shard

    def has_part(self, owner: int, of: int) -> int:
        return self._flags[owner] + of * FLAG_BYTES

    def has_sum(self, reader: int, owner: int) -> int:
        return self._flags[reader] + (self._size + owner) * FLAG_BYTES

    def shards(self, memory: Tensor, like: Tensor, n: int) -> tuple[Tensor, Tensor]:
        """In a rank's own memory, [size - 1, n] and [n], of the dtype of `like`: the parts that were pushed to it, and
        the sum."""
        shards = memory[self._offset :][: self._size * self._shard].view(like.dtype).view(self._size, -1)[:, :n]
        return shards[:-1], shards[-1]


def _shard_bytes(size: int) -> int:
    """The largest shard."""
    return _shard_elements(SLOT_BYTES, size, 1)


def _shard_elements(numel: int, size: int, itemsize: int) -> int:
    """All shards but the last ones have so many elements."""
    unit = _ALIGNMENT // itemsize
    return -(-numel // (size * unit)) * unit
