"""The cluster that ordinary end-to-end tests share, and the logs of all processes beside every failure."""

from __future__ import annotations

from collections.abc import AsyncIterator, Generator, Iterator
from dataclasses import dataclass

import pytest

from tests import shares
from tests.e2e.cluster import Cluster, Node, Router, wait_whole
from tests.e2e.scenes import Fragile

_clusters: list[Cluster] = []
_marks: dict[str, int] = {}


@dataclass(frozen=True)
class House:
    """Two prefill nodes and two decode nodes; several routers, each in front of one pair of them.

    `chunk_64` and `chunk_2048`: prompts go in chunks of so many tokens, and are handed to the same decode node, so that
    a test can have a prompt cached on either side alone; `chunk_2048` leaves first tokens to the decode node. `small`:
    in front of the decode node whose pool holds one request of full length and no more. `alone`: in front of the other
    decode node, which then computes prompts too. Of likely tokens, `chunk_64` tells the logprobs of 50, `chunk_2048`
    and `alone` of all, and `small` of as many as by default.
    """

    cluster: Cluster
    nodes: tuple[Node, ...]
    chunk_64: Router
    chunk_2048: Router
    small: Router
    alone: Router

    def wait_whole(self) -> None:
        wait_whole(self.nodes)


@pytest.fixture(scope="session")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    with Cluster(tmp_path_factory.mktemp("house")) as cluster:
        _clusters.append(cluster)
        blocks = "--num-gpu-blocks-override=4096"
        narrow = cluster.node("prefill", "prefill-64", "--max-num-batched-tokens=64", blocks, "--max-logprobs=50")
        ahead = "--async-scheduling"  # as on a GPU; the other two retire each step before the next
        every = "--max-logprobs=-1"
        groups = "--kv-layer-groups=3"
        wide = cluster.node("prefill", "prefill-2048", "--max-num-batched-tokens=2048", blocks, ahead, groups, every)
        decode = cluster.node("decode", "decode-large", blocks, ahead, "--verify-transfers", every)
        small = cluster.node("decode", "decode-small", "--num-gpu-blocks-override=256")
        late = "--first-token=decode"
        routers = [cluster.router([narrow], [decode]), cluster.router([wide], [decode], late)]
        routers += [cluster.router([wide], [small]), cluster.router([], [decode])]
        for router in routers:
            router.wait_ready()
        yield House(cluster, (narrow, wide, decode, small), *routers)
        _clusters.remove(cluster)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """An empty one, of this module's own."""
    with Cluster(tmp_path_factory.mktemp("cluster")) as cluster:
        _clusters.append(cluster)
        yield cluster
        _clusters.remove(cluster)


@pytest.fixture(scope="session")
def breakable(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fragile]:
    with Cluster(tmp_path_factory.mktemp("breakable")) as cluster:
        _clusters.append(cluster)
        yield Fragile(cluster)
        _clusters.remove(cluster)


@pytest.fixture
async def fragile(breakable: Fragile) -> AsyncIterator[Fragile]:
    """All its processes run; and all nodes that live after the test are whole then."""
    await breakable.wait_ready()
    yield breakable
    try:
        await breakable.wait_whole()
    finally:
        breakable.repair()


@pytest.fixture(autouse=True)
def _mark_logs() -> None:
    """Where this test's lines begin."""
    _marks.update({str(m.log): m.log.stat().st_size for c in _clusters for m in c.members if m.log.exists()})


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """A parallel worker runs all tests of a cluster one after the other. Until the session ends, each idle process of
    it would cost a second."""
    is_last = nextitem is None or shares.share_of(item.nodeid) != shares.share_of(nextitem.nodeid)
    if is_last and hasattr(item.config, "workerinput"):
        for cluster in _clusters:
            cluster.close()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        for member in (member for cluster in _clusters for member in cluster.members):
            if text := member.log_tail(_marks.get(str(member.log), 0)):
                report.sections.append((f"log of {member.name}", text))
    return report
