"""What a router knows of its nodes, as an operator reads it at `/debug/nodes`, `/admin/nodes` and
`/debug/prefix_index`."""

from __future__ import annotations

import dataclasses
import enum
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from baton.messages import Load
from baton.node_info import NodeRole
from router.discovery.membership import Wanted
from router.nodes.cluster import Cluster
from router.nodes.links import NodeLink
from router.placement.pool import Pool
from router.requests.core import RouterCore
from router.versions import version_of


class NodeState(enum.Enum):
    """CONNECTING --Subscribed--> UP --drain--> DRAINING --nothing left, or lost--> (gone)
    ^                       |  ^             |
    `--------- lost --------'  `--- resume --'

    In place of UP, STOPPING: it says so itself; INCOMPATIBLE: it fits none of the other role; and AVOIDED: its circuit
    breaker is open.
    """

    CONNECTING = "connecting"
    UP = "up"
    INCOMPATIBLE = "incompatible"
    AVOIDED = "avoided"
    DRAINING = "draining"
    STOPPING = "stopping"


_METRIC_STATES = {
    NodeState.UP: "up",
    NodeState.AVOIDED: "up",
    NodeState.INCOMPATIBLE: "incompatible",
    NodeState.CONNECTING: "down",
    NodeState.DRAINING: "down",
    NodeState.STOPPING: "down",
}
"""As what metrics count each of them."""


@dataclass(frozen=True, slots=True)
class NodeLoad:
    """As the node said last, of all its routers' work."""

    num_waiting: int
    num_running: int
    num_blocks_free: int
    num_blocks_total: int

    @classmethod
    def of(cls, load: Load) -> NodeLoad:
        return cls(load.num_waiting, load.num_running, load.num_blocks_free, load.num_blocks_total)


@dataclass(frozen=True, slots=True)
class NodeReport:
    """`state`: see NodeState. `problem`: why the node gets no work. `sources`: what wants the node; none: it is going.
    The rest is None while the node is not connected. `model_version`: nodes of one may take over each other's requests.
    `version`: of its software. `metrics_address`: of its page /metrics."""

    address: str
    role: str
    state: str
    problem: str | None
    sources: Sequence[str]
    node_id: str | None = None
    incarnation: str | None = None
    model: str | None = None
    model_version: str | None = None
    fingerprint: str | None = None
    version: str | None = None
    metrics_address: str | None = None
    load: NodeLoad | None = None


@dataclass(frozen=True, slots=True)
class UnusedPair:
    """Two nodes, by id, between which no request is handed over: ever, or for a while."""

    prefill: str
    decode: str
    reason: str


@dataclass(frozen=True, slots=True)
class NodesReport:
    """`problems`: of the sources of nodes."""

    nodes: tuple[NodeReport, ...]
    unpaired: tuple[UnusedPair, ...]
    problems: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class IndexedNode:
    node_id: str
    role: str
    incarnation: str
    num_blocks: int


@dataclass(frozen=True, slots=True)
class PrefixIndexReport:
    """`num_blocks`: different ones, which one node or several hold."""

    num_blocks: int
    nodes: tuple[IndexedNode, ...]


_Unused = Mapping[str, tuple[NodeState, str]]
"""Nodes, by incarnation, that are connected and get no work, and why."""


def report_node(link: NodeLink, cluster: Cluster) -> NodeReport:
    return _report(link, cluster.membership.wanted().get(link.address), cluster.pool, _unused(cluster.pool))


def _report(link: NodeLink, wanted: Wanted | None, pool: Pool, unused: _Unused) -> NodeReport:
    sources = wanted.sources if wanted else ()
    state, problem = _state(link, unused)
    report = NodeReport(str(link.address), link.role.value, state.value, problem, sources)
    if (info := link.info) is None:
        return report
    node = pool.get(info.incarnation)
    return dataclasses.replace(
        report,
        node_id=info.node_id,
        incarnation=info.incarnation,
        model=info.served_model_name,
        model_version=version_of(info).id,
        fingerprint=info.layout.fingerprint,
        version=info.version,
        metrics_address=info.metrics_address or None,
        load=NodeLoad.of(node.load) if node else None,
    )


def _unused(pool: Pool) -> _Unused:
    unused: dict[str, tuple[NodeState, str]] = {}
    for name, why in pool.avoided(time.monotonic()).items():
        unused[name] = NodeState.AVOIDED, f"is avoided for a while, since it fails: {why}"
    for name, why in pool.without_partner().items():
        unused[name] = NodeState.INCOMPATIBLE, f"fits none of the other role: {why}"
    return unused


def _state(link: NodeLink, unused: _Unused) -> tuple[NodeState, str | None]:
    """And why the node gets no work."""
    if link.info is None:
        return NodeState.CONNECTING, link.problem
    if link.problem:
        return NodeState.DRAINING if link.draining else NodeState.STOPPING, link.problem
    return unused.get(link.info.incarnation, (NodeState.UP, None))


def report_nodes(cluster: Cluster) -> NodesReport:
    pool, wanted = cluster.pool, cluster.membership.wanted()
    unused, unpaired = _unused(pool), pool.unused_pairs(time.monotonic())
    return NodesReport(
        tuple(_report(link, wanted.get(link.address), pool, unused) for link in cluster.links),
        tuple(UnusedPair(p.node_id, d.node_id, reason) for p, d, reason in unpaired),
        tuple(cluster.membership.problems()),
    )


def num_nodes_by_state(cluster: Cluster) -> dict[tuple[str, str], int]:
    """Nodes by role and one of the states of metrics: one that is in use at one of its addresses counts once."""
    links, unused = cluster.links, _unused(cluster.pool)
    in_use = {link.incarnation for link in links if link.info}
    nodes = [link for link in links if link.info or link.incarnation not in in_use]
    counts = Counter((link.role.value, _METRIC_STATES[_state(link, unused)[0]]) for link in nodes)
    return {(role.value, state): counts[role.value, state] for role in NodeRole for state in _METRIC_STATES.values()}


def report_prefix_index(core: RouterCore) -> PrefixIndexReport:
    """How much is known of the nodes' prefix caches: prefill nodes first, each role by the nodes' ids."""
    index = core.prefix_index
    nodes = sorted(core.pool.infos(), key=lambda n: (n.role is not NodeRole.PREFILL, n.node_id))
    known = (IndexedNode(n.node_id, n.role.value, n.incarnation, index.num_blocks(n.incarnation)) for n in nodes)
    return PrefixIndexReport(len(index), tuple(known))
