"""What every transport owes the mover, asked of each of them."""

from __future__ import annotations

import random
import signal
from typing import Any

import pytest

from baton.errors import LayoutMismatch, TransferError
from kv_transfer.parts import PartHeader
from kv_transfer.receiver import PartFailed, PartLanded, PartRefused, PartUnused
from kv_transfer.sender import PartSent, PeerDisconnected
from kv_transfer.transport import MAX_HEADER_BYTES, Arrived, Failed, Sent
from tests.kv_transfer.rig import Rig
from tests.kv_transfer.rig_node import BLOCK_BYTES, LAYOUT, NUM_BLOCKS, OTHER_LAYOUT, header_of, pool_of

SLOTS = 4


def transfer(sender: Any, receiver: Any, lease: int, parts: dict[int, tuple[list[int], list[int]]]) -> None:
    """Move parts, {part: (sender's blocks, receiver's blocks)}, all at once, to their end."""
    assert all(receiver.call("expect", sender.name, lease, {part: target for part, (_, target) in parts.items()}))
    assert all(sender.call("send", receiver.name, lease, {part: source for part, (source, _) in parts.items()}))
    landed = [PartLanded(sender.name, lease, part, len(parts[part][1]) * BLOCK_BYTES) for part in sorted(parts)]
    assert sorted(receiver.call("wait", len(parts)), key=lambda e: e.part) == landed
    sent = sender.call("wait", len(parts))
    assert sorted(sent, key=lambda e: e.part) == [PartSent(receiver.name, lease, part) for part in sorted(parts)]
    receiver.call("free_slots")  # waits for the copies out of them


def random_parts(rng: random.Random, count: int) -> dict[int, tuple[list[int], list[int]]]:
    sizes = [rng.randint(1, 8) for _ in range(count)]
    sources, targets = rng.sample(range(NUM_BLOCKS), sum(sizes)), rng.sample(range(NUM_BLOCKS), sum(sizes))
    parts, start = {}, 0
    for part, size in enumerate(sizes):
        parts[part] = (sources[start : start + size], targets[start : start + size])
        start += size
    return parts


def is_whole(*nodes: Any) -> bool:
    return all(node.call("free_slots") == SLOTS for node in nodes)


def test_random_blocks_between_several_nodes_arrive_exactly(rig: Rig) -> None:
    rng = random.Random(1)
    senders = [rig.node("sender", seed=seed) for seed in (10, 11)]
    receivers = [rig.node("receiver", seed=seed) for seed in (20, 21)]
    rig.link(*senders, *receivers)
    wanted = [pool_of(20), pool_of(21)]
    for lease in range(1, 9):
        i, j = rng.randrange(2), rng.randrange(2)
        parts = random_parts(rng, rng.randint(1, SLOTS))
        transfer(senders[i], receivers[j], lease, parts)
        for source, target in parts.values():
            wanted[j][target] = pool_of(10 + i)[source]
    assert [receiver.call("pool_bytes") for receiver in receivers] == [pool.tobytes() for pool in wanted]
    assert is_whole(*senders, *receivers)


def test_many_at_once_in_both_directions(rig: Rig) -> None:
    one, other = rig.node("raw", num_slots=16), rig.node("raw", num_slots=16)
    rig.link(one, other)
    for me, peer in ((one, other), (other, one)):
        for tag in range(8):
            me.call("post", peer.name, tag, me.call("fill", 0))
    for me, peer in ((one, other), (other, one)):
        for tag in reversed(range(8)):
            me.call("push", peer.name, tag, me.call("fill", 100 + tag))
    for me in (one, other):
        events = me.call("wait", 16)
        arrived = {e.tag: e for e in events if isinstance(e, Arrived)}
        assert {tag: me.call("values", e.slot) for tag, e in arrived.items()} == {t: {100 + t} for t in range(8)}
        assert all(e.header == header_of(tag) for tag, e in arrived.items())
        assert sorted(e.tag for e in events if isinstance(e, Sent)) == list(range(8))


def test_a_node_may_join_while_others_transfer(rig: Rig) -> None:
    sender, receiver = rig.node("sender", seed=1), rig.node("receiver", seed=2)
    rig.link(sender, receiver)
    receiver.call("expect", sender.name, 1, {0: [9]})
    late = rig.node("receiver", seed=3)
    rig.link(sender, late)
    transfer(sender, late, 1, {0: ([5, 6], [1, 2])})
    sender.call("send", receiver.name, 1, {0: [7]})
    assert receiver.call("wait", 1) == [PartLanded(sender.name, 1, 0, BLOCK_BYTES)]
    assert late.call("blocks", [1, 2]) == pool_of(1)[[5, 6]].tobytes()
    assert receiver.call("blocks", [9]) == pool_of(1)[[7]].tobytes()
    assert sender.call("wait", 1) == [PartSent(receiver.name, 1, 0)]
    assert is_whole(sender, receiver, late)


def test_connecting_again_or_from_several_threads_is_harmless(rig: Rig) -> None:
    sender, receiver = rig.node("sender", seed=1), rig.node("receiver", seed=2)
    both = (sender.start("connect", receiver.name, receiver.call("info"), 3), receiver.call("info"))
    both[0]()
    receiver.call("connect", sender.name, sender.call("info"), 3)
    rig.link(sender, receiver)
    transfer(sender, receiver, 1, {0: ([0], [1])})
    with pytest.raises(TransferError, match="another address"):
        sender.call("connect", receiver.name, sender.call("info"))
    transfer(sender, receiver, 2, {0: ([2], [3])})


def test_a_damaged_address_is_refused(rig: Rig) -> None:
    sender, receiver = rig.node("sender"), rig.node("receiver")
    address = receiver.call("info")
    for position in range(0, len(address), max(1, len(address) // 20)):
        damaged = bytearray(address)
        damaged[position] ^= 0x41
        with pytest.raises(TransferError):
            sender.call("connect", receiver.name, bytes(damaged))
    for cut in (0, 1, 10, len(address) - 1):
        with pytest.raises(TransferError):
            sender.call("connect", receiver.name, address[:cut])
    rig.link(sender, receiver)
    transfer(sender, receiver, 1, {0: ([1], [1])})


def test_a_dead_address_is_refused(rig: Rig) -> None:
    sender, receiver = rig.node("sender"), rig.node("receiver")
    address = receiver.call("info")
    receiver.kill()
    with pytest.raises(TransferError):
        sender.call("connect", receiver.name, address)
    assert sender.call("send", receiver.name, 1, {0: [1]}) == [True]
    assert isinstance(sender.call("wait", 1)[0], PartFailed)
    assert is_whole(sender)


def test_blocks_of_another_layout_are_refused(rig: Rig) -> None:
    sender, receiver = rig.node("sender", layout=OTHER_LAYOUT), rig.node("receiver", seed=2)
    rig.link(sender, receiver)
    receiver.call("expect", sender.name, 1, {0: [1, 2]})
    sender.call("send", receiver.name, 1, {0: [1, 2]})
    (refused,) = receiver.call("wait", 1)
    assert isinstance(refused, PartRefused)
    assert isinstance(refused.error, LayoutMismatch)
    sender.call("wait", 1)
    assert receiver.call("pool_bytes") == pool_of(2).tobytes()
    assert is_whole(sender, receiver)


@pytest.mark.parametrize("num_blocks", [1, 3])
def test_a_part_of_another_length_is_refused(rig: Rig, num_blocks: int) -> None:
    sender, receiver = rig.node("sender"), rig.node("receiver", seed=2)
    rig.link(sender, receiver)
    receiver.call("expect", sender.name, 1, {0: list(range(num_blocks))})
    sender.call("send", receiver.name, 1, {0: [1, 2]})
    (refused,) = receiver.call("wait", 1)
    assert isinstance(refused, PartRefused)
    assert "expected" in refused.error.message
    sender.call("wait", 1)
    assert receiver.call("pool_bytes") == pool_of(2).tobytes()
    assert is_whole(sender, receiver)


def test_a_message_longer_than_its_receive_fails_there(rig: Rig) -> None:
    one, other = rig.node("raw"), rig.node("raw")
    rig.link(one, other)
    other.call("post", one.name, 1, other.call("fill", 0), 10_000)
    one.call("push", other.name, 1, one.call("fill", 7), 20_000)
    assert isinstance(other.call("wait", 1)[0], Failed)
    one.call("wait", 1)
    other.call("post", one.name, 2, other.call("fill", 0))
    one.call("push", other.name, 2, one.call("fill", 8))
    (arrived,) = other.call("wait", 1)
    assert other.call("values", arrived.slot) == {8}


def test_what_is_no_part_is_refused(rig: Rig) -> None:
    one, receiver = rig.node("raw"), rig.node("receiver", seed=2)
    rig.link(one, receiver)
    receiver.call("expect", one.name, 0, {5: [3]})
    one.call("push", receiver.name, 5, one.call("fill", 1))
    (refused,) = receiver.call("wait", 1)
    assert isinstance(refused, PartRefused)
    assert (refused.lease, refused.part, refused.error.message) == (0, 5, "not a KV part")
    assert is_whole(receiver)


@pytest.mark.parametrize("length", [0, 64, MAX_HEADER_BYTES])
def test_a_header_of_any_length_comes_as_it_was_sent_and_a_damaged_one_is_refused(rig: Rig, length: int) -> None:
    one, other, receiver = rig.node("raw"), rig.node("raw"), rig.node("receiver", seed=2)
    rig.link(one, other)
    rig.link(one, receiver)
    header = bytearray(PartHeader(0, 5, 1, LAYOUT.whole, 1, BLOCK_BYTES, LAYOUT.digest()).pack().ljust(length)[:length])
    target = other.call("fill", 0)
    other.call("post", one.name, 4, target)
    one.call("push", other.name, 4, one.call("fill", 1), 1, bytes(header))
    assert other.call("wait", 1) == [Arrived(one.name, 4, target, bytes(header))]
    assert other.call("values", target) == {0, 1}
    if length == 64:
        header[40] ^= 1
    receiver.call("expect", one.name, 0, {5: [3]})
    one.call("push", receiver.name, 5, one.call("fill", 1), None, bytes(header))
    (refused,) = receiver.call("wait", 1)
    assert isinstance(refused, PartRefused)
    assert refused.error.message == ("a KV part's header is damaged" if length == 64 else "not a KV part")
    assert receiver.call("pool_bytes") == pool_of(2).tobytes()
    assert is_whole(receiver)


def test_an_unneeded_part_is_drained_and_one_of_a_lease_that_ended_goes_nowhere(rig: Rig) -> None:
    sender, receiver = rig.node("sender"), rig.node("receiver", seed=2)
    rig.link(sender, receiver)
    receiver.call("expect", sender.name, 1, {0: [2], 1: [3]})
    assert sender.call("drain", receiver.name, 1, 0)
    assert receiver.call("wait", 1) == [PartUnused(sender.name, 1, 0)]
    receiver.call("withdraw", 1)
    sender.call("send", receiver.name, 1, {1: [3]})
    assert receiver.call("wait", 1) == [PartUnused(sender.name, 1, 1)]
    sender.call("wait", 2)
    assert receiver.call("pool_bytes") == pool_of(2).tobytes()
    assert is_whole(sender, receiver)


def test_disconnect_ends_what_was_never_answered(rig: Rig) -> None:
    rig.cuts = True
    sender, receiver = rig.node("sender"), rig.node("receiver")
    rig.link(sender, receiver)
    receiver.call("expect", sender.name, 1, {0: [1], 1: [2]})
    sender.call("send", receiver.name, 2, {0: [1, 2], 1: [3, 4]})  # nobody waits for these
    receiver.call("disconnect", sender.name)
    failed = receiver.call("wait", 2)
    assert {(type(e), e.lease, e.part) for e in failed} == {(PartFailed, 1, 0), (PartFailed, 1, 1)}
    sender.call("disconnect", receiver.name)
    failed = []
    while len(failed) < 2:  # that the receiver is gone may come between
        failed += [e for e in sender.call("wait", 1) if isinstance(e, PartFailed)]
    assert {(e.lease, e.part) for e in failed} == {(2, 0), (2, 1)}
    assert is_whole(sender, receiver)


def test_disconnect_after_the_end_loses_nothing(rig: Rig) -> None:
    sender, receiver = rig.node("sender", seed=1), rig.node("receiver")
    rig.link(sender, receiver)
    receiver.call("expect", sender.name, 1, {0: [3, 4]})
    sender.call("send", receiver.name, 1, {0: [1, 2]})
    landed = receiver.call("wait", 1)
    sender.call("wait", 1)
    for one, other in ((sender, receiver), (receiver, sender)):
        one.call("disconnect", other.name)
        one.call("disconnect", other.name)
    assert landed == [PartLanded(sender.name, 1, 0, 2 * BLOCK_BYTES)]
    assert receiver.call("blocks", [3, 4]) == pool_of(1)[[1, 2]].tobytes()
    assert is_whole(sender, receiver)


def test_peers_may_connect_again_after_a_disconnect(rig: Rig) -> None:
    sender, receiver = rig.node("sender", seed=1), rig.node("receiver")
    for lease in range(1, 4):
        rig.link(sender, receiver)
        transfer(sender, receiver, lease, {0: ([1, lease], [2, 3])})
        sender.call("disconnect", receiver.name)
        receiver.call("disconnect", sender.name)
        receiver.call("pending_events")
        sender.call("pending_events")
    assert receiver.call("blocks", [2, 3]) == pool_of(1)[[1, 3]].tobytes()
    assert is_whole(sender, receiver)


def test_a_connection_that_one_side_had_given_up_does_not_spoil_the_next(rig: Rig) -> None:
    sender, receiver = rig.node("sender", seed=1), rig.node("receiver", seed=2)
    for lease in range(1, 3):
        for _ in range(lease):  # as after a hang: the sender had gone when the receiver connected
            receiver.call("connect", sender.name, sender.call("info"))
            receiver.call("disconnect", sender.name)
        rig.link(sender, receiver)
        transfer(sender, receiver, lease, {0: ([3], [4])})
        sender.call("disconnect", receiver.name)
        receiver.call("disconnect", sender.name)
    assert is_whole(sender, receiver)


def test_a_receiver_killed_with_parts_under_way(rig: Rig) -> None:
    sender, receiver, other = rig.node("sender"), rig.node("receiver"), rig.node("receiver")
    rig.link(sender, receiver)
    rig.link(sender, other)
    sender.call("send", receiver.name, 1, {0: [1, 2], 1: [3, 4]})
    receiver.kill()
    events = sender.call("wait", 3)
    assert [type(e) for e in events] == [PartFailed, PartFailed, PeerDisconnected]
    assert events[-1].peer == receiver.name
    again = rig.node("receiver")
    rig.link(sender, again)
    for lives in (other, again):
        transfer(sender, lives, 1, {0: ([1], [1])})
    assert is_whole(sender, other, again)


def test_a_sender_killed_with_parts_under_way_and_its_next_incarnation(rig: Rig) -> None:
    sender, receiver = rig.node("sender"), rig.node("receiver")
    rig.link(sender, receiver)
    receiver.call("expect", sender.name, 1, {part: [part] for part in range(3)})
    sender.kill()
    events = receiver.call("wait", 4)
    assert [type(e) for e in events] == [PartFailed] * 3 + [PeerDisconnected]
    assert is_whole(receiver)
    again = rig.node("sender", seed=5)
    rig.link(again, receiver)
    transfer(again, receiver, 2, {part: ([part], [part]) for part in range(SLOTS)})
    assert receiver.call("blocks", list(range(SLOTS))) == pool_of(5)[:SLOTS].tobytes()
    assert is_whole(again, receiver)


def test_a_stopped_receiver_holds_up_nobody_else(process_rig: Rig) -> None:
    """No transport notices it: the part ends when heartbeats have decided."""
    process_rig.cuts = True
    sender, stopped, other = (process_rig.node(role) for role in ("sender", "receiver", "receiver"))
    process_rig.link(sender, stopped)
    process_rig.link(sender, other)
    stopped.call("expect", sender.name, 1, {0: list(range(8))})
    stopped.signal(signal.SIGSTOP)
    sender.call("send", stopped.name, 1, {0: list(range(8))})
    transfer_beside(sender, other, 2)
    sender.call("disconnect", stopped.name)
    assert sender.call("free_slots_after_end") == SLOTS
    transfer_beside(sender, other, 3)
    stopped.signal(signal.SIGCONT)
    stopped.call("disconnect", sender.name)
    (end,) = [e for e in stopped.call("wait", 1) if not isinstance(e, PeerDisconnected)]
    assert isinstance(end, PartLanded | PartFailed)
    assert is_whole(stopped, other)


def transfer_beside(sender: Any, receiver: Any, lease: int) -> None:
    """Move a part while others hang, whose events may come between."""
    receiver.call("expect", sender.name, lease, {0: [lease]})
    sender.call("send", receiver.name, lease, {0: [lease]})
    assert receiver.call("wait", 1) == [PartLanded(sender.name, lease, 0, BLOCK_BYTES)]
    sender.call("wait_for", PartSent(receiver.name, lease, 0))


def test_a_stopped_peer_is_not_waited_for_longer_than_asked(process_rig: Rig) -> None:
    process_rig.cuts = True
    sender, receiver = process_rig.node("sender"), process_rig.node("receiver")
    address = receiver.call("info")
    receiver.signal(signal.SIGSTOP)
    with pytest.raises(TransferError, match=r"within 0\.3 s"):
        sender.call("connect", receiver.name, address, 1, 0.3)
    receiver.signal(signal.SIGCONT)
    process_rig.link(sender, receiver)
    transfer(sender, receiver, 1, {0: ([0], [1])})


def test_close_with_parts_under_way(rig: Rig) -> None:
    rig.cuts = True
    sender, receiver = rig.node("sender"), rig.node("receiver")
    rig.link(sender, receiver)
    receiver.call("expect", sender.name, 1, {0: [1], 1: [2]})
    sender.call("send", receiver.name, 2, {0: [1, 2], 1: [2, 3]})
    sender.call("close")
    assert [type(e) for e in sender.call("wait", 2)] == [PartFailed, PartFailed]
    receiver.call("disconnect", sender.name)
    assert [type(e) for e in receiver.call("wait", 2)] == [PartFailed, PartFailed]
    assert sender.call("send", receiver.name, 3, {0: [1]}) == [True]
    assert isinstance(sender.call("wait", 1)[0], PartFailed)
    with pytest.raises(TransferError, match="closed"):
        sender.call("connect", receiver.name, receiver.call("info"))
    assert is_whole(sender, receiver)


def test_what_goes_to_strangers_fails(rig: Rig) -> None:
    sender, receiver = rig.node("sender"), rig.node("receiver")
    sender.call("send", "nobody", 1, {0: [1]})
    receiver.call("expect", "nobody", 1, {0: [1]})
    assert sender.call("wait", 1) == [PartFailed("nobody", 1, 0, "not connected")]
    assert receiver.call("wait", 1) == [PartFailed("nobody", 1, 0, "not connected")]
    assert is_whole(sender, receiver)
