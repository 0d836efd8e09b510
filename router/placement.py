"""Which nodes get a request: the prefill node that can start it first, and the least busy decode node that fits."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from baton.errors import LayoutMismatch, NodeUnavailable
from baton.messages import Load, NodeInfo, NodeRole
from router.pair_faults import PairFaults


@dataclass(slots=True)
class Node:
    """A subscribed node, with the work that this router has given it. Its own `load` lags behind by a heartbeat and
    includes other routers' work. Counts are tokens of prompts: `to_prefill` of those not computed yet, `to_decode` of
    requests that generate there."""

    info: NodeInfo
    load: Load
    to_prefill: int = 0
    to_decode: int = 0
    last_placed: int = 0
    """Number of the last placement that gave it a prompt to compute."""

    @property
    def backlog(self) -> tuple[int, int]:
        """How late the node would start one more prompt. Of two with equal work, the one that got its last prompt
        earlier is further along: a prompt of 1,024 tokens takes 20 to 30 ms, more than the rest of a first token."""
        return self.to_prefill, self.last_placed if self.to_prefill else 0

    @property
    def busy(self) -> tuple[int, int]:
        """How much the node has to generate."""
        return self.to_decode, self.load.num_waiting + self.load.num_running


@dataclass(frozen=True, slots=True)
class Placement:
    """`decode` None: the decode node in `prefill` does all the work."""

    prefill: Node
    decode: Node | None

    @property
    def last(self) -> Node:
        """The node that will generate."""
        return self.decode or self.prefill


def mismatch(prefill: NodeInfo, decode: NodeInfo) -> str | None:
    """Why the two cannot exchange blocks. None: they can."""
    try:
        prefill.layout.require_compatible(decode.layout, decode.node_id)
    except LayoutMismatch as error:
        return f"LayoutMismatch {error.message}"
    spoken, understood = ([e.transport for e in info.endpoints] for info in (prefill, decode))
    if spoken and understood and not set(spoken) & set(understood):
        return f"transport {', '.join(spoken)} of {prefill.node_id} != {', '.join(understood)} of {decode.node_id}"
    return None


class Pool:
    """The nodes that a router may use now, by incarnation. `with_prefill`: prefill nodes are meant to be among them."""

    def __init__(self, with_prefill: bool = True) -> None:
        self.faults = PairFaults()
        self._with_prefill = with_prefill
        self._nodes: dict[str, Node] = {}
        self._misfits: dict[tuple[str, str], str | None] = {}  # by the incarnations of a prefill and a decode node
        self._num_placed = 0

    def add(self, info: NodeInfo) -> None:
        """A node that is here already keeps its counts."""
        if node := self._nodes.get(info.incarnation):
            node.info = info
        else:
            self._nodes[info.incarnation] = Node(info, Load())
        self._compare()

    def remove(self, incarnation: str) -> Node | None:
        self.faults.forget(incarnation)
        removed = self._nodes.pop(incarnation, None)
        self._compare()
        return removed

    def get(self, incarnation: str) -> Node | None:
        return self._nodes.get(incarnation)

    def infos(self) -> list[NodeInfo]:
        """All nodes, also those that take no new work."""
        return [node.info for node in self._nodes.values()]

    def role(self, role: NodeRole) -> list[Node]:
        """The nodes of that role that take new work."""
        return [n for n in self._nodes.values() if n.info.role is role and not n.load.draining]

    def _compare(self) -> None:
        """Compare all prefill nodes with all decode nodes, once per change of the pool and not per request."""
        roles = ([n.info for n in self._nodes.values() if n.info.role is role] for role in NodeRole)
        self._misfits = {(p.incarnation, d.incarnation): mismatch(p, d) for p, d in itertools.product(*roles)}

    # ---- where to ----

    def choose(self, avoid: set[str], now: float) -> Placement | None:
        """The least busy pair that fits and works; else a decode node alone. Nodes in `avoid` are chosen only if there
        is no other. None: no node can take it at the moment. Raises NodeUnavailable with the reason if the present
        nodes do not fit together, so that waiting would not help."""
        prefills, decodes = self.role(NodeRole.PREFILL), self.role(NodeRole.DECODE)
        if not decodes:
            return None
        fitting = self._fitting(prefills, decodes)
        if prefills and not fitting:
            raise NodeUnavailable(self.why_not_ready() or "no node")

        def cost(pair: tuple[Node, Node]) -> tuple[object, ...]:
            prefill, decode = pair
            failed = sum(n.info.incarnation in avoid for n in pair)
            return failed, prefill.backlog, prefill.busy, decode.busy, prefill.info.node_id, decode.info.node_id

        if pairs := [(p, d) for p, d in fitting if not self.faults.is_out(_key(p, d), now)]:
            return Placement(*min(pairs, key=cost))
        return Placement(min(decodes, key=lambda n: (n.info.incarnation in avoid, n.backlog, n.busy)), None)

    def _fitting(self, prefills: list[Node], decodes: list[Node]) -> list[tuple[Node, Node]]:
        return [(p, d) for p in prefills for d in decodes if self._misfits[_key(p, d)] is None]

    # ---- what it was given ----

    def place(self, placement: Placement, num_tokens: int) -> None:
        """A prompt of so many tokens goes there. The caller follows with `prefilled` and `ended`, once each."""
        self._num_placed += 1
        placement.prefill.to_prefill += num_tokens
        placement.prefill.last_placed = self._num_placed
        placement.last.to_decode += num_tokens

    def prefilled(self, incarnation: str, num_tokens: int) -> None:
        """That prompt is computed, or no longer needed."""
        if node := self._nodes.get(incarnation):
            node.to_prefill -= num_tokens

    def ended(self, incarnation: str, num_tokens: int) -> None:
        """That request no longer generates there."""
        if node := self._nodes.get(incarnation):
            node.to_decode -= num_tokens

    # ---- for a person ----

    def why_not_ready(self) -> str | None:
        """Why no request would be answered. None: it would."""
        prefills, decodes = self.role(NodeRole.PREFILL), self.role(NodeRole.DECODE)
        if not decodes:
            return "no prefill node and no decode node" if self._with_prefill and not prefills else "no decode node"
        if not prefills or self._fitting(prefills, decodes):
            return None
        return f"no decode node: {self._misfits[_key(prefills[0], decodes[0])]}"

    def why_degraded(self, now: float) -> str | None:
        """Why requests are not answered as intended: decode nodes compute prompts, or certain nodes cannot work
        together. None: nothing is missing."""
        prefills, decodes = self.role(NodeRole.PREFILL), self.role(NodeRole.DECODE)
        reasons = ["no prefill node"] if self._with_prefill and not prefills else []
        for pair in itertools.product(prefills, decodes):
            key = _key(*pair)
            if reason := self._misfits[key] or self.faults.why_out(key, now):
                reasons.append(f"{pair[0].info.node_id} and {pair[1].info.node_id} do not work together: {reason}")
        return "; ".join(reasons) or None


def _key(prefill: Node, decode: Node) -> tuple[str, str]:
    return prefill.info.incarnation, decode.info.incarnation
