"""What a request takes of a decode node, and what becomes of one that few nodes or none could hold or run."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.errors import InvalidRequest, NodeUnavailable, TransferError
from baton.kv_groups import group_layers
from baton.layout import KvLayout, LayerKv
from baton.messages import End, Load
from baton.node_info import NodeRole
from baton.sampling import SamplingParams
from baton.table_shape import TableShape
from router.placement.routed_node import Node, least_blocks, num_blocks
from router.requests.request_state import AttemptState, RoutedRequest
from tests.router.requests.room import LONG, load, placed, submit
from tests.router.rig import RouterRig, info


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
