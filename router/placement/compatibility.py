"""Which of the nodes that the router uses can exchange KV blocks."""

from __future__ import annotations

from collections.abc import Iterable

from baton.errors import LayoutMismatch
from baton.node_info import NodeInfo, NodeRole
from router.placement.circuit_breakers import Pair
from router.versions import difference


def mismatch(prefill: NodeInfo, decode: NodeInfo) -> str | None:
    """Why the two cannot exchange blocks. None: they can."""
    try:
        prefill.layout.require_compatible(decode.layout, decode.node_id)
    except LayoutMismatch as error:
        return f"LayoutMismatch {error.message}"
    if reason := difference(prefill, decode):
        return reason
    spoken, understood = ([e.transport for e in info.endpoints] for info in (prefill, decode))
    if spoken and understood and not set(spoken) & set(understood):
        return f"transport {', '.join(spoken)} of {prefill.node_id} != {', '.join(understood)} of {decode.node_id}"
    return None


class Compatibility:
    """Nodes are compared once, as one of them comes or changes, and not for each request: layouts have many layers.

    misfits: why a prefill node, the first of a pair, and a decode node cannot work together; None: they can."""

    def __init__(self) -> None:
        self.misfits: dict[Pair, str | None] = {}
        self._moves: dict[Pair, str | None] = {}  # between decode nodes, as far as they were asked for

    def add(self, info: NodeInfo, infos: Iterable[NodeInfo]) -> None:
        """Compare a node, which is new or has changed, with all others of the other role."""
        self.forget(info.incarnation)
        for other in infos:
            if other.role is not info.role:
                prefill, decode = (info, other) if info.role is NodeRole.PREFILL else (other, info)
                self.misfits[prefill.incarnation, decode.incarnation] = mismatch(prefill, decode)

    def forget(self, incarnation: str) -> None:
        for known in (self.misfits, self._moves):
            for pair in [pair for pair in known if incarnation in pair]:
                del known[pair]

    def can_move(self, source: NodeInfo, target: NodeInfo) -> bool:
        """Whether the one decode node can hand running requests over to the other."""
        pair = source.incarnation, target.incarnation
        if pair not in self._moves:
            self._moves[pair] = mismatch(source, target)
        return self._moves[pair] is None
