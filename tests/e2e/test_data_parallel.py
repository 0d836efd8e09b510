"""Data parallel nodes that divide a mixture's experts among them: the answers of transformers, wherever a request is,
and none lost when the nodes stop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from baton.address import HostPort
from deploy.ports import HeldPort
from tests.e2e.client import Client
from tests.e2e.cluster import Cluster, Node, Role, wait_until, wait_whole
from tests.e2e.random_model import MAX_TOKENS
from tests.e2e.reference_file import Reference
from tests.e2e.test_expert_parallel import embedded, eplb
from tests.summary import COMPARED, EXPERT_TIES

pytestmark = pytest.mark.timeout(300)

WAYS = {"1": (1, 1), "tp2": (1, 2), "dp2": (2, 1), "dp4": (4, 1), "dp2-tp2": (2, 2)}
"""Data parallel nodes, and ranks of each; whole experts are divided among all of them."""
CI = {("dp2", "dp2")}
CASES = [
    pytest.param(*case, marks=[] if case in CI else pytest.mark.full)
    for prefill in WAYS
    for decode in WAYS
    if "dp" in prefill + decode
    if (case := (prefill, decode))
]
FLAGS = ("--served-model-name=tiny", "--num-gpu-blocks-override=800", "--verify-transfers", "--drain-timeout=60")
LONG = 40


def start(cluster: Cluster, role: Role, way: str, port: HeldPort) -> list[Node]:
    size, num_ranks = WAYS[way]
    flags = [f"--model={embedded()[0]}", *FLAGS, f"--tensor-parallel-size={num_ranks}"]
    flags += ["--enable-expert-parallel"] if size * num_ranks > 1 else []
    flags += eplb(4) if size * num_ranks > 1 and role == "decode" else []
    meet = [f"--data-parallel-size={size}", f"--data-parallel-rpc-port={port.address.port}"] if size > 1 else []
    return [
        cluster.node(role, f"{role}-{rank}", *flags, *meet, *([f"--data-parallel-rank={rank}"] if size > 1 else []))
        for rank in range(size)
    ]


def free_port() -> HeldPort:
    return HeldPort(HostPort("127.0.0.1", 0))


@pytest.mark.parametrize(("prefill", "decode"), CASES)
async def test_answers_are_those_of_transformers_and_nodes_stop_together(
    prefill: str, decode: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """Each prompt twice, the second time from prefix caches. All nodes of a role have some. Experts of decode nodes
    change places meanwhile, alike on all nodes. Then one of them is told to stop while each has a request."""
    _, wanted = await asyncio.to_thread(embedded)
    with Cluster(tmp_path) as cluster, free_port() as one, free_port() as other:
        prefills, decodes = start(cluster, "prefill", prefill, one), start(cluster, "decode", decode, other)
        router = cluster.router(prefills, decodes, "--policy=round-robin", "--drain-timeout=60")
        await asyncio.to_thread(router.wait_ready)
        await asyncio.to_thread(router.wait_nodes, len(prefills), len(decodes))
        async with Client(router) as client:
            ties = sum([await check(client, wanted, prefills, decodes) for _ in range(2)])
            assert sum(node.metric("baton:prefix_cache_hits_total") for node in prefills)
            await asyncio.to_thread(wait_whole, (*prefills, *decodes))
            if len(decodes) > 1:
                await asyncio.to_thread(wait_until, lambda: why_not_rebalanced_alike(decodes))
            await stop_together(client, wanted[:4], decodes)
    record_property(COMPARED, 2 * len(wanted))
    record_property(EXPERT_TIES, ties)


async def check(client: Client, wanted: list[Reference], *pools: list[Node]) -> int:
    """The number of answers that left their references where a router's choice was nearly a tie."""
    asked = (client.complete(list(w.prompt), model="tiny", max_tokens=MAX_TOKENS, ignore_eos=True) for w in wanted)
    answers = await asyncio.gather(*asked)
    assert [answer.error for answer in answers] == [None] * len(wanted)
    found = [w.difference(answer.tokens[0], MAX_TOKENS) for w, answer in zip(wanted, answers, strict=True)]
    differences = [difference for difference in found if difference is not None]
    assert not [str(difference) for difference in differences if not difference.is_expert_tie]
    for pool in pools:
        assert {answer.timings[f"{pool[0].role}_node"] for answer in answers} == {node.name for node in pool}
    return len(differences)


def why_not_rebalanced_alike(nodes: list[Node]) -> str | None:
    """Each node takes part in the last steps at a moment of its own."""
    counts = [node.metric("baton:expert_rebalances_total") for node in nodes]
    return None if counts[0] and len(set(counts)) == 1 else f"they have rebalanced {counts} times"


async def stop_together(client: Client, wanted: list[Reference], nodes: list[Node]) -> None:
    """What is under way ends as it would have; all of them end in order."""
    running = [
        client.begin(list(w.prompt), stream=True, model="tiny", max_tokens=LONG, ignore_eos=True) for w in wanted
    ]
    for request in running:
        await request.until(1)
    nodes[-1].stop()
    assert any(len(request.answer.tokens[0]) < LONG for request in running), "none was under way"
    answers = [await request.end() for request in running]
    assert [(answer.error, len(answer.tokens[0])) for answer in answers] == [(None, LONG)] * len(wanted)
    assert [await asyncio.to_thread(node.wait_exit) for node in nodes] == [0] * len(nodes)
    assert not any("has ended" in node.log_tail() for node in nodes)


async def test_a_node_that_dies_ends_those_that_need_its_experts_and_no_request(tmp_path: Path) -> None:
    """Requests go on at a node that needs nobody; started anew, the nodes find each other again."""
    _, wanted = await asyncio.to_thread(embedded)
    with Cluster(tmp_path) as cluster, free_port() as port:
        peers = start(cluster, "decode", "dp2", port)
        alone = cluster.node("decode", "alone", f"--model={embedded()[0]}", *FLAGS)
        router = cluster.router([], [*peers, alone], "--policy=round-robin")
        await asyncio.to_thread(router.wait_nodes, 0, 3)
        async with Client(router) as client:
            running = [
                client.begin(list(w.prompt), stream=True, model="tiny", max_tokens=LONG, ignore_eos=True)
                for w in wanted[:6]
            ]
            for request in running:
                await request.until(1)
            peers[1].kill()
            answers = [await request.end() for request in running]
            assert [(answer.error, len(answer.tokens[0])) for answer in answers] == [(None, LONG)] * len(answers)
            for w, answer in zip(wanted, answers, strict=False):
                difference = w.difference(answer.tokens[0][:MAX_TOKENS], MAX_TOKENS)
                assert difference is None or difference.is_expert_tie
            await asyncio.to_thread(wait_until, lambda: "it runs" if peers[0].alive else None)
            assert "data parallel rank 1 has ended: the node ends" in peers[0].log_tail()
            for node in peers:
                node.start()
            await asyncio.to_thread(router.wait_nodes, 0, 3)
            await check(client, wanted, [*peers, alone])
