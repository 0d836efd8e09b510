"""Links come and go as the wanted set changes: one to an address at a time, and each one ends."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.address import HostPort
from baton.node_info import NodeRole
from baton.rpc.trust import Trust
from baton.telemetry import ROUTER, RouterMetrics, new_registry, request_scope
from router.discovery.membership import Membership
from router.discovery.source import Found, Member
from router.nodes.cluster import NUM_TOLD, Cluster, Readiness
from router.nodes.dispatcher import Dispatcher
from router.nodes.links import NodeLink
from router.nodes.report import num_nodes_by_state
from router.request_metrics import RequestMetrics
from router.requests.core import RouterCore
from router.text.models import Models
from tests.router.rig import info

ADDRESSES = [HostPort("node", port) for port in (1, 2, 3)]
NODE = Member(NodeRole.DECODE, ADDRESSES[0])


class FakeLink(NodeLink):
    """A link that is up when a test says so, and has finished what it has likewise."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.finished = asyncio.Event()

    def connect(self) -> None:
        self.info = self.info or info(f"{self.role.value}-{self.address}", self.role)
        self.incarnation = self.info.incarnation
        self.problem = None

    def finish(self) -> None:
        """What it had."""
        self.finished.set()

    async def run(self) -> None:
        self.context = contextvars.copy_context()
        try:
            while not self.draining:
                await self.finished.wait()
                self.finished.clear()
        finally:
            self.info = None


class Nodes:
    """A cluster of such links, with one source."""

    label = "test"

    def __init__(self) -> None:
        self.problem: str | None = None
        metrics = RequestMetrics(RouterMetrics(new_registry(ROUTER)), lambda: "m")
        core = RouterCore(1)
        self.dispatcher = Dispatcher(core, metrics)
        self.links: list[FakeLink] = []
        self.found: Found = lambda members: None
        membership = Membership([], [self])
        self.cluster = Cluster(self.connect, core.pool, Models(), membership, 3600.0)

    async def run(self, found: Found) -> None:
        self.found = found
        await asyncio.Event().wait()

    def connect(self, member: Member, changed: Callable[[], None]) -> FakeLink:
        link = FakeLink(member.address, member.role, 1, self.dispatcher, Models(), changed, Trust(), 2.5)
        self.links.append(link)
        return link

    @property
    def live(self) -> list[FakeLink]:
        names = {task.get_name() for task in asyncio.all_tasks() if not task.done()}
        assert len(names) == len(asyncio.all_tasks()), "two tasks of one name: two links to one address"
        return [link for link in self.cluster.links if isinstance(link, FakeLink)]


async def turn() -> None:
    for _ in range(4):
        await asyncio.sleep(0)


async def with_a_node() -> Nodes:
    """A cluster that has found NODE, to which its link is not up yet."""
    nodes = Nodes()
    nodes.cluster.start()
    await turn()
    nodes.found(frozenset({NODE}))
    await turn()
    return nodes


OPERATION = st.one_of(
    st.tuples(st.just("found"), st.dictionaries(st.sampled_from(ADDRESSES), st.sampled_from(list(NodeRole)))),
    st.tuples(st.sampled_from(["add", "remove", "drain", "connect", "finish", "turn"]), st.sampled_from(ADDRESSES)),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(OPERATION, max_size=25))
def test_links_follow_the_wanted_set(operations: list[tuple[str, object]]) -> None:
    asyncio.run(follow(operations))


async def follow(operations: list[tuple[str, object]]) -> None:
    nodes = Nodes()
    cluster, membership = nodes.cluster, nodes.cluster.membership
    cluster.start()
    await turn()
    for name, argument in operations:
        if isinstance(argument, dict):
            nodes.found(frozenset(Member(role, address) for address, role in argument.items()))
            continue
        assert isinstance(argument, HostPort)
        link = cluster.find(str(argument))
        if name == "turn":
            await turn()
        elif name == "add":
            with contextlib.suppress(ValueError):  # it has the other role
                membership.add(Member(NodeRole.DECODE, argument))
        elif isinstance(link, FakeLink):
            operate(cluster, link, name)
        assert len({link.address for link in cluster.links}) == len(cluster.links)
        assert {link.address for link in cluster.links} >= membership.wanted().keys()
    for _ in range(3):  # an address may change its role, and a drained node be wanted again
        for link in nodes.live:
            link.finish()
        await turn()
    wanted = {address: node.member.role for address, node in membership.wanted().items()}
    assert {link.address: link.role for link in nodes.live} == wanted
    assert not any(link.draining for link in nodes.live)
    await cluster.close()
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_of_many_nodes_with_problems_a_few_are_told() -> None:
    nodes = Nodes()
    nodes.cluster.start()
    await turn()
    for number in (NUM_TOLD, NUM_TOLD + 30):
        nodes.found(frozenset(Member(NodeRole.DECODE, HostPort("node", port)) for port in range(1, number + 1)))
        why_not = nodes.cluster.readiness().why_not
        assert why_not
        assert why_not.count("not reached yet") == NUM_TOLD
        assert why_not.endswith("; and 30 more)") is (number > NUM_TOLD)
    await nodes.cluster.close()


def operate(cluster: Cluster, link: FakeLink, name: str) -> None:
    if name == "remove":
        cluster.remove(link)
    elif name == "drain":
        cluster.membership.exclude(link.address)
    elif name == "connect":
        link.connect()
    elif name == "finish":
        link.finish()


async def test_a_drain_ends_by_its_deadline() -> None:
    nodes = Nodes()
    nodes.cluster._drain_timeout_s = 0.0
    nodes.cluster.start()
    await turn()
    nodes.found(frozenset({Member(NodeRole.DECODE, ADDRESSES[0])}))
    await turn()
    (link,) = nodes.live
    link.connect()
    nodes.found(frozenset())
    assert link.draining
    assert num_nodes_by_state(nodes.cluster)["decode", "down"] == 1
    ended = asyncio.Event()
    nodes.cluster.watch(lambda _: None if nodes.cluster.links else ended.set())
    await asyncio.wait_for(ended.wait(), 5)
    await nodes.cluster.close()


async def test_a_drained_node_that_is_wanted_again_stays() -> None:
    """Beyond the deadline by which it had to finish."""
    nodes = Nodes()
    nodes.cluster._drain_timeout_s = 0.0
    nodes.cluster.start()
    await turn()
    member = Member(NodeRole.DECODE, ADDRESSES[0])
    nodes.found(frozenset({member}))
    await turn()
    (link,) = nodes.live
    link.connect()
    nodes.found(frozenset())
    assert link.problem == "is drained, and finishes what it has"
    nodes.found(frozenset())
    nodes.found(frozenset({member}))
    assert not link.draining
    await turn()
    link.finish()
    await turn()
    assert nodes.live == [link]
    await nodes.cluster.close()


async def test_a_node_that_is_wanted_in_the_other_role_is_connected_to_anew_once_it_has_finished(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What it serves stays known until its address is wanted no more."""
    nodes, forgotten = Nodes(), list[str]()
    monkeypatch.setattr(nodes.cluster._models, "forget", forgotten.append)
    nodes.cluster.start()
    await turn()
    for role in (NodeRole.DECODE, NodeRole.PREFILL):
        nodes.found(frozenset({Member(role, ADDRESSES[0])}))
        for link in nodes.live:
            link.finish()
        await turn()
        (link,) = nodes.live
        assert link.role is role
        link.connect()
    assert not forgotten
    nodes.found(frozenset())
    link.finish()
    await turn()
    assert nodes.live == []
    assert forgotten == [str(ADDRESSES[0])]
    await nodes.cluster.close()


async def test_a_node_that_is_added_while_it_is_removed_gets_nothing_until_it_is_connected_to_anew() -> None:
    """What it had goes on elsewhere, and so would what it gets before its session ends."""
    nodes = await with_a_node()
    (removed,) = nodes.live
    removed.connect()
    nodes.cluster.remove(removed)
    nodes.cluster.membership.add(NODE)
    assert removed.draining
    await turn()
    (link,) = nodes.live
    assert link is not removed
    assert not link.draining
    await nodes.cluster.close()


async def test_other_nodes_that_come_and_go_leave_a_node_as_it_is() -> None:
    """One that is stopping is not in use again."""
    nodes = await with_a_node()
    (link,) = nodes.live
    link.connect()
    link.problem = "is stopping"
    nodes.found(frozenset(Member(NodeRole.DECODE, address) for address in ADDRESSES))
    assert link.problem == "is stopping"
    await nodes.cluster.close()


async def test_a_link_that_ends_is_not_interrupted_again() -> None:
    """It has calls to end."""
    nodes = await with_a_node()
    task = nodes.cluster._running[ADDRESSES[0]].task
    for _ in range(2):
        nodes.found(frozenset())
    assert task.cancelling() == 1
    await nodes.cluster.close()


def test_no_link_begins_as_the_loop_ends() -> None:
    """As with an error that ends the router, without `close`."""

    nodes = asyncio.run(with_a_node())
    assert len(nodes.links) == 1
    assert not nodes.cluster.links


async def test_a_node_that_nobody_has_reached_is_removed_alone() -> None:
    nodes = Nodes()
    nodes.cluster.start()
    await turn()
    nodes.found(frozenset(Member(NodeRole.DECODE, address) for address in ADDRESSES))
    await turn()
    gone, *others = nodes.live
    nodes.cluster.remove(gone)
    await turn()
    assert nodes.live == others
    await nodes.cluster.close()


async def test_a_node_that_is_found_at_two_addresses_is_one_node() -> None:
    """As DNS has it where pods have an IPv4 and an IPv6 address: none of them is down for that."""
    nodes = Nodes()
    nodes.cluster.start()
    await turn()
    nodes.found(frozenset(Member(NodeRole.DECODE, address) for address in ADDRESSES[:2]))
    await turn()
    first, second = nodes.live
    assert num_nodes_by_state(nodes.cluster)["decode", "down"] == 2, "as far as anybody knows"
    first.connect()
    second.incarnation, second.problem = first.incarnation, "is configured twice, under different addresses"
    counts = num_nodes_by_state(nodes.cluster)
    assert (counts["decode", "up"], counts["decode", "down"]) == (1, 0)
    first.info, first.problem = None, "no answer"
    assert num_nodes_by_state(nodes.cluster)["decode", "down"] == 2
    await nodes.cluster.close()


async def test_nodes_that_fit_no_other_are_not_up() -> None:
    nodes = Nodes()
    nodes.cluster.start()
    await turn()
    nodes.found(frozenset({Member(NodeRole.PREFILL, ADDRESSES[0]), Member(NodeRole.DECODE, ADDRESSES[1])}))
    await turn()
    for link in nodes.live:
        link.connect()
        assert link.info is not None
        layout = dataclasses.replace(link.info.layout, block_size=16 if link.role is NodeRole.DECODE else 32)
        nodes.dispatcher.node_up(dataclasses.replace(link.info, layout=layout), lambda message: None)
    counts = num_nodes_by_state(nodes.cluster)
    assert {key: count for key, count in counts.items() if count} == {
        ("prefill", "incompatible"): 1,
        ("decode", "incompatible"): 1,
    }
    assert counts["decode", "up"] == 0, "a gauge that stays behind would say that it is in use"
    await nodes.cluster.close()


async def test_a_source_with_a_problem_degrades_a_router_that_is_ready(caplog: pytest.LogCaptureFixture) -> None:
    """Which is said once."""
    nodes = Nodes()
    nodes.cluster.start()
    await turn()
    roles = (NodeRole.PREFILL, NodeRole.DECODE)
    wanted = frozenset(Member(role, address) for role, address in zip(roles, ADDRESSES, strict=False))
    nodes.found(wanted)
    for link in nodes.live:
        link.connect()
        assert link.info is not None
        nodes.dispatcher.node_up(link.info, lambda message: None)
    nodes.found(wanted)
    assert nodes.cluster.readiness() == Readiness(None)
    nodes.problem = "no answer from DNS"
    for _ in range(2):
        nodes.found(wanted)
    assert nodes.cluster.readiness() == Readiness(None, "no answer from DNS")
    said = [(record.levelname, record.getMessage()) for record in caplog.records if record.levelname == "WARNING"]
    assert said == [("WARNING", "ready, degraded: no answer from DNS")]
    await nodes.cluster.close()


async def test_an_address_that_has_another_name_is_connected_to_by_that() -> None:
    """An operator added it, and then DNS has it: its certificate names what DNS was asked for."""
    nodes = Nodes()
    nodes.cluster.start()
    await turn()
    nodes.cluster.membership.add(Member(NodeRole.DECODE, ADDRESSES[0]))
    await turn()
    (link,) = nodes.live
    nodes.found(frozenset({Member(NodeRole.DECODE, ADDRESSES[0], "decode.local")}))
    assert (nodes.live, link.name) == ([link], "decode.local")
    await nodes.cluster.close()


async def test_a_link_logs_nothing_as_the_request_that_added_its_node() -> None:
    nodes = Nodes()
    nodes.cluster.start()
    await turn()
    with request_scope("an operator's"):
        nodes.cluster.membership.add(Member(NodeRole.DECODE, ADDRESSES[0]))
    await turn()
    assert not [*nodes.live[0].context]
    await nodes.cluster.close()


async def test_prefill_nodes_are_missed_only_if_there_should_be_some() -> None:
    nodes = Nodes()
    nodes.cluster.start()
    await turn()
    assert nodes.cluster.readiness().why_not == "no decode node"
    nodes.found(frozenset({Member(NodeRole.PREFILL, ADDRESSES[0])}))
    assert str(nodes.cluster.readiness().why_not).startswith("no prefill node and no decode node (prefill node node:1")
    roles = (NodeRole.DECODE, NodeRole.PREFILL)
    nodes.found(frozenset(Member(role, address) for role, address in zip(roles, ADDRESSES, strict=False)))
    assert str(nodes.cluster.readiness().why_not).startswith("no prefill node and no decode node (")
    await nodes.cluster.close()
