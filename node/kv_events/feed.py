"""The changes of this node's prefix cache that one router has not been told yet.

    engine's thread                 asyncio thread
    BlocksHeld     a snapshot   ->  KvFeed  --take-->  KvEvents, at most one every KV_PERIOD_S
    BlocksChanged  each turn    ->

Changes are collected until the router is ready to read, and only the last one of each block is sent. A router that
reads too slowly loses its backlog and gets a new snapshot, which is smaller; the feed therefore never holds much more
than the hashes of the prefix cache.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from baton.block_hash import BlockHash
from baton.messages import KvEvents

KV_PERIOD_S = 0.1
"""The shortest interval between messages to one router, except those of one large batch: reading one costs the router
as much as reading the tokens of a step."""
MAX_EVENTS = 256
"""The most hashes in one message, of which a router accepts up to 1,024: to read and store these takes it 0.1 to 0.4
ms, during which no token passes."""
MAX_BACKLOG = 32_768
"""The most changes that wait for one router, beside its snapshot: 4 MB. If there are more, a new snapshot replaces
them."""


class KvFeed:
    """The feed of one session; nothing is sent before its first snapshot. For one thread."""

    def __init__(self, max_events: int = MAX_EVENTS, max_backlog: int = MAX_BACKLOG) -> None:
        self._max_events = max_events
        self._max_backlog = max_backlog
        self._stored: dict[BlockHash, None] = {}
        self._removed: dict[BlockHash, None] = {}
        self._follows = False  # whether changes are of interest: a snapshot has come, and nothing was dropped since
        self._begins = False  # whether the next message is the first one of a snapshot
        self._num_snapshot = 0  # how many hashes the snapshot has, until it is sent
        self._sequence = 0
        self.lacks_snapshot = False
        """Whether the backlog was dropped. The owner asks the engine for a snapshot, and sets this to False."""

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to send."""
        return not (self._stored or self._removed or self._begins)

    def snapshot(self, hashes: Sequence[BlockHash]) -> None:
        """All that the prefix cache holds now. It replaces what has not been sent yet."""
        self._stored, self._removed = dict.fromkeys(hashes), {}
        self._follows = self._begins = True
        self._num_snapshot = len(hashes)
        self.lacks_snapshot = False

    def changed(self, changes: Mapping[BlockHash, bool]) -> None:
        """Whether the prefix cache holds each hash now."""
        if not self._follows:
            return
        held = [block_hash for block_hash, is_held in changes.items() if is_held]
        gone = [block_hash for block_hash, is_held in changes.items() if not is_held]
        for gained, lost, hashes in ((self._stored, self._removed, held), (self._removed, self._stored, gone)):
            gained.update(dict.fromkeys(hashes))
            for block_hash in lost.keys() & hashes if lost else ():
                del lost[block_hash]
        if len(self._stored) + len(self._removed) > self._num_snapshot + self._max_backlog:
            self._drop()

    def take(self) -> KvEvents:
        """The next message; the rest follows in later ones. Do not call it if the feed is empty."""
        assert not self.is_empty
        removed = _pop(self._removed, self._max_events)
        stored = _pop(self._stored, self._max_events - len(removed))
        events = KvEvents(self._sequence, stored, removed, self._begins)
        self._begins = False
        self._sequence += 1
        if self.is_empty:
            self._num_snapshot = 0
        return events

    def _drop(self) -> None:
        self._stored, self._removed = {}, {}
        self._follows = self._begins = False
        self.lacks_snapshot = True


def _pop(hashes: dict[BlockHash, None], most: int) -> tuple[BlockHash, ...]:
    """Remove up to `most` hashes, in their order, since the router finds blocks fastest that came one after another."""
    popped = tuple(itertools.islice(hashes, most))
    for block_hash in popped:
        del hashes[block_hash]
    return popped
