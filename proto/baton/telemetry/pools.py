"""The prefill and the decode nodes as two pools: how full each is, and which of them limits the throughput."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from prometheus_client import CollectorRegistry, Gauge

FULL = 0.9
"""From this share of its KV blocks or seats on a decode pool counts as full: what comes waits."""

Bottleneck = Literal["prefill", "decode", "none"]
BOTTLENECKS: tuple[Bottleneck, ...] = ("prefill", "decode", "none")


@dataclass(frozen=True, slots=True)
class PoolState:
    """The sums over a pool's nodes, as of their last reports, whichever routers their requests come from. `num_seats`:
    requests that may run at once. `num_withheld`: requests that this router keeps until a node of the pool has room.
    `capacities`: KV blocks by their size in tokens, as the nodes were started with."""

    num_nodes: int = 0
    num_waiting: int = 0
    num_running: int = 0
    num_seats: int = 0
    num_blocks_used: int = 0
    num_blocks: int = 0
    num_withheld: int = 0
    capacities: Mapping[int, int] = field(default_factory=dict)

    @property
    def kv_blocks(self) -> float:
        """The share in use."""
        return self.num_blocks_used / self.num_blocks if self.num_blocks else 0.0

    @property
    def seats(self) -> float:
        return self.num_running / self.num_seats if self.num_seats else 0.0

    @property
    def is_full(self) -> bool:
        return max(self.kv_blocks, self.seats) >= FULL


def bottleneck(prefill: PoolState, decode: PoolState) -> Bottleneck:
    """Which pool to grow, by rules, in this order:

    - decode, if requests wait for room on it at the router; or if it is full and requests wait for it: handoffs that it
      has no room for, or prompts of its own. Prompts then wait on prefill nodes as well, but more of those would not
      help.
    - prefill, if at least one prompt waits there for each node, behind the one that is computed.
    - decode, if there are no prefill nodes and at least one prompt waits for each decode node.
    - none.
    """
    if decode.num_withheld or (decode.num_waiting and decode.is_full):
        return "decode"
    if prefill.num_nodes and prefill.num_waiting >= prefill.num_nodes:
        return "prefill"
    if not prefill.num_nodes and decode.num_nodes and decode.num_waiting >= decode.num_nodes:
        return "decode"
    return "none"


class PoolMetrics:
    """Gauges of a router, of what its nodes last said."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._requests = Gauge(
            "baton:pool_requests",
            "Requests on the nodes of a pool, waiting or running, of all routers.",
            ["pool", "state"],
            registry=registry,
        )
        self._utilization = Gauge(
            "baton:pool_utilization",
            "Share of a pool in use: of its kv_blocks, and of its seats for running requests; 1 is all.",
            ["pool", "resource"],
            registry=registry,
        )
        self._capacity = Gauge(
            "baton:pool_kv_blocks",
            "KV blocks that the nodes of a pool have, in use or not, by their size in tokens.",
            ["pool", "block_size"],
            registry=registry,
        )
        self._bottleneck = Gauge(
            "baton:bottleneck",
            "1 for the pool that limits the throughput now, by rules: prefill, decode, none.",
            ["pool"],
            registry=registry,
        )

    def set(self, pools: Mapping[str, PoolState]) -> None:
        """By role."""
        for name, pool in pools.items():
            self._requests.labels(name, "waiting").set(pool.num_waiting)
            self._requests.labels(name, "running").set(pool.num_running)
            self._utilization.labels(name, "kv_blocks").set(pool.kv_blocks)
            self._utilization.labels(name, "seats").set(pool.seats)
        self._capacity.clear()  # nodes with blocks of another size may be gone
        for name, pool in pools.items():
            for block_size, num_blocks in pool.capacities.items():
                self._capacity.labels(name, str(block_size)).set(num_blocks)
        found = bottleneck(pools["prefill"], pools["decode"])
        for kind in BOTTLENECKS:
            self._bottleneck.labels(kind).set(kind == found)
