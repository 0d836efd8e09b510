"""Thousands of requests, many of them given up, on nodes that die and hang: each ends once, and nothing is left held.

`python -m pytest -m full -s tests/e2e/test_leaks.py` runs the 10,000 and prints what became of them.
"""

from __future__ import annotations

import asyncio
import json
import random
import time

import pytest

from tests.e2e.client import Client
from tests.e2e.cluster import Cluster, Node, Router, wait_whole
from tests.e2e.scenes import Fragile
from tests.e2e.storm import Storm, Tally, make_wishes

BLOCKS = "--num-gpu-blocks-override=256"
"""The least for one request of full length: what runs at once preempts, evicts and waits for room."""


@pytest.mark.timeout(300)
async def test_hundreds_of_requests_and_a_death_leave_nothing_behind(fragile: Fragile) -> None:
    wishes = make_wishes(seed=1, count=160)
    before = fragile.all.metric("baton:request_ends_total")
    async with Client(fragile.all) as client:
        storm = Storm(client, fragile.all, fragile.nodes, {80: fragile.decode[1]}, {})
        await storm.run(wishes, revive=False)
    tally = storm.tally
    assert tally.losses["killed"] == 1
    await check_whole(fragile.all, fragile.nodes, before, tally)


@pytest.mark.full
@pytest.mark.timeout(3600)
async def test_ten_thousand_requests_leave_nothing_behind(cluster: Cluster) -> None:
    began = time.monotonic()
    flags = ("--max-num-batched-tokens=128", BLOCKS, "--async-scheduling")
    nodes = [cluster.node(role, f"{role}-{i}", *flags) for role in ("prefill", "decode") for i in range(2)]
    router = cluster.router(nodes[:2], nodes[2:])
    await asyncio.to_thread(router.wait_nodes, 2, 2)
    draw = random.Random(2)
    wishes = make_wishes(seed=2, count=10_000)
    disturbed, calm = wishes[:9_000], wishes[9_000:]
    kills = {number: draw.choice(nodes) for number in range(300, len(disturbed), 600)}
    freezes = {number: draw.choice(nodes) for number in range(600, len(disturbed), 2400)}
    async with Client(router) as client:
        storm = Storm(client, router, nodes, kills, freezes)
        await storm.run(disturbed, revive=True)
        await storm.run(calm, revive=True)  # on nodes of which each has seen others die
    tally = storm.tally
    await check_whole(router, nodes, 0.0, tally)
    report = {
        "requests": len(wishes),
        "seconds": round(time.monotonic() - began, 1),
        "ends": dict(tally.ends),
        "nodes": dict(tally.losses),
        "router": ends_by_outcome(router),
    }
    for node in nodes:
        audit = node.audit()
        report[node.name] = {key: audit[key] for key in ("integrity", "num_blocks", "num_slots")}
    print(json.dumps(report))


async def check_whole(router: Router, nodes: list[Node], ends_before: float, tally: Tally) -> None:
    """The router has ended every request once, and no node that lives holds anything."""
    await asyncio.to_thread(router.wait_states)
    await asyncio.to_thread(wait_whole, [node for node in nodes if node.alive])
    ended = router.metric("baton:request_ends_total") - ends_before
    # of those that left some were gone before the router had read what they want
    assert tally.num_stayed <= ended <= tally.ends.total()
    assert tally.ends["finished"] > tally.num_stayed / 2


def ends_by_outcome(router: Router) -> dict[str, float]:
    outcomes = ("finished", "cancelled", "failed")
    return {outcome: router.metric("baton:request_ends_total", outcome=outcome) for outcome in outcomes}
