"""Which nodes get a request: who comes to its prompt first, and of the decode nodes that fit the least busy."""

from __future__ import annotations

from dataclasses import dataclass

from baton.errors import LayoutMismatch, NodeUnavailable
from baton.messages import Load, NodeInfo, NodeRole


@dataclass(slots=True)
class Node:
    """A subscribed node, with what this router has given it. Its own `load` lags behind by a heartbeat and covers other
    routers. In tokens of prompts: `to_prefill`, not computed yet; `to_decode`, of requests that end there."""

    info: NodeInfo
    load: Load
    to_prefill: int = 0
    to_decode: int = 0
    last_placed: int = 0
    """Number of the last placement that gave it a prompt to compute."""

    @property
    def backlog(self) -> tuple[int, int]:
        """How late it would come to one more prompt. Of two that have as much to compute, who got the last of it
        earlier is further with it: one of 1,024 tokens is 20 to 30 ms, which is more than all else of a first token."""
        return self.to_prefill, self.last_placed if self.to_prefill else 0

    @property
    def busy(self) -> tuple[int, int]:
        """How much it has to generate."""
        return self.to_decode, self.load.num_waiting + self.load.num_running


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
        self._num_placed = 0

    def add(self, info: NodeInfo) -> None:
        """One that is here already keeps what it was given."""
        if node := self._nodes.get(info.incarnation):
            node.info = info
        else:
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
            return failed, prefill.backlog, prefill.busy, decode.busy, prefill.info.node_id, decode.info.node_id

        if pairs:
            return Placement(*min(pairs, key=cost))
        if self.role(NodeRole.PREFILL) or not self.role(NodeRole.DECODE):
            raise NodeUnavailable(self.why_not_ready() or "no node")
        alone = self.role(NodeRole.DECODE)
        return Placement(min(alone, key=lambda n: (n.info.incarnation in avoid, n.backlog, n.busy)), None)

    def place(self, placement: Placement, num_tokens: int) -> None:
        """A prompt of so many tokens goes there. To be followed by `prefilled` and `ended`, once each."""
        self._num_placed += 1
        placement.prefill.to_prefill += num_tokens
        placement.prefill.last_placed = self._num_placed
        placement.last.to_decode += num_tokens

    def prefilled(self, incarnation: str, num_tokens: int) -> None:
        """That prompt is computed, or not wanted any more."""
        if node := self._nodes.get(incarnation):
            node.to_prefill -= num_tokens

    def ended(self, incarnation: str, num_tokens: int) -> None:
        """That request will generate there no more."""
        if node := self._nodes.get(incarnation):
            node.to_decode -= num_tokens

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
