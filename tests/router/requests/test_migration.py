"""The router has requests move from a decode node that is to leave, and takes tokens from whichever node has them."""

from __future__ import annotations

import pytest

from baton.errors import BatonError, CacheExhausted, NodeUnavailable, Overloaded, PeerLost, TransferTimeout
from baton.messages import (
    Adopted,
    DecodeTarget,
    End,
    HandedOff,
    Load,
    Migrate,
    Prefill,
    SampleEnd,
    Started,
    Stayed,
    Tokens,
)
from baton.node_info import NodeRole
from baton.sampling import FinishReason, SamplingParams
from router.placement.circuit_breakers import MAX_FAILURES
from router.placement.pool import Pool
from router.placement.routed_node import Node
from router.requests.migrations import ASK_AGAIN_S
from router.requests.request_state import RoutedRequest
from tests.router.rig import RouterRig, info

ADOPTED = Adopted(0.1, 0, 9)
HANDED_OFF = HandedOff(0.1)
STAYED = Stayed(1, Overloaded("no room"))


class Moving:
    """A request that has three tokens, of the prefill node and of `old`; `new` is the other decode node."""

    def __init__(self) -> None:
        self.rig = RouterRig("p1", "d1", "d2")
        self.prefill = self.rig.submit()
        assert self.prefill.decode
        self.old = self.prefill.decode.incarnation
        self.new = {"d1": "d2", "d2": "d1"}[self.old]
        self.rig.say("p1", self.prefill, Started(0, 0.0), Tokens(0, 0, (1,)), HANDED_OFF)
        self.rig.say(self.old, self.prefill, ADOPTED, Tokens(0, 1, (2, 3)))

    def drain(self, now: float = 2.0) -> list[tuple[str, Migrate]]:
        """The old node stops; what was asked of it now."""
        known = len(self.rig.sent)
        self.rig.core.node_load(self.old, Load(draining=True), now)
        self.rig.collect()
        return [(a.incarnation, a.message) for a in self.rig.sent[known:] if isinstance(a.message, Migrate)]

    def say(self, node: str, *kinds: object) -> None:
        self.rig.say(node, self.prefill, *kinds)

    def ends_well(self, *tokens: int) -> None:
        self.say(self.new, SampleEnd(0, FinishReason.STOP), End())
        assert self.rig.end is None
        assert [token for _, token in self.rig.told] == list(tokens)
        assert self.rig.last_word.timings.num_attempts == 1
        assert not any(node.to_decode or node.num_answers for node in self.rig.core.pool.role(NodeRole.DECODE))

    @property
    def outcomes(self) -> dict[str, int]:
        return {outcome: number for outcome, number in self.rig.core.num_migrations().items() if number}


@pytest.fixture
def moving() -> Moving:
    moving = Moving()
    assert moving.drain() == [(moving.old, Migrate(moving.prefill.attempt_id, 1, DecodeTarget(moving.new, moving.new)))]
    return moving


def test_a_target_that_was_lost_and_is_there_again_owes_nothing(moving: Moving) -> None:
    moving.rig.core.node_lost(moving.new, "its stream broke", 2.0)
    moving.rig.core.node_up(info(moving.new, NodeRole.DECODE), 2.0)
    moving.say(moving.old, STAYED)
    node = moving.rig.core.pool.get(moving.new)
    assert node
    assert (node.to_decode, node.num_answers) == (0, 0)


def test_the_node_that_fails_a_request_that_moves_is_the_one_to_avoid(moving: Moving) -> None:
    assert moving.prefill.decode
    moving.rig.core.node_load(moving.old, Load(), 2.0)  # it goes on
    moving.say(moving.old, End(CacheExhausted("no blocks")))
    (_, again) = moving.rig.prefills[-1]
    assert again.decode
    assert (again.attempt_id.attempt, again.decode.incarnation) == (1, moving.new)


def test_a_request_moves_once_and_keeps_its_attempt(moving: Moving) -> None:
    assert moving.drain(9.0) == [], "it moves already"
    moving.say(moving.old, Tokens(0, 3, (4,)), HANDED_OFF)
    assert not moving.rig.core.is_on(moving.old)
    moving.say(moving.new, ADOPTED, Tokens(0, 4, (5,)))
    moving.ends_well(1, 2, 3, 4, 5)
    assert moving.rig.last_word.timings.decode_node == moving.new
    assert moving.rig.last_word.timings.num_moves == 1
    assert moving.outcomes == {"moved": 1}


def test_tokens_of_the_new_node_wait_for_those_of_the_old_one(moving: Moving) -> None:
    moving.say(moving.new, ADOPTED, Tokens(0, 4, (5,)))
    assert [token for _, token in moving.rig.told] == [1, 2, 3]
    moving.say(moving.old, Tokens(0, 3, (4,)))
    assert [token for _, token in moving.rig.told] == [1, 2, 3, 4, 5]
    moving.say(moving.old, HANDED_OFF)
    moving.ends_well(1, 2, 3, 4, 5)


def test_tokens_that_never_come_fail_the_attempt(moving: Moving) -> None:
    moving.say(moving.new, ADOPTED, Tokens(0, 4, (5,)))
    moving.say(moving.old, HANDED_OFF)
    assert len(moving.rig.prefills) == 2
    assert [token for _, token in moving.rig.told] == [1, 2, 3]


def test_a_request_that_stays_is_asked_again_after_a_while(moving: Moving) -> None:
    moving.say(moving.old, STAYED, Tokens(0, 3, (4,)))
    assert moving.drain(1.0 + 0.9 * ASK_AGAIN_S) == []
    ((_, again),) = moving.drain(1.0 + ASK_AGAIN_S)
    assert again.move == 2
    moving.say(moving.old, STAYED)  # a repeat: of the first
    assert moving.drain(99.0) == []
    moving.say(moving.old, HANDED_OFF)
    moving.say(moving.new, ADOPTED)
    moving.ends_well(1, 2, 3, 4)
    assert moving.outcomes == {"moved": 1, "stayed": 1}


def test_a_target_is_needed_until_it_is_known_whether_the_request_has_moved(moving: Moving) -> None:
    """It is drained, too: the end of its session would abort what it has got meanwhile."""
    moving.rig.core.drain_node(moving.new, True, 2.0)
    assert moving.rig.core.is_on(moving.new)
    moving.say(moving.old, STAYED)
    assert not moving.rig.core.is_on(moving.new)


def test_a_target_that_is_lost_leaves_the_request_where_it_is(moving: Moving) -> None:
    moving.rig.core.node_lost(moving.new, "died", 2.0)
    moving.rig.collect()
    assert len(moving.rig.prefills) == 1
    moving.say(moving.old, STAYED, Tokens(0, 3, (4,)), SampleEnd(0, FinishReason.STOP), End())
    assert moving.rig.end is None
    assert [token for _, token in moving.rig.told] == [1, 2, 3, 4]


def test_a_request_that_has_gone_to_a_lost_target_goes_on_elsewhere(moving: Moving) -> None:
    moving.rig.core.node_lost(moving.new, "died", 2.0)
    moving.rig.core.node_up(info(moving.new, NodeRole.DECODE), 2.0)  # its session broke, and with it its requests
    moving.say(moving.old, HANDED_OFF)
    _, second = moving.rig.prefills[-1]
    assert second.attempt_id.attempt == 1
    assert second.samples[0].output_tokens == (1, 2, 3)
    assert moving.outcomes == {"lost": 1}


def test_a_move_whose_end_is_not_known_ends_at_both_nodes(moving: Moving) -> None:
    moving.say(moving.old, End(PeerLost("gone")))
    assert moving.rig.aborted == {moving.old, moving.new}
    assert moving.rig.prefills[-1][1].attempt_id.attempt == 1
    assert moving.outcomes == {"lost": 1}


@pytest.mark.parametrize(
    "error", [PeerLost("gone"), TransferTimeout("no answer"), NodeUnavailable("it has lost the router")]
)
def test_a_target_that_may_have_lost_the_request_is_avoided(error: BatonError) -> None:
    moving = Moving()
    core = moving.rig.core
    core.node_up(info("d3", NodeRole.DECODE), 1.0)
    core.node_load("d3", Load(num_running=3), 1.0)  # it would be second choice
    ((_, migrate),) = moving.drain()
    assert migrate.target.incarnation == moving.new
    moving.say(moving.old, End(error))
    _, second = moving.rig.prefills[-1]
    assert second.decode
    assert second.decode.incarnation == "d3"


def test_moves_that_fail_are_not_blamed_on_the_node_that_computed_the_prompts() -> None:
    rig = RouterRig("p1", "d1")
    for number in range(MAX_FAILURES):
        rig.core.submit(RoutedRequest(f"r{number}", (1, 2, 3), 1, SamplingParams(max_tokens=8), 60.0), 0.0)
        rig.collect()
    prefills = [prefill for _, prefill in rig.prefills]
    for prefill in prefills:
        rig.say("p1", prefill, Started(0, 0.0), Tokens(0, 0, (1,)), HANDED_OFF)
        rig.say("d1", prefill, ADOPTED)
    rig.core.node_up(info("d2", NodeRole.DECODE), 1.0)
    rig.core.drain_node("d1", True, 1.0)
    for prefill in prefills:
        rig.say("d1", prefill, End(PeerLost("decode node d2 is gone")))
    assert rig.core.num_migrations()["lost"] == MAX_FAILURES
    assert rig.core.pool.why_degraded(1.0) is None
    rig.core.drain_node("d1", False, 1.0)
    assert rig.core.pool.why_degraded(1.0) is None


def test_the_clients_leave_ends_a_move_at_both_nodes(moving: Moving) -> None:
    moving.rig.core.cancel("r", 2.0)
    moving.rig.collect()
    assert moving.rig.aborted == {moving.old, moving.new}


def test_a_request_that_waits_for_its_handoff_moves_after_it() -> None:
    rig = RouterRig("p1", "d1", "d2")
    prefill: Prefill = rig.submit()
    assert prefill.decode
    old = prefill.decode.incarnation
    rig.say("p1", prefill, Tokens(0, 0, (1,)))

    def drained() -> int:
        rig.core.node_load(old, Load(draining=True), 2.0)
        rig.collect()
        return sum(isinstance(action.message, Migrate) for action in rig.sent)

    assert drained() == 0
    rig.say(old, prefill, ADOPTED)
    assert drained() == 0, "parts may still come from the prefill node"
    rig.say("p1", prefill, HANDED_OFF)
    assert drained() == 1


def test_without_another_node_a_request_finishes_where_it_is() -> None:
    moving = Moving()
    moving.rig.core.node_lost(moving.new, "died", 1.0)
    assert moving.drain() == []
    moving.say(moving.old, SampleEnd(0, FinishReason.STOP), End())
    assert moving.rig.end is None


def test_a_request_does_not_return_to_where_it_was(moving: Moving) -> None:
    moving.say(moving.old, Tokens(0, 3, (4,)), HANDED_OFF)
    moving.say(moving.new, ADOPTED)
    moving.rig.core.node_load(moving.old, Load(), 3.0)
    moving.rig.core.drain_node(moving.new, True, 9.0)
    moving.rig.collect()
    migrates = [action for action in moving.rig.sent if isinstance(action.message, Migrate)]
    assert len(migrates) == 1
    third = info("d3", NodeRole.DECODE)
    moving.rig.core.node_up(third, 9.0)
    moving.rig.core.drain_node(moving.new, True, 9.0)
    moving.rig.collect()
    moving.say(moving.new, HANDED_OFF)
    moving.say("d3", ADOPTED)
    moving.rig.core.drain_node("d3", True, 9.0)
    moving.rig.collect()
    migrates = [action for action in moving.rig.sent if isinstance(action.message, Migrate)]
    assert [action.incarnation for action in migrates] == [moving.old, moving.new]


def test_a_node_that_leaves_looks_for_others_once_for_all_its_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of its loads asks again, and it may have a thousand requests, among a hundred nodes."""
    rig = RouterRig("p1", "d1")
    for i in range(3):
        rig.core.submit(RoutedRequest(f"r{i}", (1, 2, 3), 1, SamplingParams(max_tokens=8), 60.0), 0.0)
    rig.collect()
    for _, prefill in rig.prefills:
        rig.say("p1", prefill, Started(0, 0.0), Tokens(0, 0, (1,)), HANDED_OFF)
        rig.say("d1", prefill, ADOPTED)
    rig.core.node_up(info("d2", NodeRole.DECODE), 1.0)
    looks, targets = list[str](), Pool.targets

    def noted(pool: Pool, source: Node, now: float) -> list[Node]:
        looks.append(source.info.incarnation)
        return targets(pool, source, now)

    monkeypatch.setattr(Pool, "targets", noted)
    rig.core.drain_node("d1", True, 2.0)
    rig.collect()
    assert len([a for a in rig.sent if isinstance(a.message, Migrate)]) == 3
    assert looks == ["d1"]


def test_blocks_that_were_promised_are_the_old_nodes_also_if_it_never_said_that_it_began() -> None:
    rig = RouterRig("d1", with_prefill=False)
    prefill = rig.submit()
    rig.say("d1", prefill, Tokens(0, 0, (1,)))
    rig.core.node_up(info("d2", NodeRole.DECODE), 1.0)
    rig.core.drain_node("d1", True, 2.0)
    rig.say("d1", prefill, HANDED_OFF)
    rig.say("d2", prefill, Tokens(0, 1, (2,)), SampleEnd(0, FinishReason.STOP), End())
    assert rig.end is None
    nodes = [node for name in ("d1", "d2") if (node := rig.core.pool.get(name))]
    assert [node.num_promised for node in nodes] == [0, 0]


def test_a_move_in_which_the_old_node_dies_is_lost(moving: Moving) -> None:
    moving.rig.core.node_lost(moving.old, "killed", 3.0)
    assert moving.outcomes == {"lost": 1}


def test_a_move_of_a_request_that_ends_meanwhile_came_to_nothing(moving: Moving) -> None:
    moving.say(moving.old, SampleEnd(0, FinishReason.STOP), End())
    assert moving.rig.end is None
    assert moving.outcomes == {"stayed": 1}
