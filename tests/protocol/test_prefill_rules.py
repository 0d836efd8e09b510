"""When parts leave a prefill node: each as soon as its KV is there, also in the midst of a step."""

from __future__ import annotations

import pytest

from baton.errors import PeerLost, RequestCancelled, TransferError
from baton.handoff_messages import Commit, CommitReply, Credit, Grant, PrefillToDecode, Refuse, Release, Reserve
from baton.messages import Abort, AttemptId, DecodeTarget, End, HandedOff, Prefill, Sample, Update
from baton.sampling import SamplingParams
from kv_transfer.parts import tag_of
from kv_transfer.staging import SlotOwner
from node.events import ClosePeer, FromPeer, PeerClosed, PeerOpened, SessionOpened, ToDecode
from node.handoffs.flights import STUCK_S
from node.handoffs.sending import Drain
from prefill_node.core import PrefillCore
from tests.protocol.fake_model import NUM_LAYERS
from tests.protocol.network import EPOCH
from tests.protocol.node import BLOCK_SIZE, PART_BLOCKS
from tests.protocol.world import World

WORK = AttemptId(EPOCH, "r", 1)
PREFIX = tuple(range(2, 2 + 2 * BLOCK_SIZE))
PROMPT = (*PREFIX, *range(50, 57))  # two blocks more, the last of them partly filled


class Prefilling:
    """A prefill node whose device computes when it is told to, and whose decode node is this test. ahead: the node
    launches steps before earlier ones end."""

    def __init__(self, ahead: bool = False) -> None:
        self.world = world = World(num_prefill=1 + ahead, num_decode=1, num_slots=8)
        world.now = 2.0
        *_, self.node, self.decode = world.nodes.values()
        self.hub, self.peer = world.hub, self.decode.incarnation
        self.node.connect(self.peer, [self.decode.transport.info()])
        self.node.core.handle(SessionOpened(EPOCH), 0.0)
        self.node.core.handle(PeerOpened(self.peer, PART_BLOCKS, self.node.model.layout), 0.0)
        self.said: list[PrefillToDecode] = []
        self.ends: list[End] = []
        self.handed_off: list[HandedOff] = []
        self.closed: list[ClosePeer] = []

    def ask(self, attempt_id: AttemptId, prompt: tuple[int, ...], max_tokens: int, address: str = "address") -> None:
        target = DecodeTarget(address, self.peer)
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        prefill = Prefill(attempt_id, self.node.incarnation, prompt, (Sample(0),), sampling, 60.0, target)
        self.node.core.handle(prefill, 1.0)
        self.turn()

    def grant(self, num_parts: int) -> None:
        self.node.core.handle(FromPeer(self.peer, Grant(WORK, 1, 0, num_parts, num_parts)), 1.5)
        self.turn()

    def turn(self) -> None:
        self.node.core.prepare(self.world.now)
        self.node.core.compute(self.world.now)
        self.node.core.check_integrity()
        for output in self.node.core.take_outputs():
            if isinstance(output, ToDecode):
                self.said.append(output.message)
            elif isinstance(output, Update) and isinstance(output.kind, End):
                self.ends.append(output.kind)
            elif isinstance(output, Update) and isinstance(output.kind, HandedOff):
                self.handed_off.append(output.kind)
            elif isinstance(output, ClosePeer):
                self.closed.append(output)

    def compute(self, num_layers: int) -> None:
        """The device computes so many layers of its one chunk."""
        for _ in range(num_layers):
            self.node.model.advance()
        self.turn()

    def receive(self, part: int, lease: int = 1) -> None:
        """The decode node takes a part of the lease in."""
        self.decode.transport.connect(self.node.incarnation, self.node.transport.info())
        slot = self.decode.staging.take(SlotOwner(self.node.incarnation, lease, part))
        assert slot is not None
        self.decode.staging.lend(slot)
        num_bytes = self.decode.staging.slot_bytes
        self.decode.transport.expect(self.node.incarnation, tag_of(lease, part), slot, num_bytes)
        self.hub.deliver_all()

    @property
    def num_sent(self) -> int:
        return self.node.staging.num_slots - self.node.staging.num_free


@pytest.fixture
def prefilling() -> Prefilling:
    """With PREFIX in its cache, and PROMPT at its first and last step."""
    one = Prefilling()
    one.ask(AttemptId(EPOCH, "earlier", 1), PREFIX, max_tokens=1)
    while one.node.model.is_busy:
        one.compute(1)
    assert one.node.core.idle
    one.ends.clear()
    one.ask(WORK, PROMPT, max_tokens=5)
    assert one.node.model.is_busy
    return one


def test_the_last_chunk_is_reserved_by_groups_of_layers(prefilling: Prefilling) -> None:
    (reserve,) = prefilling.said
    assert isinstance(reserve, Reserve)
    assert (reserve.num_tokens, reserve.grouped_from_block, reserve.layer_groups) == (len(PROMPT), 2, NUM_LAYERS)


def test_a_cached_prefix_leaves_before_anything_is_computed_and_layers_as_they_are(prefilling: Prefilling) -> None:
    prefilling.grant(num_parts=1 + NUM_LAYERS)
    assert prefilling.num_sent == 1
    for layer in range(NUM_LAYERS):
        assert not any(isinstance(message, Commit) for message in prefilling.said)
        prefilling.compute(1)
        assert prefilling.num_sent == 2 + layer
    assert any(isinstance(message, Commit) for message in prefilling.said)


def test_a_grant_that_comes_when_all_is_computed_lets_all_parts_go(prefilling: Prefilling) -> None:
    prefilling.compute(NUM_LAYERS)
    assert prefilling.num_sent == 0
    prefilling.grant(num_parts=1 + NUM_LAYERS)
    assert prefilling.num_sent == 1 + NUM_LAYERS


def test_a_decode_node_that_expects_other_parts_gets_none(prefilling: Prefilling) -> None:
    prefilling.grant(num_parts=2)
    (end,) = prefilling.ends
    assert isinstance(end.error, TransferError)
    assert prefilling.said[-1] == Release(WORK)
    prefilling.compute(NUM_LAYERS)
    assert prefilling.node.pool_is_whole()


def test_a_decode_node_that_tells_of_other_groups_gets_nothing(prefilling: Prefilling) -> None:
    told = Grant(WORK, 1, 0, GRANTED, GRANTED, num_held_in_groups=(0,))
    prefilling.node.core.handle(FromPeer(prefilling.peer, told), 1.5)
    prefilling.turn()
    (end,) = prefilling.ends
    assert isinstance(end.error, TransferError)
    assert "told of 0+0 blocks there" in end.error.message


def test_routers_may_know_a_decode_node_by_different_addresses(prefilling: Prefilling) -> None:
    other = AttemptId(EPOCH, "other", 1)
    prefilling.ask(other, (9, 8, 7), max_tokens=5, address="another")
    while prefilling.node.model.is_busy:
        prefilling.compute(1)
    prefilling.node.core.handle(FromPeer(prefilling.peer, Grant(other, 7, 0, NUM_LAYERS, NUM_LAYERS)), 3.0)
    prefilling.turn()
    assert any(isinstance(message, Commit) and message.attempt_id == other for message in prefilling.said)
    prefilling.node.core.handle(PeerClosed(prefilling.peer, "died"), 3.5)
    prefilling.turn()
    assert len(prefilling.ends) == 2
    assert prefilling.node.core.idle


def test_a_stream_that_follows_an_idle_one_owes_no_parts_of_its_leases(prefilling: Prefilling) -> None:
    core, unknown = prefilling.node.core, AttemptId(EPOCH, "unknown", 1)
    core.handle(Abort(WORK), 1.0)
    core.handle(FromPeer(prefilling.peer, Grant(unknown, 1, 0, 2, 1)), 1.0)
    while prefilling.node.model.is_busy:
        prefilling.compute(1)
    assert not core.idle, "the decode node has not said that no credit follows"
    core.handle(PeerOpened(prefilling.peer, PART_BLOCKS, prefilling.node.model.layout), 2.0)
    prefilling.turn()
    assert core.idle


GRANTED = 1 + NUM_LAYERS


@pytest.mark.parametrize(
    "grant",
    [
        Grant(WORK, 2, 0, GRANTED, GRANTED),  # once more, of another lease
        Grant(AttemptId(EPOCH, "unknown", 1), 2, 0, GRANTED, GRANTED),
    ],
)
def test_a_grant_that_nobody_asked_for_is_given_back_and_drained(prefilling: Prefilling, grant: Grant) -> None:
    prefilling.grant(num_parts=GRANTED)
    prefilling.node.core.handle(FromPeer(prefilling.peer, grant), 2.0)
    prefilling.turn()
    assert prefilling.said[-1] == Release(grant.attempt_id)
    assert not prefilling.ends


def test_two_grants_for_one_work_are_both_given_back(prefilling: Prefilling) -> None:
    unknown = AttemptId(EPOCH, "unknown", 1)
    for lease in (1, 2):
        prefilling.node.core.handle(FromPeer(prefilling.peer, Grant(unknown, lease, 0, GRANTED, 0)), 1.5)
    prefilling.node.core.handle(FromPeer(prefilling.peer, Refuse(unknown, RequestCancelled("over"))), 1.5)
    prefilling.turn()
    assert not prefilling.node.core._outgoing._peers[prefilling.peer].drains
    prefilling.node.check_integrity()


def test_a_lease_whose_rank_has_no_slot_holds_up_no_other(
    prefilling: Prefilling, monkeypatch: pytest.MonkeyPatch
) -> None:
    outgoing, unknown = prefilling.node.core._outgoing, AttemptId(EPOCH, "unknown", 1)
    drain = outgoing._parts.drain
    monkeypatch.setattr(outgoing._parts, "drain", lambda peer, lease, *of: lease > 1 and drain(peer, lease, *of))
    for lease in (1, 2):
        grant = Grant(unknown, lease, 0, GRANTED, GRANTED)
        prefilling.node.core.handle(FromPeer(prefilling.peer, grant), 1.5)
    prefilling.turn()
    drains = outgoing._peers[prefilling.peer].drains
    assert [drains[lease].next_part for lease in (1, 2)] == [0, GRANTED]


@pytest.mark.parametrize("is_over", [False, True])
def test_credits_beyond_the_parts_are_none(prefilling: Prefilling, is_over: bool) -> None:
    prefilling.grant(num_parts=GRANTED)
    credit, abort = FromPeer(prefilling.peer, Credit(1, 2**23)), Abort(WORK)
    for event in (abort, credit) if is_over else (credit, abort):
        prefilling.node.core.handle(event, 2.0)
    prefilling.turn()
    assert prefilling.num_sent == GRANTED


def test_a_decode_node_that_holds_more_blocks_than_there_are_gets_nothing(prefilling: Prefilling) -> None:
    prefilling.node.core.handle(FromPeer(prefilling.peer, Grant(WORK, 1, 2**31, 0, 0)), 1.5)
    prefilling.turn()
    (end,) = prefilling.ends
    assert isinstance(end.error, TransferError)


def test_who_has_no_stream_is_not_heard(prefilling: Prefilling) -> None:
    core = prefilling.node.core
    core.handle(PeerClosed(prefilling.peer, "died"), 1.5)
    prefilling.ask(AttemptId(EPOCH, "next", 1), (9, 8, 7), max_tokens=5)
    while prefilling.node.model.is_busy:
        prefilling.compute(1)
    core.handle(FromPeer(prefilling.peer, Grant(AttemptId(EPOCH, "next", 1), 9, 0, NUM_LAYERS, NUM_LAYERS)), 3.0)
    prefilling.turn()
    assert not any(isinstance(message, Commit) for message in prefilling.said)


def test_a_prompt_that_ends_in_the_midst_of_a_step_gives_its_blocks_up_with_the_step(prefilling: Prefilling) -> None:
    prefilling.grant(num_parts=1 + NUM_LAYERS)
    prefilling.compute(1)
    node, blocks = prefilling.node, prefilling.node.core.engine.blocks
    node.core.handle(Abort(WORK), 3.0)
    prefilling.turn()
    assert blocks.num_free + blocks.num_cached < blocks.num_total, "a running step writes into blocks that are free"
    prefilling.compute(1)
    assert node.pool_is_whole()


def test_the_last_word_comes_when_the_last_part_has_left_and_says_when(prefilling: Prefilling) -> None:
    prefilling.compute(NUM_LAYERS)  # at 2.0
    prefilling.world.now = 2.25
    prefilling.grant(num_parts=1 + NUM_LAYERS)
    (commit,) = [message for message in prefilling.said if isinstance(message, Commit)]
    assert commit.age_s == 0.25
    prefilling.node.core.handle(FromPeer(prefilling.peer, CommitReply(1, WORK, None)), 2.5)
    for part in range(1 + NUM_LAYERS):
        prefilling.turn()
        assert not prefilling.handed_off
        prefilling.world.now += 0.5
        prefilling.receive(part)
    prefilling.turn()
    (last,) = prefilling.handed_off
    assert last.gather_s + last.wire_s == pytest.approx(2.25 + 3 * 0.5 - 2.0)
    assert prefilling.node.core.idle
    assert prefilling.node.pool_is_whole()
    assert not prefilling.ends


def test_a_decode_node_that_is_full_for_ever_does_not_stop_prompts_for_another() -> None:
    one = Prefilling()
    node, core = one.node, one.node.core
    core.handle(PeerOpened("full", PART_BLOCKS, node.model.layout), 0.0)
    sampling = SamplingParams(max_tokens=5, ignore_eos=True)

    def ask(name: str, peer: str) -> AttemptId:
        attempt_id = AttemptId(EPOCH, name, 1)
        prompt = tuple(2 + (len(asked) * 7 + i) % 90 for i in range(4 * BLOCK_SIZE))
        asked.append(attempt_id)
        target = DecodeTarget(f"{peer}:1", peer)
        message = Prefill(attempt_id, node.incarnation, prompt, (Sample(0),), sampling, 60.0, target)
        core.handle(message, 1.0)
        return attempt_id

    def turns() -> list[AttemptId]:
        """Until nothing moves; whose Reserves were sent."""
        one.said.clear()
        for _ in range(200):
            one.turn()
            if node.model.is_busy:
                one.compute(1)
        return [message.attempt_id for message in one.said if isinstance(message, Reserve)]

    asked: list[AttemptId] = []
    ask("first", one.peer)  # who else is there
    assert turns()
    for i in range(30):
        ask(f"full {i}", "full")
    assert turns() == asked[1:5], "half of 39 blocks, in prompts of four"
    for i in range(8):
        attempt_id = ask(f"free {i}", one.peer)
        assert turns() == [attempt_id]
        core.handle(FromPeer(one.peer, Refuse(attempt_id, RequestCancelled("done with it"))), 1.5)
    core.handle(FromPeer("full", Grant(asked[1], 1, 0, 3, 0)), 1.5)
    assert turns() == [asked[5]], "what it has granted counts no more, though none of its parts may leave yet"
    assert len(one.ends) == 8, "it has not failed"


def test_what_one_decode_node_says_or_suffers_concerns_its_own_requests_alone(prefilling: Prefilling) -> None:
    node, other = prefilling.node, AttemptId(EPOCH, "other", 1)
    node.core.handle(PeerOpened("other", PART_BLOCKS, node.model.layout), 1.0)
    target, sampling = DecodeTarget("other:1", "other"), SamplingParams(max_tokens=5, ignore_eos=True)
    node.core.handle(Prefill(other, node.incarnation, PREFIX, (Sample(0),), sampling, 60.0, target), 1.0)
    for _ in range(2):
        prefilling.compute(NUM_LAYERS)
    assert [message.attempt_id for message in prefilling.said if isinstance(message, Reserve)] == [WORK, other]
    node.core.handle(FromPeer("other", Refuse(WORK, RequestCancelled("not its own"))), 1.5)
    prefilling.turn()
    assert not prefilling.ends
    node.core.handle(PeerClosed("other", "died"), 1.5)
    prefilling.turn()
    assert [type(end.error) for end in prefilling.ends] == [PeerLost]
    prefilling.grant(num_parts=1 + NUM_LAYERS)
    assert [message.attempt_id for message in prefilling.said if isinstance(message, Commit)] == [WORK]


def test_a_part_of_an_earlier_stream_that_fails_ends_no_later_one(prefilling: Prefilling) -> None:
    core, later = prefilling.node.core, AttemptId(EPOCH, "later", 1)
    prefilling.compute(NUM_LAYERS)
    prefilling.grant(num_parts=1 + NUM_LAYERS)
    core.handle(PeerClosed(prefilling.peer, "died"), 1.5)
    core.handle(PeerOpened(prefilling.peer, PART_BLOCKS, prefilling.node.model.layout), 1.5)
    prefilling.ask(later, PREFIX, max_tokens=5)
    assert prefilling.num_sent, "parts of the earlier stream are under way"
    prefilling.node.movers.disconnect(prefilling.peer)
    prefilling.turn()
    assert not prefilling.num_sent
    assert not prefilling.closed
    assert len(prefilling.ends) == 1


def test_a_part_that_fails_ends_its_request_although_later_ones_have_leases(prefilling: Prefilling) -> None:
    later = AttemptId(EPOCH, "later", 1)
    prefilling.compute(NUM_LAYERS)
    prefilling.grant(num_parts=1 + NUM_LAYERS)
    prefilling.ask(later, PREFIX, max_tokens=5)
    prefilling.node.core.handle(FromPeer(prefilling.peer, Grant(later, 2, 0, 1 + NUM_LAYERS, 0)), 1.5)
    prefilling.turn()
    assert not prefilling.ends
    prefilling.node.movers.disconnect(prefilling.peer)
    prefilling.turn()
    assert [type(end.error) for end in prefilling.ends] == [PeerLost]


def test_errors_name_the_decode_nodes_address(prefilling: Prefilling) -> None:
    prefilling.node.core.handle(PeerClosed(prefilling.peer, "died"), 1.5)
    prefilling.turn()
    (end,) = prefilling.ends
    assert end.error
    assert end.error.message == "decode node address: died"


def test_a_decode_node_that_takes_no_part_is_lost_although_its_stream_is_up(prefilling: Prefilling) -> None:
    prefilling.compute(NUM_LAYERS)
    prefilling.grant(num_parts=1 + NUM_LAYERS)
    core = prefilling.node.core
    prefilling.world.now += STUCK_S - 1.0
    prefilling.receive(0)
    prefilling.turn()
    prefilling.world.now += STUCK_S - 1.0
    prefilling.turn()
    assert not prefilling.closed, "it has taken a part meanwhile"
    assert core.next_deadline() == prefilling.world.now + 1.0
    prefilling.world.now += 1.0
    prefilling.turn()
    text = f"it has taken no KV for {STUCK_S:g} s"
    assert prefilling.closed == [ClosePeer(prefilling.peer, text)]
    (end,) = prefilling.ends
    assert isinstance(end.error, PeerLost)
    assert end.error.message == f"decode node address: {text}"
    prefilling.node.transport.disconnect(prefilling.peer)
    core.handle(PeerClosed(prefilling.peer, text), prefilling.world.now)
    prefilling.turn()
    assert core.next_deadline() is None
    assert prefilling.node.pool_is_whole()


def test_parts_of_dead_leases_are_missed_as_others(prefilling: Prefilling) -> None:
    unknown = AttemptId(EPOCH, "unknown", 1)
    prefilling.node.core.handle(FromPeer(prefilling.peer, Grant(unknown, 1, 0, 2, 2)), 1.5)
    prefilling.turn()
    prefilling.world.now += STUCK_S
    prefilling.turn()
    assert [closed.peer for closed in prefilling.closed] == [prefilling.peer]


def test_a_prompt_whose_part_finds_no_slot_goes_on_when_one_is_free() -> None:
    one, other_lease = Prefilling(), 99
    core = one.node.core
    assert isinstance(core, PrefillCore)
    assert core._outgoing._parts.drain(one.peer, other_lease, Drain(WORK, 0, 8, 8), 1.0)
    one.ask(WORK, PROMPT, max_tokens=5)
    one.grant(num_parts=1 + NUM_LAYERS)
    for _ in range(2):  # chunks
        one.compute(NUM_LAYERS)
    assert all(slot.lease == other_lease for slot in core.sender.slots())
    for part in range(1 + NUM_LAYERS):
        one.receive(part, other_lease)
        one.turn()
        assert sorted(slot.lease for slot in core.sender.slots()) == [1] * (1 + part) + [other_lease] * (7 - part)
