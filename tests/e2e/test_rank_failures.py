"""Nodes of several ranks in trouble: clients that leave, pools that are too small, ranks that die or hang. Answers are
right all the same, and blocks and slots whole."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.e2e import reference_file
from tests.e2e.client import Client
from tests.e2e.cluster import Cluster, Node, Role, wait_until
from tests.e2e.scenes import STATES, Director, Fragile, State
from tests.e2e.test_node_loss import check_right

pytestmark = pytest.mark.timeout(300)

DEGREES = {"prefill-0": 2, "decode-0": 4, "decode-1": 2}
STAGES = {"prefill-0": 2}


class Ranked(Fragile):
    """A prefill node of two stages of two ranks, and decode nodes of four ranks and of two, the latter with a small
    pool; `all` is in front of all, `pair` of the first of each kind, `small` of the others."""

    def __init__(self, cluster: Cluster) -> None:
        common, small = ("--max-model-len=1600", "--async-scheduling"), "--num-gpu-blocks-override=100"
        self.prefill = [ranked(cluster, "prefill-0", "--max-num-batched-tokens=16", small, *common)]
        large = ranked(cluster, "decode-0", "--num-gpu-blocks-override=400", *common)
        self.decode = [large, ranked(cluster, "decode-1", small, *common)]
        placed = "--policy=least-loaded"
        self.all = cluster.router(self.prefill, self.decode, placed, name="router-all")
        self.pair = self.late = cluster.router(self.prefill, self.decode[:1], placed, name="router-pair")
        self.small = cluster.router(self.prefill, self.decode[1:], placed, name="router-small")


def ranked(cluster: Cluster, name: str, *flags: str) -> Node:
    role: Role = "prefill" if name.startswith("prefill") else "decode"
    sizes = (f"--tensor-parallel-size={DEGREES[name]}", f"--pipeline-parallel-size={STAGES.get(name, 1)}")
    return cluster.node(role, name, *sizes, *flags)


def ranks_of(node: Node) -> list[int]:
    """The processes of ranks 1, 2, ..."""
    assert node._process is not None
    pid = node._process.pid
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.fixture(scope="module")
def nodes(cluster: Cluster) -> Ranked:
    return Ranked(cluster)


@pytest.fixture
async def ranked_nodes(nodes: Ranked) -> AsyncIterator[Ranked]:
    """All its processes run; and all nodes that live after the test are whole then."""
    await nodes.wait_ready()
    yield nodes
    try:
        await nodes.wait_whole()
    finally:
        nodes.repair()


@pytest.mark.parametrize("state", STATES)
async def test_a_client_leaves(ranked_nodes: Ranked, state: State) -> None:
    async with Client(ranked_nodes.pair) as client:
        stream = STATES.index(state) % 2 == 1
        scene = await Director(ranked_nodes, ranked_nodes.pair, client, stream=stream).scene(state)
        for held in {id(held): held for held in (scene.request, *scene.others)}.values():
            await held.request.leave()
        await asyncio.to_thread(ranked_nodes.pair.wait_states)
        scene.thaw()


async def test_forks_that_do_not_fit_the_pool(ranked_nodes: Ranked) -> None:
    """Sequences lose their blocks and are computed again, on all ranks alike."""
    cases = reference_file.load().of_kind("long")[:1] * 8
    await asyncio.to_thread(ranked_nodes.small.wait_nodes, 1, 1)
    node = ranked_nodes.decode[1]
    before = node.metric("baton:num_preemptions_total")
    async with Client(ranked_nodes.small) as client:
        asked = (client.complete(list(c.prompt), max_tokens=64, n=3, ignore_eos=True) for c in cases)
        answers = await asyncio.gather(*asked)
    assert [answer.error for answer in answers] == [None] * len(cases)
    for answer in answers:
        assert [tuple(answer.tokens[sample]) for sample in range(3)] == [cases[0].output[:64]] * 3
    assert node.metric("baton:num_preemptions_total") > before


@pytest.mark.parametrize(
    ("number", "state"),
    [(signal.SIGKILL, "decoding"), pytest.param(signal.SIGSTOP, "decoding", marks=pytest.mark.full)],
)
async def test_a_rank_of_a_decode_node_is_lost(ranked_nodes: Ranked, number: signal.Signals, state: State) -> None:
    """Its node ends, and the router goes on elsewhere."""
    async with Client(ranked_nodes.all) as client:
        scene = await Director(ranked_nodes, ranked_nodes.all, client, stream=True).scene(state)
        (node,) = scene.frozen
        assert node is ranked_nodes.decode[0]
        os.kill(ranks_of(node)[1], number)
        scene.thaw()
        answer = await scene.request.request.end()
        check_right(scene.request, answer)
        assert answer.timings["attempts"] == 2
        await asyncio.to_thread(wait_until, lambda: "it runs" if node.alive else None)
        assert "rank 2 (process" in node.log_tail()


@pytest.mark.parametrize(
    ("number", "rank", "state"),
    [
        (signal.SIGKILL, 3, "prefilling"),
        pytest.param(signal.SIGKILL, 1, "prefilling", marks=pytest.mark.full),
        pytest.param(signal.SIGKILL, 2, "handing_off", marks=pytest.mark.full),
        pytest.param(signal.SIGSTOP, 2, "prefilling", marks=pytest.mark.full),
    ],
)
async def test_a_rank_of_a_prefill_node_is_lost(
    ranked_nodes: Ranked, number: signal.Signals, rank: int, state: State
) -> None:
    """Of either stage. A decode node computes the prompt then."""
    async with Client(ranked_nodes.all) as client:
        scene = await Director(ranked_nodes, ranked_nodes.all, client, stream=False).scene(state)
        node = ranked_nodes.prefill[0]
        os.kill(ranks_of(node)[rank - 1], number)
        scene.thaw()
        check_right(scene.request, await scene.request.request.end())
        await asyncio.to_thread(wait_until, lambda: "it runs" if node.alive else None)
        assert f"rank {rank} (process" in node.log_tail()
