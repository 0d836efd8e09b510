"""With --migrate-above, running requests move from a decode node that is fuller than another one."""

from __future__ import annotations

import pytest

from baton.errors import CacheExhausted, Overloaded
from baton.messages import End, HandedOff, Load, Migrate, Prefill, Stayed, Tokens
from baton.node_info import NodeRole
from baton.sampling import SamplingParams
from router.requests.migrations import ASK_AGAIN_S
from router.requests.rebalancing import PAUSE_S
from router.requests.request_state import RoutedRequest
from tests.router.rig import RouterRig, info

NUM_BLOCKS = 9  # of 16 tokens


def house_of(above: float | None, *lengths: int) -> RouterRig:
    """Requests with prompts of these lengths run on `d1`; then `d2` comes."""
    rig = RouterRig("d1", with_prefill=False, migrate_above=above)
    for length in lengths:
        request = RoutedRequest(f"of {length}", (1,) * length, 1, SamplingParams(max_tokens=8), 60.0)
        rig.core.submit(request, 0.0)
        rig.collect()
        rig.say("d1", rig.prefills[-1][1], Tokens(0, 0, (1,)))
    rig.core.node_up(info("d2", NodeRole.DECODE), 0.0)
    return rig


def moves(rig: RouterRig, used: int, used_of_other: int = 0, now: float = 1.0) -> list[str]:
    """The requests that are asked to move when both nodes have told how many blocks they use."""
    known = len(rig.sent)
    rig.core.node_load("d2", Load(0, 1, NUM_BLOCKS - used_of_other, NUM_BLOCKS), now)
    rig.core.node_load("d1", Load(0, 1, NUM_BLOCKS - used, NUM_BLOCKS), now)
    rig.collect()
    asked = [action for action in rig.sent[known:] if isinstance(action.message, Migrate)]
    assert all(action.incarnation == "d1" for action in asked)
    return [action.message.attempt_id.request_id for action in asked]


@pytest.mark.parametrize(
    ("used", "used_of_other", "moved"), [(8, 0, ["of 40"]), (8, 4, ["of 20"]), (8, 6, []), (3, 0, [])]
)
def test_the_largest_request_moves_that_does_not_turn_the_tables(
    used: int, used_of_other: int, moved: list[str]
) -> None:
    assert moves(house_of(0.43, 100, 40, 20, 10), used, used_of_other) == moved


def test_one_moves_at_a_time_and_the_next_when_the_loads_tell_of_it() -> None:
    rig = house_of(0.3, 40, 20)
    assert moves(rig, used=8) == ["of 40"]
    assert moves(rig, used=8, now=1.0 + 0.9 * PAUSE_S) == []
    assert moves(rig, used=8, now=1.0 + PAUSE_S) == ["of 20"]


def test_a_node_that_is_gone_leaves_nothing_behind() -> None:
    rig = house_of(0.3, 40, 20)
    assert moves(rig, used=8) == ["of 40"]
    for name in ("d1", "d2"):
        rig.core.node_lost(name, "died", 2.0)
    assert not rig.core._rebalancing._not_before


def test_one_that_stays_lets_the_next_largest_move() -> None:
    """Its answer holds for a second; the pause is from when it was asked."""
    rig = house_of(0.3, 40, 20)
    assert moves(rig, used=8) == ["of 40"]
    rig.say("d1", rig.prefills[0][1], Stayed(1, Overloaded("no room")), now=1.0 + 0.5 * ASK_AGAIN_S)
    assert moves(rig, used=8, now=1.0 + PAUSE_S) == ["of 20"]


def test_a_request_is_not_moved_to_a_node_that_failed_it() -> None:
    rig = RouterRig("d1", "d2", with_prefill=False, migrate_above=0.3)
    rig.core.submit(RoutedRequest("r", (1,) * 40, 1, SamplingParams(max_tokens=8), 60.0), 0.0)
    rig.collect()
    first = rig.prefills[-1][0]
    rig.say(first, rig.prefills[-1][1], End(CacheExhausted("full")))
    second = rig.prefills[-1][0]
    assert second != first
    rig.say(second, rig.prefills[-1][1], Tokens(0, 0, (1,)))
    rig.core.node_load(first, Load(0, 1, NUM_BLOCKS, NUM_BLOCKS), 2.0)
    rig.core.node_load(second, Load(0, 1, 0, NUM_BLOCKS), 2.0)
    rig.collect()
    assert not [action for action in rig.sent if isinstance(action.message, Migrate)]


def test_without_the_setting_nothing_moves() -> None:
    assert moves(house_of(None, 40), used=9) == []


def test_a_request_that_has_moved_does_not_come_back() -> None:
    rig = house_of(0.3, 40)
    prefill: Prefill = rig.prefills[-1][1]
    assert moves(rig, used=8) == ["of 40"]
    rig.say("d1", prefill, HandedOff(0.0))
    rig.say("d2", prefill, Tokens(0, 1, (2,)))
    known = len(rig.sent)
    rig.core.node_load("d1", Load(0, 1, NUM_BLOCKS, NUM_BLOCKS), 5.0)
    rig.core.node_load("d2", Load(0, 1, 0, NUM_BLOCKS), 5.0)
    rig.collect()
    assert rig.sent[known:] == []


def test_two_nodes_do_not_fill_a_third_one_between_their_loads() -> None:
    rig = RouterRig("d1", "d3", with_prefill=False, migrate_above=0.3)
    for name in "abcd":
        rig.core.submit(RoutedRequest(name, (1,) * 40, 1, SamplingParams(max_tokens=8), 60.0), 0.0)
        rig.collect()
        rig.say(rig.prefills[-1][0], rig.prefills[-1][1], Tokens(0, 0, (1,)))
    rig.core.node_up(info("d2", NodeRole.DECODE), 0.0)
    asked = list[list[str]]()
    for now in (1.0, 1.0 + PAUSE_S):
        known = len(rig.sent)
        for name in ("d1", "d3"):
            rig.core.node_load(name, Load(0, 2, NUM_BLOCKS - 8, NUM_BLOCKS), now)
        rig.collect()
        asked.append([action.incarnation for action in rig.sent[known:] if isinstance(action.message, Migrate)])
    assert asked == [["d1"], ["d1"]], "d2 has said nothing of the first one when d3 is heard"
