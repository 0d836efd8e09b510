"""Ten minutes of chaos, in CI a score of faults: nothing hangs, nothing is wrong, nothing is left held.

`python -m pytest -m full -s tests/e2e/test_chaos.py` runs the ten and prints a report, which is in docs/chaos.md.
"""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack
from dataclasses import dataclass

import pytest

from tests.e2e.chaos import IN_FULL, Chaos, Report, ask_calmly, make_requests
from tests.e2e.client import Client
from tests.e2e.cluster import Cluster, Node, Role, wait_whole
from tests.e2e.link import Link

NUM_NODES: dict[Role, int] = {"prefill": 2, "decode": 3}
FLAGS = ("--max-num-batched-tokens=64", "--num-gpu-blocks-override=512", "--async-scheduling")


@dataclass(frozen=True)
class Run:
    """`pace`: see `Chaos`. `silence_s`: after which a node or a router is missed; some faults last longer."""

    seed: int
    seconds: float
    num_questions: int
    pause_s: tuple[float, float]
    pace: float
    silence_s: float


CI = Run(seed=1, seconds=15.0, num_questions=30, pause_s=(0.05, 0.2), pace=0.35, silence_s=1.75)
"""All that faults wait for takes a third of the time, so that there is a score of them all the same."""
FULL = Run(seed=2, seconds=600.0, num_questions=60, pause_s=(0.5, 3.0), pace=1.0, silence_s=5.0)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("plan", [CI, pytest.param(FULL, marks=pytest.mark.full)], ids=["ci", "full"])
async def test_every_request_ends_once_and_right_amid_chaos(cluster: Cluster, plan: Run) -> None:
    seed, silence = plan.seed, f"--silence-timeout={plan.silence_s}"
    async with AsyncExitStack() as stack:
        nodes, links = list[Node](), dict[str, Link]()
        for role, count in NUM_NODES.items():
            for i in range(count):
                link = await stack.enter_async_context(Link())
                node = cluster.node(role, f"{role}-{seed}-{i}", *FLAGS, silence, f"--advertise={link.address}")
                link.target, node.address = node.address, link.address
                nodes.append(node)
                links[node.name] = link
        prefill, decode = ([node for node in nodes if node.role == role] for role in NUM_NODES)
        routers = [cluster.router(prefill, decode, silence, name=f"router-{seed}-{i}") for i in range(2)]
        for router in routers:
            await asyncio.to_thread(router.wait_nodes, len(prefill), len(decode))

        report = Report(seed)
        async with Client(routers[0]) as client:
            questions = await ask_calmly(client, make_requests(seed, plan.num_questions))
        await Chaos(seed, nodes, routers, links, plan.pause_s, plan.pace, report).run(questions, plan.seconds)
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
