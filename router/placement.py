"""Which nodes get a request: the least loaded prefill node, and the least loaded decode node that fits it."""

from __future__ import annotations

from dataclasses import dataclass

from baton.errors import LayoutMismatch, NodeUnavailable
from baton.messages import Load, NodeInfo, NodeRole


@dataclass(slots=True)
class Node:
    """A subscribed node. `placed_tokens`: prompt tokens that this router has given it and that are not finished; the
    node's own `load` lags behind by a heartbeat and covers other routers."""

    info: NodeInfo
    load: Load
    placed_tokens: int = 0

    @property
    def busy(self) -> tuple[int, int]:
        return self.placed_tokens, self.load.num_waiting + self.load.num_running


@dataclass(frozen=True, slots=True)
class Placement:
    """`decode` None: the decode node in `prefill` does all of it."""

    prefill: Node
    decode: Node | None

    @property
    def last(self) -> Node:
        """The node that will generate."""
        return self.decode or self.prefill


def mismatch(prefill: Node, decode: Node) -> str | None:
    """Why the two cannot exchange blocks. None: they can."""
    try:
        prefill.info.layout.require_same(decode.info.layout, decode.info.node_id)
    except LayoutMismatch as error:
        return f"LayoutMismatch {error.message}"
    return None


class Pool:
    """The nodes that a router may use now, by incarnation. `with_prefill`: prefill nodes are meant to be among them."""

    def __init__(self, with_prefill: bool = True) -> None:
        self._with_prefill = with_prefill
        self._nodes: dict[str, Node] = {}

    def add(self, info: NodeInfo) -> None:
        self._nodes[info.incarnation] = Node(info, Load())

    def remove(self, incarnation: str) -> None:
        self._nodes.pop(incarnation, None)

    def get(self, incarnation: str) -> Node | None:
        return self._nodes.get(incarnation)

    def role(self, role: NodeRole) -> list[Node]:
        return [n for n in self._nodes.values() if n.info.role is role]

    def choose(self, avoid: set[str]) -> Placement:
        """The least busy pair that fits; a decode node alone when no prefill node is left. Nodes in `avoid` only if
        there is no other. Raises NodeUnavailable, saying why."""
        pairs = [(p, d) for p in self.role(NodeRole.PREFILL) for d in self.role(NodeRole.DECODE) if not mismatch(p, d)]

        def cost(pair: tuple[Node, Node]) -> tuple[object, ...]:
            prefill, decode = pair
            failed = sum(n.info.incarnation in avoid for n in pair)
            return failed, prefill.busy, decode.busy, prefill.info.node_id, decode.info.node_id

        if pairs:
            return Placement(*min(pairs, key=cost))
        if self.role(NodeRole.PREFILL) or not self.role(NodeRole.DECODE):
            raise NodeUnavailable(self.why_not_ready() or "no node")
        alone = self.role(NodeRole.DECODE)
        return Placement(min(alone, key=lambda n: (n.info.incarnation in avoid, n.busy)), None)

    def why_not_ready(self) -> str | None:
        """None when a request can be prefilled on one node and decoded on another, or by one of decode nodes that are
        meant to be alone; else what is missing."""
        prefills, decodes = self.role(NodeRole.PREFILL), self.role(NodeRole.DECODE)
        missing = ["no prefill node"] if self._with_prefill and not prefills else []
        missing += ["no decode node"] if not decodes else []
        if missing or not prefills:
            return " and ".join(missing) or None
        reasons = [mismatch(p, d) for p in prefills for d in decodes]
        if None in reasons:
            return None
        return f"no decode node: {reasons[0]}"
