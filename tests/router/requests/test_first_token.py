"""Who streams the first token: with `decode` it waits in the router until the decode node goes on, and never longer."""

from __future__ import annotations

import time

import pytest

from baton.errors import BatonError, DeadlineExceeded, InternalError, NodeUnavailable, RequestCancelled
from baton.messages import Abort, Adopted, End, HandedOff, Migrate, Prefill, SampleEnd, Tokens, Update
from baton.node_info import NodeRole
from baton.sampling import FinishReason, SamplingParams
from baton.telemetry import ROUTER, RouterMetrics, new_registry
from router.nodes.dispatcher import Dispatcher
from router.request_metrics import RequestMetrics
from router.requests.core import RouterCore
from router.requests.request_state import FirstToken, RequestEnd, RequestEvent, RoutedRequest
from tests.router.rig import RouterRig, info

ADOPTED = Adopted(0.1, 0, 9)
HANDED_OFF = HandedOff(0.1)


@pytest.fixture
def rig() -> RouterRig:
    return RouterRig("p1", "d1", first_token="decode")


@pytest.mark.parametrize(("first_token", "told_at_s"), [("prefill", 1.0), ("decode", 4.0)])
def test_the_first_token_comes_from_where_it_should(first_token: FirstToken, told_at_s: float) -> None:
    rig = RouterRig("p1", "d1", first_token=first_token)
    prefill = rig.submit()
    rig.say("p1", prefill, Tokens(0, 0, (5,)), HANDED_OFF, now=1.0)
    assert rig.told == ([] if first_token == "decode" else [(0, 5)])
    rig.say("d1", prefill, ADOPTED, now=4.0)
    assert rig.told == [(0, 5)]
    rig.say("d1", prefill, Tokens(0, 1, (6,)), SampleEnd(0, FinishReason.LENGTH), End(), now=5.0)
    assert rig.told == [(0, 5), (0, 6)]
    assert rig.last_word.timings.first_token_s == told_at_s


def test_a_decode_node_that_overtakes_the_prefill_node_leaves_nothing_to_wait_for(rig: RouterRig) -> None:
    prefill = rig.submit()
    rig.say("d1", prefill, ADOPTED, Tokens(0, 1, (6,)))
    assert rig.told == []
    rig.say("p1", prefill, Tokens(0, 0, (5,)), now=2.0)
    assert rig.told == [(0, 5), (0, 6)]


def test_without_a_handoff_nothing_waits(rig: RouterRig) -> None:
    rig.say("p1", rig.submit(), Tokens(0, 0, (5,)), SampleEnd(0, FinishReason.STOP, 5), now=2.0)
    assert [type(e.event) for e in rig.emitted] == [Tokens, SampleEnd]
    alone = RouterRig("d1", with_prefill=False, first_token="decode")
    alone.say("d1", alone.submit(), Tokens(0, 0, (5,)))
    assert alone.told == [(0, 5)]


def test_samples_that_end_with_it_do_not_wait_for_those_that_go_on(rig: RouterRig) -> None:
    prefill = rig.submit(n=3)
    kinds = [Tokens(0, 0, (5,)), Tokens(1, 0, (1,)), SampleEnd(1, FinishReason.STOP, 1), Tokens(2, 0, (7,))]
    rig.say("p1", prefill, *kinds, now=2.0)
    assert rig.told == [(1, 1)]
    rig.say("p1", prefill, Tokens(0, 0, (5,)), HANDED_OFF, now=2.5)
    rig.say("d1", prefill, ADOPTED, ADOPTED, now=3.0)
    assert rig.told == [(1, 1), (0, 5), (2, 7)]
    rig.core.cancel("r", 4.0)
    rig.collect()
    assert rig.last_word.timings.first_token_s == 2.0


def test_what_waits_survives_its_attempt_and_comes_with_the_next(rig: RouterRig) -> None:
    first = rig.submit()
    rig.say("p1", first, Tokens(0, 0, (5,)), HANDED_OFF)
    rig.say("d1", first, End(NodeUnavailable("gone")))
    (_, again) = rig.prefills[-1]
    assert again.samples[0].output_tokens == (5,)
    rig.say("p1", again, Tokens(0, 0, (5, 6)), now=2.0)
    assert rig.told == []
    rig.say("d1", first, ADOPTED, now=2.5)  # too late
    assert rig.told == []
    rig.say("d1", again, ADOPTED, now=3.0)
    assert rig.told == [(0, 5), (0, 6)]


def test_a_decode_node_alone_goes_on_with_what_waits(rig: RouterRig) -> None:
    first = rig.submit()
    rig.say("p1", first, Tokens(0, 0, (5,)))
    rig.core.node_lost("p1", "died", 2.0)
    rig.collect()
    where, again = rig.prefills[-1]
    assert (where, again.decode) == ("d1", None)
    rig.say("d1", again, Tokens(0, 1, (6,)), now=3.0)
    assert rig.told == [(0, 5), (0, 6)]


def test_samples_of_a_lost_attempt_wait_each_for_its_own(rig: RouterRig) -> None:
    first = rig.submit(n=2)
    rig.say("p1", first, Tokens(0, 0, (5,)), Tokens(1, 0, (7,)), End(NodeUnavailable("gone")))
    (_, zero), (_, one) = rig.prefills[1:]
    rig.say("p1", zero, Tokens(0, 1, (6,)))
    rig.say("p1", one, Tokens(1, 1, (8,)))
    rig.say("d1", one, ADOPTED)
    assert rig.told == [(1, 7), (1, 8)]
    rig.say("d1", zero, ADOPTED)
    assert rig.told == [(1, 7), (1, 8), (0, 5), (0, 6)]


@pytest.mark.parametrize("why", [InternalError, DeadlineExceeded, RequestCancelled])
def test_what_waits_is_told_before_an_end(rig: RouterRig, why: type[BatonError]) -> None:
    prefill = rig.submit(n=2)
    rig.say("p1", prefill, Tokens(0, 0, (5,)), Tokens(1, 0, (7,)))
    if why is InternalError:
        rig.say("d1", prefill, End(InternalError("bug")), now=61.0)
    elif why is DeadlineExceeded:
        rig.core.tick(61.0)
    else:
        rig.core.cancel("r", 61.0)
    rig.collect()
    assert rig.told == [(0, 5), (1, 7)]
    assert isinstance(rig.end, why)
    assert rig.last_word.timings.first_token_s == 61.0


def test_a_stopped_sample_keeps_what_waits_to_itself(rig: RouterRig) -> None:
    prefill = rig.submit(n=2)
    rig.say("p1", prefill, Tokens(0, 0, (5,)), Tokens(1, 0, (7,)))
    rig.core.stop_sample("r", 0, 2.0)
    rig.say("d1", prefill, ADOPTED)
    assert rig.told == [(1, 7)]


async def test_a_stop_string_within_the_first_token() -> None:
    """It is found when the decode node goes on. What that has said in the same breath does not count."""
    metrics = RouterMetrics(registry := new_registry(ROUTER))
    dispatcher = Dispatcher(RouterCore(1, first_token="decode"), RequestMetrics(metrics, lambda: "m"))
    sent: list[tuple[str, Prefill | Abort | Migrate]] = []
    for name, role in (("p1", NodeRole.PREFILL), ("d1", NodeRole.DECODE)):

        def send(message: Prefill | Abort | Migrate, to: str = name) -> None:
            sent.append((to, message))

        dispatcher.node_up(info(name, role), send)
    told: list[RequestEvent] = []

    def stop_at_once(event: RequestEvent, /) -> None:
        told.append(event)
        if isinstance(event, Tokens):
            dispatcher.stop_sample("r", 0)

    dispatcher.submit(RoutedRequest("r", (1, 2), 1, SamplingParams(max_tokens=8), 60.0), stop_at_once, time.monotonic())
    attempt_id = sent[0][1].attempt_id
    dispatcher.handle_node_message("p1", (Update(attempt_id, Tokens(0, 0, (5,))),))
    assert not told
    dispatcher.handle_node_message("d1", (Update(attempt_id, ADOPTED), Update(attempt_id, Tokens(0, 1, (6,)))))
    tokens, end = told
    assert tokens == Tokens(0, 0, (5,))
    assert isinstance(end, RequestEnd)
    assert end.error is None
    assert [to for to, _ in sent[1:]] == ["p1", "d1"]
    for _, message in sent[1:]:
        assert isinstance(message, Abort)
        assert (message.attempt_id, message.samples) == (attempt_id, ())
        assert 59 < message.deadline_s <= 60
    assert registry.get_sample_value("baton:generation_tokens_total", {"model_name": "m", "role": "router"}) == 1
    dispatcher.close()
