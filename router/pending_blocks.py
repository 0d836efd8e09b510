"""The KV blocks of prompts that were placed: their nodes will have them, though none has published them yet.

Without them, the second of two prompts with the same beginning would be sent to a node that has to compute it again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from baton.block_hash import BlockHash


class PendingBlocks:
    """Nodes are named by their incarnations. The caller follows each `add` with one `remove`."""

    def __init__(self) -> None:
        self._holders: dict[BlockHash, dict[str, int]] = {}  # number of prompts by node

    def add(self, incarnation: str, block_hashes: Sequence[BlockHash]) -> None:
        for block_hash in block_hashes:
            nodes = self._holders.setdefault(block_hash, {})
            nodes[incarnation] = nodes.get(incarnation, 0) + 1

    def remove(self, incarnation: str, block_hashes: Sequence[BlockHash]) -> None:
        for block_hash in block_hashes:
            nodes = self._holders[block_hash]
            nodes[incarnation] -= 1
            if not nodes[incarnation]:
                del nodes[incarnation]
                if not nodes:
                    del self._holders[block_hash]

    def held(self, block_hashes: Sequence[BlockHash]) -> Mapping[str, int]:
        """How many leading blocks each node will hold; nodes that will hold none are left out."""
        found: dict[str, int] = {}
        alive = set(self._holders.get(block_hashes[0], ())) if block_hashes else set()
        for number, block_hash in enumerate(block_hashes):
            there = self._holders.get(block_hash, {})
            for name in [name for name in alive if name not in there]:
                found[name] = number
                alive.discard(name)
            if not alive:
                return found
        return found | dict.fromkeys(alive, len(block_hashes))

    def __len__(self) -> int:
        return len(self._holders)
