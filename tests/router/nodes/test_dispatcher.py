"""The dispatcher: the timer of deadlines, and what it sends and counts."""

from __future__ import annotations

import asyncio
import time
from functools import partial

import pytest
from prometheus_client import CollectorRegistry

from baton.errors import InternalError, NodeUnavailable, PeerLost
from baton.messages import Abort, AttemptId, End, KvEvents, Load, Migrate, Prefill, Tokens, Update
from baton.node_info import NodeRole
from baton.sampling import SamplingParams
from baton.telemetry import ROUTER, RouterMetrics, new_registry
from router.nodes.dispatcher import Dispatcher
from router.request_metrics import RequestMetrics
from router.requests import recovery
from router.requests.core import RouterCore
from router.requests.request_state import RequestEnd, RequestEvent, RoutedRequest
from router.versions import version_of
from tests.router.rig import info


def counted(registry: CollectorRegistry, name: str) -> list[tuple[dict[str, str], float]]:
    """What a counter has, by its labels."""
    samples = [sample for metric in registry.collect() for sample in metric.samples]
    return [(sample.labels, sample.value) for sample in samples if sample.name == name and sample.value]


def with_nodes(*names: str) -> tuple[Dispatcher, list[Prefill | Abort | Migrate]]:
    """A dispatcher with these nodes, and what it sends them. p...: a prefill node, d...: a decode node."""
    dispatcher = Dispatcher(RouterCore(1), RequestMetrics(RouterMetrics(new_registry(ROUTER)), lambda: "m"))
    sent: list[Prefill | Abort | Migrate] = []
    for name in names:
        dispatcher.node_up(info(name, NodeRole.PREFILL if name[0] == "p" else NodeRole.DECODE), sent.append)
    return dispatcher, sent


class Ticks(RouterCore):
    """Counts how often it is told the time alone."""

    num = 0

    def tick(self, now: float) -> None:
        self.num += 1
        super().tick(now)


async def test_every_deadline_is_kept_though_nobody_submits_again() -> None:
    """Of requests that no node has, so that no message to one sets the timer."""
    core = Ticks(1)
    dispatcher = Dispatcher(core, RequestMetrics(RouterMetrics(new_registry(ROUTER)), lambda: "m"))
    ended: asyncio.Queue[tuple[str, RequestEvent]] = asyncio.Queue()
    begun = time.monotonic()

    def tell(name: str, event: RequestEvent) -> None:
        ended.put_nowait((name, event))

    for name, deadline_s in (("far", 60.0), ("last", 0.12), ("first", 0.02), ("second", 0.07)):
        request = RoutedRequest(name, (1, 2), 1, SamplingParams(), deadline_s)
        dispatcher.submit(request, partial(tell, name), begun)
    order = []
    async with asyncio.timeout(10):
        for deadline_s in (0.02, 0.07, 0.12):
            name, event = await ended.get()
            assert isinstance(event, RequestEnd)
            assert isinstance(event.error, NodeUnavailable)
            assert time.monotonic() - begun >= deadline_s, "before its time"
            order.append(name)
    assert order == ["first", "second", "last"]
    assert core.num <= 6, "the timer fires for a deadline, and perhaps just before it"
    dispatcher.close()


async def test_a_request_that_waits_in_vain_for_a_lost_node_ends_though_nothing_else_happens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of the second node only its peer says that it is lost."""
    monkeypatch.setattr(recovery, "RETURN_S", 0.02)
    dispatcher, _ = with_nodes("p1", "d1", "d2")
    ended: asyncio.Queue[RequestEvent] = asyncio.Queue()
    dispatcher.submit(RoutedRequest("r", (1, 2), 1, SamplingParams(), 60.0), ended.put_nowait, time.monotonic())
    dispatcher.node_lost("d1", "reset")
    dispatcher.handle_node_message("p1", (Update(AttemptId(1, "r", 1), End(PeerLost("gone"))),))
    async with asyncio.timeout(10):
        event = await ended.get()
    assert isinstance(event, RequestEnd)
    assert isinstance(event.error, InternalError)
    dispatcher.close()


async def test_a_request_whose_two_nodes_are_lost_ends_though_nobody_is_left_to_be_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(recovery, "RETURN_S", 0.02)
    dispatcher, sent = with_nodes("d1", "d2")
    ended: asyncio.Queue[RequestEvent] = asyncio.Queue()
    dispatcher.submit(RoutedRequest("r", (1, 2), 1, SamplingParams(), 60.0), ended.put_nowait, time.monotonic())
    dispatcher.node_lost("d1", "reset")
    assert [message.attempt_id.attempt for message in sent] == [0, 1], "the other one has it at once"
    dispatcher.node_lost("d2", "reset")
    async with asyncio.timeout(5):
        event = await ended.get()
    assert isinstance(event, RequestEnd)
    assert isinstance(event.error, InternalError)
    dispatcher.close()


async def test_an_attempt_that_waited_is_counted_by_what_it_follows() -> None:
    """Whatever has come meanwhile."""
    registry = new_registry(ROUTER)
    dispatcher = Dispatcher(RouterCore(1), RequestMetrics(RouterMetrics(registry), lambda: "m"))
    sent: list[Prefill | Abort | Migrate] = []
    dispatcher.node_up(info("d1", NodeRole.DECODE), sent.append)
    dispatcher.submit(RoutedRequest("r", (1, 2), 1, SamplingParams(), 60.0), lambda event: None, time.monotonic())
    dispatcher.node_lost("d1", "died")
    dispatcher.node_up(info("p1", NodeRole.PREFILL), sent.append)
    dispatcher.handle_node_message("p1", (Update(AttemptId(1, "ended long ago", 0), End()),))
    dispatcher.node_up(info("d2", NodeRole.DECODE), sent.append)
    assert len(sent) == 2
    labels = {"role": ROUTER, "model_name": "m", "reason": "node_lost"}
    assert counted(registry, "baton:request_attempts_total") == [(labels, 1)], "and the first attempt is not"
    dispatcher.close()


async def test_a_node_has_what_is_left_of_a_requests_time() -> None:
    """It was received long ago: its body came slowly."""
    dispatcher, sent = with_nodes("p1", "d1")
    request = RoutedRequest("r", (1, 2), 1, SamplingParams(), 60.0)
    dispatcher.submit(request, lambda event: None, time.monotonic() - 50.0)
    (prefill,) = sent
    assert isinstance(prefill, Prefill)
    assert 0 < prefill.deadline_s <= 10.0
    assert prefill.age_s >= 50.0
    dispatcher.close()


async def test_a_sink_is_not_called_again_before_it_returns() -> None:
    """Though it asks for something that ends the request."""
    dispatcher, sent = with_nodes("p1", "d1")
    calls: list[str] = []

    def sink(event: RequestEvent) -> None:
        calls.append(f"{type(event).__name__} begins")
        if isinstance(event, Tokens):
            dispatcher.cancel("r")
        calls.append(f"{type(event).__name__} returns")

    dispatcher.submit(RoutedRequest("r", (1, 2), 1, SamplingParams(max_tokens=8), 60.0), sink, time.monotonic())
    dispatcher.handle_node_message("p1", (Update(sent[0].attempt_id, Tokens(0, 0, (5,))),))
    assert calls == ["Tokens begins", "Tokens returns", "RequestEnd begins", "RequestEnd returns"]
    dispatcher.close()


async def test_a_sample_that_is_stopped_ends_during_the_call() -> None:
    dispatcher, sent = with_nodes("p1", "d1")
    told: list[RequestEvent] = []
    dispatcher.submit(RoutedRequest("r", (1, 2), 1, SamplingParams(), 60.0), told.append, time.monotonic())
    dispatcher.stop_sample("r", 0)
    assert isinstance(told[-1], RequestEnd)
    assert isinstance(sent[-1], Abort)
    dispatcher.close()


async def test_what_a_node_says_of_its_prefix_cache_is_known_and_what_is_refused_is_counted() -> None:
    registry = new_registry(ROUTER)
    core = RouterCore(1)
    dispatcher = Dispatcher(core, RequestMetrics(RouterMetrics(registry), lambda: "the first of several"))
    dispatcher.node_up(info("p1", NodeRole.PREFILL), lambda message: None)
    dispatcher.handle_node_message("p1", KvEvents(0, stored=(b"h" * 32,), snapshot=True))
    assert core.prefix_index.num_blocks("p1") == 1
    dispatcher.close()
    version = version_of(info("p1", NodeRole.PREFILL))
    request = RoutedRequest("r", (1,), 1, SamplingParams(), 60.0, version=version)
    with pytest.raises(NodeUnavailable):
        dispatcher.submit(request, lambda event: None, time.monotonic())
    ((labels, value),) = counted(registry, "baton:request_ends_total")
    assert (labels["model_name"], value) == ("m", 1)


@pytest.mark.parametrize("full", [True, False])
async def test_what_waits_is_sent_once_its_node_has_room_or_is_drained_no_longer(full: bool) -> None:
    """Though nothing else happens."""
    dispatcher, sent = with_nodes("p1", "d1")
    if full:
        dispatcher.handle_node_message("d1", Load(0, 1, num_blocks_free=0, num_blocks_total=9))
    else:
        dispatcher.drain_node("d1", True)
    dispatcher.submit(RoutedRequest("r", (1, 2), 1, SamplingParams(), 60.0), lambda event: None, time.monotonic())
    assert not sent
    assert not dispatcher.is_on("d1")
    if full:
        dispatcher.handle_node_message("d1", Load(0, 0, num_blocks_free=9, num_blocks_total=9))
    else:
        dispatcher.drain_node("d1", False)
    assert [type(message) for message in sent] == [Prefill]
    assert dispatcher.is_on("d1")
    dispatcher.close()


@pytest.mark.parametrize("says_so", [True, False])
async def test_what_generates_on_a_node_that_is_to_leave_moves_at_once(says_so: bool) -> None:
    """Whether the node says that it stops, or somebody else drains it."""
    dispatcher, sent = with_nodes("d1", "d2")
    dispatcher.submit(RoutedRequest("r", (1, 2), 1, SamplingParams(), 60.0), lambda event: None, time.monotonic())
    (prefill,) = sent
    assert isinstance(prefill, Prefill)
    node = prefill.target_incarnation
    dispatcher.handle_node_message(node, (Update(prefill.attempt_id, Tokens(0, 0, (5,))),))
    if says_so:
        dispatcher.handle_node_message(node, Load(draining=True))
    else:
        dispatcher.drain_node(node, True)
    assert [type(message) for message in sent] == [Prefill, Migrate]
    dispatcher.close()


async def test_nothing_is_kept_of_what_has_ended() -> None:
    """A router runs for months."""
    dispatcher = Dispatcher(RouterCore(1), RequestMetrics(RouterMetrics(new_registry(ROUTER)), lambda: "m"))
    sent: list[Prefill | Abort | Migrate] = []
    ended: list[str] = []
    for name, role in (("p1", NodeRole.PREFILL), ("d1", NodeRole.DECODE)):
        dispatcher.node_up(info(name, role), sent.append)

    def submit(name: str) -> None:
        request = RoutedRequest(name, (1, 2), 1, SamplingParams(), 60.0)
        dispatcher.submit(request, lambda event: ended.append(name), time.monotonic())

    submit("left")
    dispatcher.cancel("left")
    assert ended == ["left"], "during the call"
    dispatcher.cancel("left")
    submit("stopped")
    dispatcher.node_lost("p1", "reset")
    assert (ended, list(dispatcher._sinks), list(dispatcher._links)) == (["left"], ["stopped"], ["d1"])
    dispatcher.close()
    with pytest.raises(NodeUnavailable):
        submit("late")
    assert (ended, dispatcher._sinks, dispatcher._timer) == (["left", "stopped"], {}, None)
