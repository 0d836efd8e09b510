"""The interface of the copies between pool and slots, and its implementation for simulated nodes, which have
neither."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from kv_transfer.async_operation import DONE, AsyncOperation, RemoteSlot
from kv_transfer.parts import MAX_PIECES, Checksums, PartHeader
from kv_transfer.slices import Rows

Mark = Any
"""A point in the device's queue of work, from `Copies.mark`."""

Move = Callable[[], None]
"""Launches a copy."""


class Copies(Protocol):
    """See `SlotCopies`, which copies for real."""

    most_pieces: int

    def mark(self) -> Mark: ...

    def gather(
        self, slot: int, ids: Sequence[int], rows: Rows, checksums: Checksums | None, placed: RemoteSlot | None = None
    ) -> AsyncOperation: ...

    def scatter(
        self, slot: int, ids: Sequence[int], rows: Rows, not_before: Mark, in_advance: bool = False
    ) -> Move: ...

    def on_device(self) -> contextlib.AbstractContextManager[object]: ...

    def make_stream_wait(self, slot: int) -> None: ...

    def is_done(self, slot: int) -> bool: ...

    def when_done(self, slot: int, after: Callable[[], None]) -> None: ...

    def num_damaged(self, slot: int, header: PartHeader) -> int: ...

    def warm_up(self, kinds: Iterable[Rows], gathers: bool) -> None: ...


class NoCopies:
    """Copies of a simulated node: done at once, since there is nothing to copy."""

    def __init__(self, part_blocks: int) -> None:
        self.most_pieces = max(part_blocks, MAX_PIECES)

    def mark(self) -> Mark:
        return None

    def gather(
        self, slot: int, ids: Sequence[int], rows: Rows, checksums: Checksums | None, placed: RemoteSlot | None = None
    ) -> AsyncOperation:
        return DONE

    def scatter(self, slot: int, ids: Sequence[int], rows: Rows, not_before: Mark, in_advance: bool = False) -> Move:
        return _nothing

    def on_device(self) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext()

    def make_stream_wait(self, slot: int) -> None:
        pass

    def is_done(self, slot: int) -> bool:
        return True

    def when_done(self, slot: int, after: Callable[[], None]) -> None:
        after()

    def num_damaged(self, slot: int, header: PartHeader) -> int:
        return 0

    def warm_up(self, kinds: Iterable[Rows], gathers: bool) -> None:
        pass


def _nothing() -> None:
    pass
