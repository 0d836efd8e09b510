"""Where prompts go: to the node that comes to them first."""

from __future__ import annotations

import dataclasses

import pytest

from baton.errors import Overloaded
from baton.messages import Adopted, End, HandedOff, KvEvents, Load, Prefill, SampleEnd, Started, Tokens
from baton.node_info import NodeRole, TransportEndpoint
from baton.sampling import FinishReason, SamplingParams
from router.placement.rates import PRIOR_S_PER_TOKEN
from router.requests.request_state import RoutedRequest
from router.versions import version_of
from tests.router.rig import RouterRig, info

OVER = SampleEnd(0, FinishReason.LENGTH)


def place(rig: RouterRig, name: str, num_tokens: int = 10) -> str:
    """Submit a request; the node that got its prompt."""
    rig.core.submit(RoutedRequest(name, tuple(range(num_tokens)), 1, SamplingParams(max_tokens=8), 60.0), 0.0)
    rig.collect()
    return rig.prefills[-1][0]


def say(rig: RouterRig, node: str, request: str, *kinds: object) -> None:
    (prefill,) = [p for _, p in rig.prefills if p.attempt_id.request_id == request]
    rig.say(node, prefill, *kinds)


def test_single_nodes_get_prompts_while_others_compute() -> None:
    rig = RouterRig("d1", "d2", with_prefill=False)
    assert [place(rig, "a"), place(rig, "b", 9)] == ["d1", "d2"]
    assert place(rig, "c", 5) == "d2", "which has less to compute"
    say(rig, "d1", "a", Started(0, 0.0), Tokens(0, 0, (5,)))
    assert place(rig, "d") == "d1", "whose prompt is computed, though it generates for it"


def test_what_a_node_says_to_wait_is_others_beyond_what_it_got_from_here() -> None:
    rig = RouterRig("p1", "d1")
    place(rig, "a")
    node = rig.core.pool.get("p1")
    assert node is not None
    for waiting, of_others in ((10, 0), (4, 0), (25, 15)):
        rig.core.node_load("p1", Load(num_waiting=1, num_waiting_tokens=waiting), 1.0)
        assert node.waiting_of_others == of_others


def test_of_two_that_are_behind_the_one_that_began_earlier_is_further() -> None:
    rig = RouterRig("d1", "d2", with_prefill=False)
    assert [place(rig, name) for name in "abcd"] == ["d1", "d2", "d1", "d2"]
    say(rig, "d1", "a", Tokens(0, 0, (5,)), OVER, End())
    say(rig, "d2", "b", Tokens(0, 0, (5,)), OVER, End())
    assert place(rig, "e") == "d1", "though d2 has as much to do, and generates for as many"


def test_idle_single_nodes_share_what_is_generated() -> None:
    rig = RouterRig("d1", "d2", with_prefill=False)
    assert place(rig, "long", 50) == "d1"
    say(rig, "d1", "long", Tokens(0, 0, (5,)))
    for name in "abcd":
        assert place(rig, name) == "d2"
        say(rig, "d2", name, Tokens(0, 0, (5,)))
    rig.core.node_load("d1", Load(0, 1, 9, 9), 0.0)
    rig.core.node_load("d2", Load(0, 4, 9, 9), 0.0)
    assert place(rig, "e") == "d2", "40 tokens of prompts to 50"


@pytest.mark.parametrize("last", [Tokens(0, 0, (5,)), HandedOff(0.1), Adopted(0.1, 0, 0)])
def test_a_prefill_node_is_free_when_its_prompt_is_computed(last: object) -> None:
    rig = RouterRig("p1", "p2", "d1")
    assert [place(rig, "a"), place(rig, "b")] == ["p1", "p2"]
    say(rig, "d1" if isinstance(last, Adopted) else "p2", "b", last)
    assert place(rig, "c") == "p2"


@pytest.mark.parametrize("ended", [End(), None])
def test_what_ends_is_counted_nowhere(ended: End | None) -> None:
    rig = RouterRig("d1", "d2", with_prefill=False)
    place(rig, "a")
    if ended:
        say(rig, "d1", "a", Tokens(0, 0, (5,)), OVER, ended)
    else:
        rig.core.cancel("a", 1.0)
    nodes = [rig.core.pool.get(name) for name in ("d1", "d2")]
    assert [(node.to_prefill, node.to_decode) for node in nodes if node] == [(0, 0)] * 2


def test_a_node_heard_of_twice_keeps_what_it_was_given() -> None:
    rig = RouterRig("d1", "d2", with_prefill=False)
    place(rig, "a")
    rig.core.node_up(info("d1", NodeRole.DECODE), 0.0)
    assert place(rig, "b") == "d2"


def test_of_two_equally_far_behind_the_one_that_got_its_prompt_earlier_is_further() -> None:
    rig = RouterRig("d1", "d2", with_prefill=False)
    assert [place(rig, "a"), place(rig, "b")] == ["d1", "d2"]
    say(rig, "d1", "a", Tokens(0, 0, (5,)), OVER, End())
    assert place(rig, "c") == "d1"
    assert place(rig, "e") == "d2"


def test_a_prompt_goes_where_it_is_computed_first_however_much_runs_there() -> None:
    rig = RouterRig("p1", "p2", "d1")
    rig.core.node_load("p1", Load(0, 4, 9, 9), 0.0)
    assert [place(rig, "a"), place(rig, "b")] == ["p2", "p1"]


def test_decode_nodes_share_what_is_generated() -> None:
    rig = RouterRig("p1", "d1", "d2")
    for name, num_tokens in (("a", 30), ("b", 10), ("c", 10)):
        place(rig, name, num_tokens)
    targets = [prefill.decode for _, prefill in rig.prefills]
    assert [target.incarnation for target in targets if target] == ["d1", "d2", "d2"]


def test_nodes_without_a_transport_in_common_are_no_pair() -> None:
    rig = RouterRig()
    for name, role, transport in (
        ("p1", NodeRole.PREFILL, "ucx"),
        ("d1", NodeRole.DECODE, "ipc"),
        ("d2", NodeRole.DECODE, "ucx"),
    ):
        endpoints = (TransportEndpoint(0, transport, b""),)
        rig.core.node_up(dataclasses.replace(info(name, role), endpoints=endpoints), 0.0)
    for name in "abc":
        place(rig, name)
    targets = [prefill.decode.incarnation for _, prefill in rig.prefills if prefill.decode]
    assert targets == ["d2"] * 3
    assert "transport ucx of p1 != ipc of d1" in str(rig.core.pool.why_degraded(0.0))


def computed(rig: RouterRig, request: str, took_s: float) -> None:
    """The request's prompt took so long on its prefill node, and all of it is over."""
    where, prefill = next((w, p) for w, p in rig.prefills if p.attempt_id.request_id == request)
    rig.say(where, prefill, Started(0, 0.0), Tokens(0, 0, (5,)), HandedOff(took_s), now=took_s)
    assert prefill.decode
    rig.say(prefill.decode.incarnation, prefill, Adopted(0.01, 0, 9), OVER, End(), now=took_s)


def test_cost_learns_which_prefill_node_is_slow() -> None:
    rig = RouterRig("p1", "p2", "d1", policy="cost")
    for i in range(20):
        where = place(rig, f"warm-{i}")
        computed(rig, f"warm-{i}", 0.4 if where == "p1" else 0.04)
    nodes = []
    for i in range(4):
        nodes.append(place(rig, f"one-{i}"))
        computed(rig, f"one-{i}", 0.4 if nodes[-1] == "p1" else 0.04)
    assert nodes == ["p2"] * 4
    assert [place(rig, f"many-{i}") for i in range(9)].count("p2") == 9, "nine times a tenth of what the other takes"


def test_the_first_prompt_of_a_slow_node_makes_it_look_no_faster_than_nodes_without_one() -> None:
    rig = RouterRig("p1", "p2", "d1", policy="cost")
    first = place(rig, "a", 1000)
    computed(rig, "a", 60.0)
    times = {name: node.prefill_time.predict(1000) for name in ("p1", "p2") if (node := rig.core.pool.get(name))}
    assert times[first] == pytest.approx(60.0, rel=0.1)
    assert times["p1"] == pytest.approx(times["p2"], rel=0.01)


def test_a_prompt_that_leaves_the_queue_makes_the_one_before_it_look_no_faster() -> None:
    rig = RouterRig("p1", "d1", policy="cost")
    place(rig, "first", 1000)
    rig.say("p1", rig.prefills[-1][1], Started(0, 0.0), now=0.0)
    place(rig, "behind", 100)
    node = rig.core.pool.get("p1")
    assert node
    rig.core.cancel("behind", 0.9)
    assert node.queue_s(0.95) == pytest.approx(0.95 - node.to_prefill_s), "it is late, and not just begun"
    computed(rig, "first", 1.0)
    assert node.prefill_time.predict(1000) == pytest.approx(1.0)


def test_cost_counts_what_is_computed_of_the_first_prompt_in_the_queue() -> None:
    rig = RouterRig("p1", "d1", policy="cost")
    pool = rig.core.pool
    node = pool.get("p1")
    assert node
    for name in "ab":
        place(rig, name, 1000)
    assert node.queue_s(0.0) == pytest.approx(node.to_prefill_s)
    assert node.queue_s(0.05) == pytest.approx(node.to_prefill_s - 0.05)
    assert node.queue_s(node.to_prefill_s) == pytest.approx(node.to_prefill_s / 2)
    assert node.queue_s(99.0) == pytest.approx(99.0 - node.to_prefill_s), "a slow node looks idle"
    computed(rig, "a", 0.1)
    computed(rig, "b", 0.1)
    assert (node.queue_s(99.0), node.num_prompts) == (0.0, 0)


def test_what_a_client_takes_to_send_its_request_is_not_the_nodes_time() -> None:
    rig = RouterRig("p1", "d1", policy="cost")
    rig.core.submit(RoutedRequest("slow", (1,) * 100, 1, SamplingParams(max_tokens=8), 60.0), 30.0, 5.0)
    rig.collect()
    ((_, prefill),) = rig.prefills
    assert (prefill.deadline_s, prefill.age_s) == (35.0, 25.0)
    node = rig.core.pool.get("p1")
    assert node
    assert node.queue_s(30.0) == pytest.approx(node.to_prefill_s)
    rig.say("p1", prefill, Started(0, 0.0), Tokens(0, 0, (5,)), HandedOff(0.02), now=30.02)
    assert node.prefill_time.predict(100) == pytest.approx(0.02)
    assert rig.core.next_deadline() == 65.0


def test_cost_goes_where_the_prompt_is_cached() -> None:
    rig = RouterRig("p1", "p2", "p3", "d1", policy="cost")
    hashes = (b"a" * 32, b"b" * 32)
    for name in ("p1", "p2", "p3"):
        rig.core.node_blocks(name, KvEvents(0, hashes if name == "p2" else (), (), True))
    for i in range(5):
        request = RoutedRequest(f"r{i}", tuple(range(40)), 1, SamplingParams(max_tokens=8), 60.0, block_hashes=hashes)
        rig.core.submit(request, 0.0)
        rig.collect()
        assert rig.prefills[-1][0] == "p2"
        computed(rig, f"r{i}", 0.1)


def test_one_slow_handoff_does_not_keep_a_decode_node_out_of_use() -> None:
    """The first one connects the two nodes. A request every 0.1 s, for two minutes."""
    rig = RouterRig("p1", "d1", "d2", policy="cost")
    targets = list[str]()
    for i in range(1200):
        now = i / 10
        rig.core.submit(RoutedRequest(f"r{i}", tuple(range(10)), 1, SamplingParams(max_tokens=8), 60.0), now)
        rig.collect()
        prefill = rig.sent.pop().message
        assert isinstance(prefill, Prefill)
        assert prefill.decode
        targets.append(prefill.decode.incarnation)
        handoff_s = 0.004 if i else 2.0
        rig.say("p1", prefill, Started(0, 0.0), Tokens(0, 0, (5,)), HandedOff(0.01), now=now)
        rig.say(targets[-1], prefill, Adopted(handoff_s, 0, 9), OVER, End(), now=now)
        rig.sent.clear()
        rig.emitted.clear()
    assert targets[-500:].count(targets[0]) > 100


@pytest.mark.parametrize(("target_itl_s", "expected"), [(0.025, "d1"), (0.0, "p1")])
def test_a_decode_node_computes_prompts_only_if_it_bounds_its_gaps(target_itl_s: float, expected: str) -> None:
    rig = RouterRig("p1", "d1", policy="cost")
    assert place(rig, "slow") == "p1"
    computed(rig, "slow", 1.0)
    rig.core.node_load("d1", Load(0, 4, 9, 9, target_itl_s=target_itl_s, prompt_tokens_per_s=1e4), 0.0)
    assert place(rig, "next") == expected
    assert (rig.prefills[-1][1].decode is None) is (expected == "d1")


def test_decisions_are_counted_told_and_compared_with_what_came(caplog: pytest.LogCaptureFixture) -> None:
    rig = RouterRig("p1", "d1", policy="cost")
    with caplog.at_level("DEBUG", "router.requests.attempts"):
        assert place(rig, "a", 100) == "p1"
    (line,) = [record.getMessage() for record in caplog.records]
    nodes = "placed attempt=0 prefill=p1 decode=d1"
    assert line.startswith(f"{nodes} cost_ms=34.1 queue_ms=0.0 prefill_ms=10.0 handoff_ms=0.0"), (
        "0.05 s x (100 / 144)^2"
    )
    say(rig, "p1", "a", Tokens(0, 0, (5,)), HandedOff(0.1))
    say(rig, "d1", "a", Adopted(0.1, 0, 9), OVER, End())
    assert rig.last_word.timings.expected_first_token_s == pytest.approx(100 * PRIOR_S_PER_TOKEN)
    rig.core.node_lost("p1", "died", 1.0)
    assert place(rig, "b") == "d1"
    rig.core.node_lost("d1", "died", 1.0)
    rig.collect()
    assert rig.core.num_placements() == {"pair": 1, "decode_alone": 1, "waited": 1}


def test_prompts_that_wait_for_other_routers_count() -> None:
    rig = RouterRig("p1", "p2", "d1", policy="cost")
    assert place(rig, "a", 100) in ("p1", "p2")
    ((busy, _),) = rig.prefills
    idle = "p2" if busy == "p1" else "p1"
    rig.core.node_load(busy, Load(1, 0, 9, 9, num_waiting_tokens=100), 0.0)  # this router's own
    rig.core.node_load(idle, Load(9, 0, 9, 9, num_waiting_tokens=5000), 0.0)
    node = rig.core.pool.get(idle)
    assert node
    assert node.queue_s(0.0) == pytest.approx(5000 * PRIOR_S_PER_TOKEN)
    assert [place(rig, f"more-{i}") for i in range(3)] == [busy] * 3
    rig.core.node_load(idle, Load(), 0.0)
    assert node.queue_s(0.0) == 0.0
    assert place(rig, "last") == idle


def test_what_a_full_decode_node_makes_wait_follows_from_how_long_its_requests_last() -> None:
    rig = RouterRig("d1", "d2", policy="cost", with_prefill=False)
    pool = rig.core.pool
    for name, lasted_s in (("d1", 100.0), ("d2", 1.0)):
        pool.ended(name, 0, 0, lasted_s)
        rig.core.node_load(name, Load(0, 4, 0, 9), 0.0)
    for i in range(4):
        assert place(rig, f"r{i}", 20) == "d2", "a seventh of a pool too many: 14 s or 0.14"


def test_how_long_requests_last_is_learned_when_they_end() -> None:
    rig = RouterRig("p1", "d1")
    place(rig, "a")
    say(rig, "p1", "a", Tokens(0, 0, (5,)), HandedOff(0.1))
    _, prefill = rig.prefills[0]
    rig.say("d1", prefill, Adopted(0.1, 0, 9), OVER, End(), now=7.5)
    node = rig.core.pool.get("d1")
    assert node
    assert node.held_s.value == pytest.approx(7.5)


@pytest.mark.parametrize("ends", [End(Overloaded("full")), None])
def test_what_never_had_blocks_says_nothing_of_how_long_requests_last(ends: End | None) -> None:
    """Else a node that refuses many would look like one that soon has room."""
    rig = RouterRig("p1", "d1")
    place(rig, "a")
    if ends:
        say(rig, "p1", "a", Started(0, 0.0), ends)
    else:
        rig.core.cancel("a", 1.0)
    node = rig.core.pool.get("d1")
    assert node
    assert (node.held_s.value, node.to_decode, node.num_answers) == (0.0, 0, 0)


def test_round_robin_takes_turns_within_each_model() -> None:
    """Requests that come for two models by turns would otherwise all go to the same node of each."""
    rig = RouterRig(with_prefill=False, policy="round-robin")
    nodes = [dataclasses.replace(info(f"d{i}", NodeRole.DECODE), served_model_name="ab"[i // 2]) for i in range(4)]
    for node in nodes:
        rig.core.node_up(node, 0.0)
    versions = [version_of(nodes[0]), version_of(nodes[2])]
    for number in range(8):
        request = RoutedRequest(str(number), (1,), 1, SamplingParams(max_tokens=8), 60.0, version=versions[number % 2])
        rig.core.submit(request, 0.0)
    rig.collect()
    assert [name for name, _ in rig.prefills] == ["d0", "d2", "d1", "d3"] * 2
