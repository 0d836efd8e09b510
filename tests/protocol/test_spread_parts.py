"""The parts of a chunk leave a prefill node spread over the next chunk's time, and those of the last one at once."""

from __future__ import annotations

import pytest

from baton.errors import RequestCancelled
from baton.handoff_messages import Commit, Grant, Reserve
from baton.messages import Abort
from node.events import FromPeer
from prefill_node.outgoing import SPREAD_SHARE
from tests.protocol.fake_model import NUM_LAYERS
from tests.protocol.node import BLOCK_SIZE
from tests.protocol.test_prefill_rules import WORK, Prefilling

BUDGET = 10
"""Tokens of a step, see `tests.protocol.node`."""
NUM_WHOLE = 4
"""Chunks before the last one. Parts are of two blocks, so the fourth chunk completes two of them: the fourth, fifth."""
CHUNK_S = 0.1


class Spreading(Prefilling):
    """With a prompt of four whole chunks and a last one."""

    def __init__(self, last_chunk: int, ahead: bool = True) -> None:
        super().__init__(ahead)
        self.ask(WORK, tuple(range(2, 2 + NUM_WHOLE * BUDGET + last_chunk)), max_tokens=5)
        self.turn()  # which launches the second step: how long a step takes is known if another one follows
        self.core = self.node.core
        reserve = self.said[0]
        assert isinstance(reserve, Reserve)
        planner = self.core._outgoing._parts.planners[self.peer]
        num_blocks = -(-reserve.num_tokens // BLOCK_SIZE)
        self.num_parts = len(planner.plan(0, num_blocks, reserve.grouped_from_block, reserve.layer_groups))

    def grant_all(self) -> None:
        grant = Grant(WORK, 1, 0, self.num_parts, self.num_parts)
        self.core.handle(FromPeer(self.peer, grant), self.world.now)
        self.turn()

    @property
    def num_left(self) -> int:
        """Parts that have left."""
        return self.core._outgoing._sendings[WORK].next_part

    def chunk(self, seconds: float = CHUNK_S) -> None:
        """The device computes a chunk."""
        self.world.now += seconds
        self.compute(NUM_LAYERS)

    def whole_chunks(self) -> None:
        """The device computes all chunks but the last."""
        for _ in range(NUM_WHOLE):
            self.chunk()

    def wait(self) -> float:
        """Wait for the node's deadline; returns how long that took."""
        began, deadline = self.world.now, self.core.next_deadline()
        assert deadline is not None
        self.world.now = deadline
        self.turn()
        return deadline - began


@pytest.mark.parametrize(("last_chunk", "share"), [(BUDGET, 1.0), (BUDGET // 2, 0.5)])
def test_parts_leave_evenly_within_a_share_of_the_next_chunks_time(last_chunk: int, share: float) -> None:
    node = Spreading(last_chunk)
    node.grant_all()
    node.whole_chunks()
    assert node.num_left == 4
    assert node.wait() == pytest.approx(SPREAD_SHARE * share * CHUNK_S)
    assert node.num_left == 5


def test_parts_that_a_grant_finds_computed_leave_in_what_is_left_of_that_time() -> None:
    node = Spreading(BUDGET)
    node.whole_chunks()
    node.world.now += 0.2 * SPREAD_SHARE * CHUNK_S
    node.grant_all()
    assert node.num_left == 1
    waited = [node.wait() for _ in range(4)]
    assert waited == pytest.approx([0.2 * SPREAD_SHARE * CHUNK_S] * 4)
    assert node.num_left == 5


def test_when_the_prompt_is_computed_all_parts_leave_at_once() -> None:
    node = Spreading(BUDGET)
    node.grant_all()
    node.whole_chunks()
    assert node.num_left == 4
    node.chunk(seconds=CHUNK_S / 10)  # sooner than expected
    assert node.num_left == node.num_parts
    assert any(isinstance(message, Commit) for message in node.said)


def test_the_last_parts_leave_in_the_turn_that_finds_the_prompt_computed() -> None:
    """Before a step is launched, though the clock has gone on since the turn began."""
    node = Spreading(BUDGET)
    node.grant_all()
    node.whole_chunks()
    for _ in range(NUM_LAYERS):
        node.node.model.advance()
    began = node.world.now
    node.world.now += 1e-6
    node.core._take(node.core.engine.retire())
    node.core._move_on(began)
    assert node.num_left == node.num_parts


def test_parts_leave_at_once_where_nothing_runs_beside_the_device() -> None:
    node = Spreading(BUDGET, ahead=False)
    node.grant_all()
    node.whole_chunks()
    assert node.num_left == 5


def test_a_request_that_ends_is_not_waited_for() -> None:
    node = Spreading(BUDGET)
    node.grant_all()
    node.whole_chunks()
    node.core.handle(Abort(WORK), node.world.now)
    node.turn()
    assert [type(end.error) for end in node.ends] == [RequestCancelled]
    in_flight = node.core._outgoing._parts.flights
    assert node.core.next_deadline() == in_flight.next_deadline(), "only the parts that have left are waited for"
