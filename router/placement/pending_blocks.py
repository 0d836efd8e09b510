"""The KV blocks of prompts that were placed: their nodes will have them, though none has published them yet.

Without them, the second of two prompts with the same beginning would be sent to a node that has to compute it again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from baton.block_hash import BlockHash


class PendingBlocks:
    """Nodes are named by their incarnations. The caller follows each `add` with one `remove`."""

    def __init__(self) -> None:
        self._of_nodes: dict[str, dict[BlockHash, int]] = {}  # number of prompts by block

    def add(self, incarnation: str, block_hashes: Sequence[BlockHash]) -> None:
        if not block_hashes:
            return
        counts = self._of_nodes.setdefault(incarnation, {})
        for block_hash in block_hashes:
            counts[block_hash] = counts[block_hash] + 1 if block_hash in counts else 1

    def remove(self, incarnation: str, block_hashes: Sequence[BlockHash]) -> None:
        if not block_hashes:
            return
        counts = self._of_nodes[incarnation]
        for block_hash in block_hashes:
            if counts[block_hash] > 1:
                counts[block_hash] -= 1
            else:
                del counts[block_hash]
        if not counts:
            del self._of_nodes[incarnation]

    def held(self, block_hashes: Sequence[BlockHash]) -> Mapping[str, int]:
        """How many leading blocks each node will hold; nodes that will hold none are left out."""
        if not block_hashes:
            return {}
        first = block_hashes[0]
        holders = {name: counts for name, counts in self._of_nodes.items() if first in counts}
        return {name: _num_leading(counts, block_hashes) for name, counts in holders.items()}


def _num_leading(counts: Mapping[BlockHash, int], block_hashes: Sequence[BlockHash]) -> int:
    for number, block_hash in enumerate(block_hashes):
        if block_hash not in counts:
            return number
    return len(block_hashes)
