"""Tells a node's routers, and whatever else follows the prefix cache, which blocks enter and leave it."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Protocol

from baton.block_hash import BlockHash, is_of_first_group
from engine.engine import Engine
from engine.sequence import Sequence
from node.events import BlocksChanged, BlocksHeld
from node.outbox import Outbox


class BlockFollower(Protocol):
    """Learns of all changes of the prefix cache, on the engine's thread: see `node.kv_events.publisher.KvEvents`."""

    def sealed(self, tokens: Seq[int], cache_salt: str, hashes: Seq[BlockHash], first: int) -> None: ...

    def turned(self, changes: Mapping[BlockHash, bool]) -> None: ...


class BlockChanges:
    """Has the engine record changes while a router is subscribed or there is a follower. Engine's thread only.

    If a model has several KV groups, only blocks of the first one count: it has the hashes that others know and, if
    there are layers without a window, all of their blocks.
    """

    def __init__(self, engine: Engine, outbox: Outbox) -> None:
        self._engine = engine
        self._outbox = outbox
        self._follower: BlockFollower | None = None
        self._untold: dict[BlockHash, bool] = {}  # the follower
        self._records = False

    def follow(self, follower: BlockFollower) -> None:
        """Tell the follower of all blocks that enter or leave the prefix cache. Call it before the first turn."""
        self._follower = follower
        self.record_if_wanted()

        def on_sealed(seq: Sequence, hashes: Seq[BlockHash], first: int) -> None:
            follower.sealed(seq.tokens, seq.cache_salt, hashes, first)

        self._engine.sequences.on_sealed = on_sealed

    def record_if_wanted(self) -> None:
        """Call it when a router has subscribed, or its session has ended: changes are recorded while there is a router
        or a follower."""
        wanted = bool(self._outbox.epochs) or self._follower is not None
        if wanted != self._records:  # starting again would drop changes that others have not been told
            self._records = wanted
            self._engine.blocks.record_changes(wanted)

    def tell(self) -> None:
        """Tell routers of the changes since the last call."""
        changes = self._engine.blocks.take_changes()
        if self._engine.tables.shape.width > 1:
            changes = {name: is_here for name, is_here in changes.items() if is_of_first_group(name)}
        if self._follower is not None:
            for block_hash, is_held in changes.items():
                self._untold.pop(block_hash, None)  # in the order of the last changes
                self._untold[block_hash] = is_held
        if changes and self._outbox.epochs:
            self._outbox.add(BlocksChanged(changes))

    def tell_follower(self) -> None:
        """Tell the follower, once a turn, when the turn's outputs are on their way: no token waits for this."""
        if self._follower is not None:
            self._follower.turned(self._untold)
            self._untold = {}

    def tell_held(self, epoch: int) -> None:
        """Send a snapshot to one router, after the changes so far to the others."""
        self.tell()
        held = self._engine.blocks.hashes()
        self._outbox.add(BlocksHeld(epoch, [name for name in held if is_of_first_group(name)]))
