"""Nodes whose ranks are spread over several hosts, here as processes that share nothing but the network: the answers of
transformers, whatever is on which host; and whichever part is lost, all of the node ends in time, and says why."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

import pytest

from baton.address import HostPort
from deploy.ports import HeldPort
from tests.e2e import reference_file
from tests.e2e.asked_twice import check_twice
from tests.e2e.client import Client
from tests.e2e.cluster import Cluster, Node, Role, wait_until, wait_whole
from tests.e2e.test_expert_parallel import embedded, eplb, why_not_rebalanced

pytestmark = pytest.mark.timeout(300)

PROMPTS = slice(40, 76, 3)
"""Of 19 to 260 tokens: of several blocks, and in chunks, so that stages have different steps."""
TOKENS, LONG = 12, 120
COMMON = ("--num-gpu-blocks-override=400", "--verify-transfers")


@dataclass(frozen=True)
class Way:
    """How a node is divided: hosts, stages, ranks of each stage."""

    hosts: int
    stages: int
    ranks: int

    def start(self, cluster: Cluster, role: Role, port: HeldPort, *flags: str, name: str = "") -> list[Node]:
        sizes = (f"--pipeline-parallel-size={self.stages}", f"--tensor-parallel-size={self.ranks}")
        meet = (f"--nnodes={self.hosts}", f"--master-addr={port.address.host}", f"--master-port={port.address.port}")
        return [
            cluster.node(role, f"{name or role}-{rank}", *sizes, *meet, f"--node-rank={rank}", *flags)
            for rank in range(self.hosts)
        ]


def free_port() -> HeldPort:
    return HeldPort(HostPort("127.0.0.1", 0))


WAYS = [
    pytest.param(Way(2, 2, 1), Way(1, 1, 1), marks=pytest.mark.full),
    (Way(2, 2, 2), Way(2, 1, 2)),
    pytest.param(Way(2, 1, 2), Way(1, 1, 2), marks=pytest.mark.full),
    pytest.param(Way(2, 1, 4), Way(2, 1, 4), marks=pytest.mark.full),
    pytest.param(Way(3, 3, 2), Way(1, 1, 1), marks=pytest.mark.full),
    pytest.param(Way(4, 2, 2), Way(1, 1, 2), marks=pytest.mark.full),
]


@pytest.mark.parametrize(("prefill", "decode"), WAYS)
async def test_answers_are_those_of_transformers_and_hosts_stop_together(
    tmp_path: Path, prefill: Way, decode: Way
) -> None:
    """Stages on a host each, stages of two ranks, stages across hosts. A host that is told to stop stops the node."""
    with Cluster(tmp_path) as cluster, free_port() as one, free_port() as other:
        prefills = prefill.start(cluster, "prefill", one, "--max-num-batched-tokens=64", *COMMON)
        decodes = decode.start(cluster, "decode", other, *COMMON)
        await check_twice(cluster, prefills[0], decodes[0], PROMPTS)
        prefills[-1].stop()
        decodes[0].stop()
        hosts = (*prefills, *decodes)
        assert [await asyncio.to_thread(host.wait_exit) for host in hosts] == [0] * len(hosts)
        assert not any("has ended" in host.log_tail() for host in hosts)


def test_hosts_wait_for_each_other_as_long_as_they_are_told_to(tmp_path: Path) -> None:
    flags = ("--tensor-parallel-size=2", "--nnodes=2", "--distributed-timeout-seconds=0.5")
    with Cluster(tmp_path) as cluster, free_port() as one, free_port() as other:
        first = cluster.node("decode", "first", *flags, "--node-rank=0", f"--master-port={one.address.port}")
        second = cluster.node("decode", "second", *flags, "--node-rank=1", f"--master-port={other.address.port}")
        assert [host.wait_exit() for host in (first, second)] == [1, 1]
        assert "--nnodes: node rank 1 of 2 did not connect" in first.log_tail()
        assert "--master-addr: could not reach" in second.log_tail()
        assert all("within 0.5 s" in host.log_tail() for host in (first, second))


@pytest.mark.full
@pytest.mark.parametrize("lost", [0, 1])
async def test_a_host_that_is_lost_ends_the_node_and_no_request(tmp_path: Path, lost: int) -> None:
    """While prompts are computed there: they go on at a decode node. Started anew, the hosts find each other again."""
    cases = reference_file.load().of_kind("long")[1:]  # the first prompt would be done before anybody looks
    with Cluster(tmp_path) as cluster, free_port() as port:
        hosts = Way(2, 2, 2).start(cluster, "prefill", port, "--max-num-batched-tokens=12", *COMMON)
        decode = cluster.node("decode", "decode", *COMMON)
        router = cluster.router(hosts[:1], [decode], "--policy=least-loaded")
        await asyncio.to_thread(router.wait_nodes, 1, 1)
        async with Client(router) as client:
            for computed_by in ("decode", "prefill"):
                asked = [client.begin(list(case.prompt), max_tokens=TOKENS, ignore_eos=True) for case in cases]
                if computed_by == "decode":
                    await asyncio.to_thread(router.wait_states, prefilling=1, queued=len(cases) - 1)
                    hosts[lost].kill()
                answers = [await request.end() for request in asked]
                assert [answer.error for answer in answers] == [None] * len(cases)
                assert [tuple(a.tokens[0]) for a in answers] == [case.output[:TOKENS] for case in cases]
                if computed_by == "decode":
                    # 3: the decode node misses a rank's parts, and says so, before the router misses the prefill node
                    assert {answer.timings["attempts"] for answer in answers} <= {2, 3}
                    assert await asyncio.to_thread(hosts[1 - lost].wait_exit) == 1
                    assert f"node rank {lost} has ended" in hosts[1 - lost].log_tail()
                    for host in hosts:
                        host.start()
                    await asyncio.to_thread(router.wait_nodes, 1, 1)


@pytest.mark.full
@pytest.mark.parametrize("leaves", [0, 1])
async def test_streams_move_between_nodes_of_several_hosts(tmp_path: Path, leaves: int) -> None:
    """With their KV, when any host of a decode node is told to stop."""
    cases = [case for case in reference_file.load().of_kind("long") if len(case.output) >= LONG][:2] * 2
    with Cluster(tmp_path) as cluster, free_port() as one, free_port() as other:
        leaving = Way(2, 1, 2).start(cluster, "decode", one, *COMMON, "--async-scheduling")
        staying = Way(2, 1, 4).start(cluster, "decode", other, *COMMON, name="staying")
        router = cluster.router([], [leaving[0], staying[0]], "--policy=round-robin")
        await asyncio.to_thread(router.wait_nodes, 0, 2)
        async with Client(router) as client:
            asked = [client.begin(list(case.prompt), stream=True, max_tokens=LONG, ignore_eos=True) for case in cases]
            for request in asked:
                await request.until(2)
            leaving[leaves].stop()
            answers = [await request.end() for request in asked]
        assert [answer.error for answer in answers] == [None] * len(cases)
        assert [tuple(answer.tokens[0]) for answer in answers] == [case.output[:LONG] for case in cases]
        assert {answer.timings["attempts"] for answer in answers} == {1}
        assert sum(answer.timings["moves"] for answer in answers) > 0, "none was under way"
        assert [await asyncio.to_thread(host.wait_exit) for host in leaving] == [0, 0]
        await asyncio.to_thread(wait_whole, staying[:1])


@pytest.mark.full
async def test_experts_are_on_several_hosts_and_change_places(tmp_path: Path) -> None:
    """Whole experts, whose weights travel from host to host while the node serves."""
    folder, wanted = await asyncio.to_thread(embedded)
    blocks = "--num-gpu-blocks-override=700"  # layers with windows have blocks of their own
    flags = (f"--model={folder}", "--served-model-name=tiny", "--enable-expert-parallel", *COMMON, blocks)
    with Cluster(tmp_path) as cluster, free_port() as one, free_port() as other:
        prefills = Way(2, 1, 2).start(cluster, "prefill", one, *flags, "--max-num-batched-tokens=64")
        decodes = Way(2, 1, 2).start(cluster, "decode", other, *flags, *eplb(4))
        await check_twice(cluster, prefills[0], decodes[0], wanted[::2], model="tiny")
        await asyncio.to_thread(wait_until, lambda: why_not_rebalanced(decodes[0]))
