"""Nodes whose KV goes over another transport than UCX."""

from __future__ import annotations

import asyncio
from random import Random

import pytest

from tests.e2e.client import Client
from tests.e2e.cluster import Cluster, wait_whole
from tools import tiny_tasks

pytestmark = pytest.mark.timeout(300)

RECALL = tiny_tasks.recall(Random(19), "heldout", num_tokens=400, plain=True)


@pytest.mark.parametrize("transport", ["ipc", pytest.param("nixl", marks=pytest.mark.full)])
async def test_kv_before_and_after_a_node_was_killed(cluster: Cluster, transport: str) -> None:
    if transport == "nixl":
        pytest.importorskip("nixl_cu13", reason="the extra [nixl] is not installed")
    flag, name = f"--transport={transport}", f"decode-{transport}"
    prefill, decode = cluster.node("prefill", f"prefill-{transport}", flag), cluster.node("decode", name, flag)
    router = cluster.router([prefill], [decode])
    await asyncio.to_thread(router.wait_ready)
    async with Client(router) as client:
        first = await client.complete(RECALL.prompt, max_tokens=24)
        assert (first.status, first.timings["decode_node"]) == (200, name)
        assert RECALL.check(first.texts[0])
        decode.kill()
        decode.start()
        await asyncio.to_thread(router.wait_nodes, 1, 1)
        await asyncio.to_thread(router.wait_ready)
        second = await client.complete(RECALL.prompt, max_tokens=24)
        assert (second.status, second.timings["decode_node"], second.texts[0]) == (200, name, first.texts[0])
    await asyncio.to_thread(wait_whole, (prefill, decode))
    for node in (prefill, decode):
        assert node.terminate() == 0
