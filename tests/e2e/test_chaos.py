"""Ten minutes of chaos, in CI a score of faults: nothing hangs, nothing is wrong, nothing is left held.

`python -m pytest -m full -s tests/e2e/test_chaos.py` runs the ten and prints a report, which is in docs/chaos.md.
"""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack

import pytest

from tests.e2e.chaos import IN_FULL, Chaos, Report, ask_calmly, make_requests
from tests.e2e.client import Client
from tests.e2e.cluster import Cluster, Node, Role, wait_whole
from tests.e2e.link import Link

NUM_QUESTIONS = 60
NUM_NODES: dict[Role, int] = {"prefill": 2, "decode": 3}
FLAGS = ("--max-num-batched-tokens=64", "--num-gpu-blocks-override=512", "--async-scheduling")


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("seed", "seconds", "pause_s"),
    [(1, 30.0, (0.1, 0.6)), pytest.param(2, 600.0, (0.5, 3.0), marks=pytest.mark.full)],
    ids=["ci", "full"],
)
async def test_every_request_ends_once_and_right_amid_chaos(
    cluster: Cluster, seed: int, seconds: float, pause_s: tuple[float, float]
) -> None:
    async with AsyncExitStack() as stack:
        nodes, links = list[Node](), dict[str, Link]()
        for role, count in NUM_NODES.items():
            for i in range(count):
                link = await stack.enter_async_context(Link())
                node = cluster.node(role, f"{role}-{seed}-{i}", *FLAGS, f"--advertise={link.address}")
                link.target, node.address = node.address, link.address
                nodes.append(node)
                links[node.name] = link
        prefill, decode = ([node for node in nodes if node.role == role] for role in NUM_NODES)
        routers = [cluster.router(prefill, decode, name=f"router-{seed}-{i}") for i in range(2)]
        for router in routers:
            await asyncio.to_thread(router.wait_nodes, len(prefill), len(decode))

        report = Report(seed)
        async with Client(routers[0]) as client:
            questions = await ask_calmly(client, make_requests(seed, NUM_QUESTIONS))
        await Chaos(seed, nodes, routers, links, pause_s, report).run(questions, seconds)
        for router in routers:
            await asyncio.to_thread(router.wait_nodes, len(prefill), len(decode))
            await asyncio.to_thread(router.wait_states)
        await asyncio.to_thread(wait_whole, nodes)
        print(json.dumps(report.as_dict()))
        assert not report.wrong
        assert not report.hung
        assert report.ends[IN_FULL] > report.num_answerable / 2
        assert report.moved
        codes = await asyncio.gather(*(asyncio.to_thread(member.terminate) for member in (*routers, *nodes)))
        assert not any(codes), codes
