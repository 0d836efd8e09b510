"""What a router knows of its nodes, as an operator reads it at `/debug/nodes` and `/admin/nodes`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from baton.messages import Load
from router.discovery.membership import Wanted
from router.nodes.cluster import Cluster
from router.nodes.dispatcher import Dispatcher
from router.nodes.links import NodeLink
from router.versions import version_of


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
    """`state`: see LinkState. `problem`: why the node gets no work. `sources`: what wants the node; none: it is going.
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
class IncompatiblePair:
    """Two nodes, by id, between which no request is handed over."""

    prefill: str
    decode: str
    reason: str


@dataclass(frozen=True, slots=True)
class NodesReport:
    """`problems`: of the sources of nodes."""

    nodes: tuple[NodeReport, ...]
    unpaired: tuple[IncompatiblePair, ...]
    problems: tuple[str, ...]


def report_node(link: NodeLink, cluster: Cluster, dispatcher: Dispatcher) -> NodeReport:
    return _report(link, cluster.membership.wanted().get(link.address), dispatcher)


def _report(link: NodeLink, wanted: Wanted | None, dispatcher: Dispatcher) -> NodeReport:
    sources = wanted.sources if wanted else ()
    report = NodeReport(str(link.address), link.role.value, link.state.value, link.problem, sources)
    if (info := link.info) is None:
        return report
    load = dispatcher.load_of(info.incarnation)
    return dataclasses.replace(
        report,
        node_id=info.node_id,
        incarnation=info.incarnation,
        model=info.served_model_name,
        model_version=version_of(info).id,
        fingerprint=info.layout.fingerprint,
        version=info.version,
        metrics_address=info.metrics_address or None,
        load=NodeLoad.of(load) if load else None,
    )


def report_nodes(cluster: Cluster, dispatcher: Dispatcher) -> NodesReport:
    wanted = cluster.membership.wanted()
    return NodesReport(
        tuple(_report(link, wanted.get(link.address), dispatcher) for link in cluster.links),
        tuple(IncompatiblePair(p.node_id, d.node_id, reason) for p, d, reason in dispatcher.mismatched_pairs()),
        tuple(cluster.membership.problems()),
    )
