"""A decode node's free blocks are credits: what it has no room for waits at the router, in order, and is not lost."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.errors import DeadlineExceeded, InvalidRequest, NodeUnavailable, TransferError
from baton.kv_groups import group_layers
from baton.layout import KvLayout, LayerKv
from baton.messages import Adopted, End, HandedOff, Load, Started, Tokens
from baton.node_info import NodeRole
from baton.sampling import SamplingParams
from baton.table_shape import TableShape
from router.placement.routed_node import Node, least_blocks, num_blocks
from router.requests.admission import LONGEST_RETRY_AFTER_S, Full
from router.requests.request_state import AttemptState, RoutedRequest
from router.versions import version_of
from tests.router.rig import RouterRig, info

LONG = 32
"""Tokens, 2 blocks. With one for the answer 3 are needed."""
VERSION = version_of(info("d", NodeRole.DECODE))


def load(rig: RouterRig, num_free: int, name: str = "d1", now: float = 0.0) -> None:
    """One request runs there, so it needs a block besides."""
    rig.core.node_load(name, Load(0, 1, num_free, 100), now)
    rig.collect()


def submit(
    rig: RouterRig, name: str, num_tokens: int = LONG, priority: int = 0, now: float = 0.0, max_tokens: int = 8
) -> None:
    params = SamplingParams(max_tokens=max_tokens)
    request = RoutedRequest(name, tuple(range(num_tokens)), 1, params, 60.0, priority=priority, version=VERSION)
    rig.core.submit(request, now)
    rig.collect()


def placed(rig: RouterRig) -> list[str]:
    return [prefill.attempt_id.request_id for _, prefill in rig.prefills]


def adopt(rig: RouterRig, name: str) -> None:
    (prefill,) = [p for _, p in rig.prefills if p.attempt_id.request_id == name]
    rig.say("p1", prefill, Started(0, 0.0), Tokens(0, 0, (5,)), HandedOff(0.1))
    rig.say("d1", prefill, Adopted(0.0, 0, 0))


def test_a_prefill_node_gets_no_more_than_the_decode_node_can_take() -> None:
    rig = RouterRig("p1", "d1")
    load(rig, 10)
    for name in "abcde":
        submit(rig, name)
    assert placed(rig) == ["a", "b", "c"], "3 of 9 blocks each"
    load(rig, 10)
    assert placed(rig) == ["a", "b", "c"], "which are still to come"
    rig.say("p1", rig.prefills[0][1], Started(0, 0.0))
    load(rig, 10)
    assert placed(rig) == ["a", "b", "c"], "nor has it what the prefill node computes"
    adopt(rig, "a")
    load(rig, 9, "p1")
    assert placed(rig) == ["a", "b", "c"], "its blocks are still counted: the last load was before"
    load(rig, 10)
    assert placed(rig) == ["a", "b", "c", "d"]
    assert rig.core.states().count(AttemptState.UNPLACED) == 1


@pytest.mark.parametrize(("windows", "needed"), [((None,), 7), ((None, 16), 7 + 2), ((None, 24), 7 + 3), ((40,), 4)])
def test_of_layers_with_windows_a_request_takes_what_is_read(windows: tuple[int | None, ...], needed: int) -> None:
    """96 tokens in blocks of 16, and the next one's."""
    layers = tuple(LayerKv(1, 8, 8, "float32", window) for window in windows)
    layout = KvLayout(layers, 16, "f", groups=group_layers(layers))
    node = Node(dataclasses.replace(info("d1", NodeRole.DECODE), layout=layout), Load(0, 0, 0, 0))
    assert num_blocks(node, 96, 1) == needed
    assert num_blocks(node, 96, 3) == needed + 2 * len(windows)
    assert node.capacity == 9 * 16


def test_what_no_decode_node_could_hold_is_refused_and_nobody_waits_for_it() -> None:
    rig = RouterRig("p1", "d1")
    load(rig, 50)
    with pytest.raises(InvalidRequest, match="needs 102 KV blocks, and a decode node has 100 at most"):
        submit(rig, "long", 101 * 16)
    params = SamplingParams(max_tokens=8)
    with pytest.raises(InvalidRequest, match="needs 102 KV blocks for n 100, and a decode node has 100 at most"):
        rig.core.submit(RoutedRequest("many", tuple(range(LONG)), 100, params, 60.0), 0.0)
    submit(rig, "a")
    assert placed(rig) == ["a"]


def test_all_beams_of_a_search_need_room() -> None:
    """Of one answer, too."""
    rig = RouterRig("p1", "d1")
    rig.core.node_up(dataclasses.replace(info("d1", NodeRole.DECODE), max_num_seqs=10), 0.0)
    load(rig, 50)
    params = SamplingParams(max_tokens=8, temperature=0.0, beam_width=10)
    rig.core.submit(RoutedRequest("a", tuple(range(LONG)), 1, params, 60.0), 0.0)
    assert rig.core.pool.get("d1").num_promised == 2 + 10
    rig.core.node_load("d1", Load(0, 1, 11, 11), 0.0)
    with pytest.raises(InvalidRequest, match="needs 12 KV blocks for n 10, and a decode node has 11 at most"):
        rig.core.submit(RoutedRequest("b", tuple(range(LONG)), 1, params, 60.0), 0.0)


def test_what_exactly_fits_a_decode_node_is_placed() -> None:
    """An idle one: the first token goes on in the prompt's last block."""
    rig = RouterRig("p1", "d1")
    rig.core.node_load("d1", Load(0, 0, 100, 100), 0.0)
    submit(rig, "long", 99 * 16 + 1)
    assert placed(rig) == ["long"]


def test_answers_of_one_token_need_no_room_on_a_decode_node() -> None:
    rig = RouterRig("p1", "d1")
    load(rig, 0)
    submit(rig, "a", 101 * 16, max_tokens=1)
    assert placed(rig) == ["a"]
    assert rig.core.pool.get("d1").num_promised == 0


@given(
    st.lists(st.one_of(st.none(), st.integers(1, 100)), min_size=1, max_size=3, unique=True),
    st.integers(1, 8),
    st.integers(1, 700),
)
def test_a_decode_node_asks_for_as_many_blocks_as_the_router_expects(
    windows: list[int | None], n: int, num_tokens: int
) -> None:
    layers = tuple(LayerKv(1, 8, 8, "float32", window) for window in windows)
    layout = KvLayout(layers, 16, "f", groups=group_layers(layers))
    node = Node(dataclasses.replace(info("d1", NodeRole.DECODE), layout=layout), Load(0, 0, 0, 0))
    shape = TableShape(16, layout.windows)
    lacking = shape.lacking(num_tokens // 16 + 1, num_tokens, (0,) * shape.width)
    assert least_blocks(node, num_tokens, n) == len(lacking) + (n - 1) * shape.width, "see Reservations._num_blocks"


def test_a_node_that_is_too_small_does_not_count_as_room_even_if_it_is_idle() -> None:
    rig = RouterRig("p1", "d1", "d2")
    load(rig, 5)
    rig.core.node_load("d2", Load(0, 0, 20, 20), 0.0)
    submit(rig, "long", 50 * 16)
    assert placed(rig) == []
    assert rig.core.states().count(AttemptState.UNPLACED) == 1
    rig.core.node_lost("d1", "gone", 0.0)
    rig.core.node_load("d2", Load(0, 0, 20, 20), 0.0)
    rig.collect()
    assert isinstance(rig.end, NodeUnavailable), "none is left that could hold it"


def test_what_only_an_avoided_node_could_hold_goes_there_and_nobody_waits_for_it() -> None:
    rig = RouterRig("p1", "d1", "d2")
    rig.core.node_load("d1", Load(0, 0, 100, 100), 0.0)
    rig.core.node_load("d2", Load(0, 0, 20, 20), 0.0)
    submit(rig, "long", 50 * 16)
    ((_, prefill),) = rig.prefills
    rig.say("d1", prefill, End(TransferError("failed once")))
    rig.core.node_load("d1", Load(0, 0, 100, 100), 1.0)
    rig.collect()
    assert placed(rig) == ["long", "long"]
    assert [prefill.decode.incarnation for _, prefill in rig.prefills if prefill.decode] == ["d1", "d1"]


def test_what_only_a_node_could_hold_that_fits_no_other_holds_nobody_up() -> None:
    rig = RouterRig("p1", "d1", "d2")
    load(rig, 0)
    rig.core.node_load("d2", Load(0, 1, 0, 20), 0.0)
    submit(rig, "long", 50 * 16)
    submit(rig, "short", 3)
    rig.core.node_lost("d1", "is upgraded", 1.0)
    other = info("d1", NodeRole.DECODE)
    rig.core.node_up(dataclasses.replace(other, layout=dataclasses.replace(other.layout, block_size=8)), 1.0)
    rig.core.node_load("d2", Load(0, 0, 20, 20), 1.0)
    rig.collect()
    assert placed(rig) == ["short"]


def test_decode_nodes_alone_get_what_they_can_hold() -> None:
    rig = RouterRig("d1", "d2", with_prefill=False)
    rig.core.node_load("d1", Load(0, 0, 20, 20), 0.0)
    load(rig, 90, "d2")
    params = SamplingParams(max_tokens=8)
    rig.core.submit(RoutedRequest("many", tuple(range(LONG)), 50, params, 60.0), 0.0)
    rig.collect()
    assert [incarnation for incarnation, _ in rig.prefills] == ["d2"]


@pytest.mark.parametrize("with_prefill", [True, False])
def test_many_answers_go_where_there_are_as_many_places(with_prefill: bool) -> None:
    """d1 is less loaded, and refuses what is handed over with more answers than it may run at a time."""
    names = ("p1", "d1", "d2") if with_prefill else ("d1", "d2")
    rig = RouterRig(*names, with_prefill=with_prefill)
    rig.core.node_up(dataclasses.replace(info("d2", NodeRole.DECODE), max_num_seqs=8), 0.0)
    rig.core.node_load("d1", Load(0, 0, 100, 100), 0.0)
    load(rig, 90, "d2")
    params = SamplingParams(max_tokens=8)
    rig.core.submit(RoutedRequest("many", tuple(range(LONG)), 8, params, 60.0), 0.0)
    rig.collect()
    ((incarnation, prefill),) = rig.prefills
    assert (prefill.decode.incarnation if prefill.decode else incarnation) == "d2"
    more = RoutedRequest("more", tuple(range(LONG)), 9, params, 60.0)
    if with_prefill:
        with pytest.raises(InvalidRequest, match=r"^n 9 is more than --max-num-seqs 8$") as refused:
            rig.core.submit(more, 0.0)
        assert refused.value.param == "n"
    else:
        rig.core.submit(more, 0.0)  # its answers take turns


def test_the_node_that_is_away_and_could_hold_it_may_have_fewer_blocks_than_an_older_one() -> None:
    """The nodes of a model were started again with larger blocks."""
    rig = RouterRig()

    def come(name: str, block_size: int, size: int) -> None:
        plain = info(name, NodeRole.PREFILL if name[0] == "p" else NodeRole.DECODE)
        layout = dataclasses.replace(plain.layout, block_size=block_size)
        rig.core.node_up(dataclasses.replace(plain, layout=layout, num_blocks=size), 0.0)
        rig.core.node_load(name, Load(0, 0, size, size), 0.0)

    come("d1", 16, 60)
    rig.core.node_lost("d1", "started again", 0.0)
    for name, size in (("p2", 40), ("d2", 40), ("d3", 10)):
        come(name, 64, size)
    rig.core.node_lost("d2", "gone", 1.0)
    with pytest.raises(NodeUnavailable, match="needs 32 KV blocks, and a decode node has 10 at most while d2 is away"):
        submit(rig, "a", 31 * 64)


def test_what_only_a_node_that_is_away_could_hold_is_unavailable() -> None:
    rig = RouterRig("p1", "d1", "d2")
    load(rig, 5)
    rig.core.node_load("d2", Load(0, 0, 20, 20), 0.0)
    rig.core.drain_node("d1", True, 0.0)
    with pytest.raises(NodeUnavailable, match="needs 51 KV blocks, and a decode node has 20 at most while d1 is away"):
        submit(rig, "drains", 50 * 16)
    rig.core.node_lost("d1", "gone", 0.0)
    with pytest.raises(NodeUnavailable, match="while d1 is away"):
        submit(rig, "gone", 50 * 16)
    with pytest.raises(InvalidRequest, match=r"needs 102 KV blocks, and a decode node has 20 at most$"):
        submit(rig, "never", 101 * 16)


def test_what_only_a_lost_node_could_hold_ends_with_its_loss() -> None:
    rig = RouterRig("p1", "d1", "d2")
    load(rig, 90)
    rig.core.node_load("d2", Load(0, 0, 20, 20), 0.0)
    submit(rig, "long", 50 * 16)
    assert placed(rig) == ["long"]
    rig.core.node_lost("d1", "gone", 0.0)
    rig.collect()
    assert not rig.core.states()
    assert isinstance(rig.end, NodeUnavailable)


def test_as_many_answers_as_only_a_lost_node_could_run_end_with_its_loss() -> None:
    """The nodes that are left would refuse them, which the client could have done nothing about."""
    rig = RouterRig("p1", "d1")
    rig.core.node_up(dataclasses.replace(info("d2", NodeRole.DECODE), max_num_seqs=8), 0.0)
    load(rig, 90, "d2")
    rig.core.submit(RoutedRequest("many", tuple(range(LONG)), 8, SamplingParams(max_tokens=8), 60.0), 0.0)
    rig.core.node_lost("d2", "gone", 0.0)
    rig.collect()
    assert isinstance(rig.end, NodeUnavailable)
    assert rig.end.message == "decode node d2 lost: gone; n 8 is more than --max-num-seqs 4"


def test_as_many_answers_as_a_node_that_comes_can_not_run_end_with_the_loss_before() -> None:
    rig = RouterRig("p1")
    rig.core.node_up(dataclasses.replace(info("d2", NodeRole.DECODE), max_num_seqs=8), 0.0)
    load(rig, 90, "d2")
    rig.core.submit(RoutedRequest("many", tuple(range(LONG)), 8, SamplingParams(max_tokens=8), 60.0), 0.0)
    rig.core.node_lost("d2", "gone", 0.0)
    assert rig.core.states() == [AttemptState.UNPLACED]
    rig.core.node_up(dataclasses.replace(info("d1", NodeRole.DECODE), num_blocks=100), 1.0)
    rig.collect()
    assert isinstance(rig.end, NodeUnavailable)
    assert rig.end.message == "decode node d2 lost: gone; n 8 is more than --max-num-seqs 4"


def test_after_a_loss_room_is_needed_for_the_output_too() -> None:
    """32 tokens of prompt and 40 of output take 5 blocks, and one for the next token."""
    rig = RouterRig("p1", "d1")
    submit(rig, "a", max_tokens=64)
    ((_, prefill),) = rig.prefills
    adopt(rig, "a")
    rig.say("d1", prefill, *(Tokens(0, 1 + i, (7,)) for i in range(39)))
    rig.core.node_up(info("d2", NodeRole.DECODE), 1.0)
    rig.core.node_load("d2", Load(0, 1, 6, 100), 1.0)
    rig.core.node_lost("d1", "gone", 1.0)
    rig.collect()
    assert len(rig.prefills) == 1, "it has 6 blocks, of which the request that runs there needs one"
    rig.core.node_load("d2", Load(0, 1, 7, 100), 1.0)
    rig.collect()
    assert [len(p.prompt_tokens) + sum(len(s.output_tokens) for s in p.samples) for _, p in rig.prefills] == [32, 72]


def test_what_is_given_up_gives_its_credits_back() -> None:
    rig = RouterRig("p1", "d1")
    load(rig, 4)
    submit(rig, "a")
    submit(rig, "b")
    rig.core.cancel("a", 1.0)
    load(rig, 4)
    assert placed(rig) == ["a", "b"]


def test_another_decode_node_with_room_is_chosen() -> None:
    rig = RouterRig("p1", "d1", "d2")
    load(rig, 1)
    load(rig, 4, "d2")
    submit(rig, "a")
    (prefill,) = [p for _, p in rig.prefills]
    assert prefill.decode
    assert prefill.decode.incarnation == "d2"


def target(rig: RouterRig) -> str:
    """Of what was placed last."""
    decode = rig.prefills[-1][1].decode
    assert decode
    return decode.incarnation


@pytest.mark.parametrize("whose", ["this router's", "another router's"])
def test_a_node_with_a_seat_is_chosen_if_there_is_one(whose: str) -> None:
    """d1 may run four answers at a time. It has four short ones, and d2 one that is longer than these together."""
    rig = RouterRig("p1", "d1", "d2")
    rig.core.drain_node("d1", True, 0.0)
    submit(rig, "long", 20 * 16)
    rig.core.drain_node("d1", False, 0.0)
    if whose == "this router's":
        for name in "abcd":
            submit(rig, name, 3)
            assert target(rig) == "d1"
    load(rig, 90, "d2")
    rig.core.node_load("d1", Load(0, 0 if whose == "this router's" else 4, 90, 100), 0.0)
    for name in "efg":
        submit(rig, name, 3)
        assert target(rig) == "d2", "it would wait for a seat"
    submit(rig, "h", 3)
    assert target(rig) == "d1", "none has a seat, and it has less to do"
    rig.core.cancel("e", 1.0)
    submit(rig, "i", 3)
    assert target(rig) == "d2"


def test_a_seat_is_of_no_use_without_room() -> None:
    rig = RouterRig("p1", "d1", "d2")
    load(rig, 1)
    rig.core.node_load("d2", Load(0, 4, 90, 100), 0.0)
    submit(rig, "a")
    assert target(rig) == "d2"


def test_the_first_of_several_nodes_that_come_does_not_get_all_that_waits() -> None:
    """Its loads say what it has done with it only later."""
    rig = RouterRig("p1")
    for i in range(9):
        submit(rig, f"r{i}")
    for name in ("d1", "d2"):
        rig.core.node_up(info(name, NodeRole.DECODE), 1.0)
    rig.collect()
    targets = [prefill.decode.incarnation for _, prefill in rig.prefills if prefill.decode]
    assert targets == ["d1"] * 3 + ["d2"] * 3, "with three blocks each"
    rig.core.node_load("d1", Load(0, 0, 9, 9), 1.1)
    submit(rig, "behind")
    assert len(rig.prefills) == 6, "they are promised"


def test_an_idle_node_gets_what_it_may_refuse_itself() -> None:
    rig = RouterRig("p1", "d1")
    rig.core.node_load("d1", Load(0, 0, 1, 9), 0.0)
    submit(rig, "a")
    submit(rig, "b")
    assert placed(rig) == ["a"]


def test_a_decode_node_without_prefill_nodes_queues_by_itself() -> None:
    rig = RouterRig("d1", with_prefill=False)
    load(rig, 0)
    submit(rig, "a")
    assert placed(rig) == ["a"]


def test_a_short_request_does_not_overtake_a_long_one_that_waits() -> None:
    rig = RouterRig("p1", "d1")
    load(rig, 3)
    submit(rig, "long")
    submit(rig, "short", 3)
    assert placed(rig) == []
    load(rig, 10)
    assert placed(rig) == ["long", "short"]


@given(st.lists(st.tuples(st.integers(-2, 2), st.integers(0, 30)), max_size=8))
def test_they_are_placed_in_the_order_in_which_they_are_due(wanted: Sequence[tuple[int, int]]) -> None:
    rig = RouterRig("p1", "d1")
    load(rig, 0)
    arrivals = sorted(enumerate(wanted), key=lambda one: one[1][1])
    for number, (priority, at_s) in arrivals:
        submit(rig, str(number), priority=priority, now=float(at_s))
    assert placed(rig) == []
    load(rig, 100, now=40.0)
    due = sorted(arrivals, key=lambda one: one[1][1] + 10 * one[1][0])
    assert placed(rig) == [str(number) for number, _ in due]
    ages = {prefill.attempt_id.request_id: prefill.age_s for _, prefill in rig.prefills}
    assert ages == {str(number): 40.0 - at_s for number, (_, at_s) in arrivals}


def test_waiting_is_bounded_by_tokens_and_says_when_to_come_again() -> None:
    rig = RouterRig("p1", "d1", max_waiting=0, max_waiting_tokens=2 * (LONG + 8))
    load(rig, 0)
    submit(rig, "a")
    submit(rig, "b")
    with pytest.raises(Full, match=r"80 of 80 tokens wait for decode nodes \(--max-waiting-tokens\)") as full:
        submit(rig, "c")
    assert full.value.retry_after_s == 1
    load(rig, 4, now=20.0)
    assert placed(rig) == ["a"], "after 20 s"
    submit(rig, "c", now=20.0)
    with pytest.raises(Full) as full:
        submit(rig, "d", now=20.0)
    assert full.value.retry_after_s == 10, "half of what waits is to leave"
    assert full.value.retry_after_s <= LONGEST_RETRY_AFTER_S
    assert len(rig.core.requests) == 3


def test_one_that_was_taken_waits_again_however_many_do() -> None:
    rig = RouterRig("p1", "d1", "d2", max_waiting=0, max_waiting_tokens=1)
    load(rig, 4)
    load(rig, 0, "d2")
    submit(rig, "a")
    submit(rig, "b", now=0.5)
    rig.core.node_lost("d1", "died", 1.0)
    rig.collect()
    assert len(rig.core.requests) == 2
    load(rig, 100, "d2", now=2.0)
    assert placed(rig) == ["a", "a", "b"]


def test_one_that_finds_no_room_in_time_is_told_so() -> None:
    rig = RouterRig("p1", "d1")
    load(rig, 0)
    submit(rig, "a")
    rig.core.tick(60.0)
    rig.collect()
    assert isinstance(rig.end, DeadlineExceeded)
    assert "no room on the decode nodes within 60 s" in rig.end.message
