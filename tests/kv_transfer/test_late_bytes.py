"""Transfers that are torn down half-way while the other side goes on: late bytes must hit nothing.

Half-way is made certain by stopping one process in mid-transfer (SIGSTOP); it is continued after the teardown.
"""

from __future__ import annotations

import signal
from typing import Any

import pytest

from kv_transfer.receiver import PartFailed, PartLanded, PartUnused
from kv_transfer.transport import Arrived, Failed, PeerDisconnected, Sent
from tests.kv_transfer.rig import Rig, rig_of
from tests.kv_transfer.rig_node import arrived, digest_of, pool_of

BLOCKS = 16_384  # 64 MiB: what is missing when the middle is, no socket's buffers hold
OLD, REWRITTEN, NEXT, UNTOUCHED = 0x11, 0x22, 0x33, 0x44
SETTLING_CALLS = 100
ATTEMPTS = 20


def slow_pair(rig: Rig, num_slots: int) -> tuple[Any, Any, Any]:
    """Three connected nodes of the bare transport, with huge slots."""
    rig.cuts = True
    nodes = tuple(rig.node("raw", num_slots=num_slots, part_blocks=BLOCKS) for _ in range(3))
    rig.link(*nodes)
    return nodes


def stop_half_way(sender: Any, receiver: Any, stopped: Any) -> tuple[int, int, int]:
    """Stop a process while a message full of OLD is under way; returns the tag and both slots."""
    source, target = sender.call("fill", OLD), receiver.call("fill", UNTOUCHED)
    middle = receiver.call("middle", target)
    for tag in range(ATTEMPTS):
        receiver.call("post", sender.name, tag, target)
        sender.call("push", receiver.name, tag, source)
        receiver.call("see_first_byte", target, UNTOUCHED)
        stopped.signal(signal.SIGSTOP)
        if stopped is sender:
            is_half_way = receiver.call("middle_byte", target) == UNTOUCHED
        else:
            is_half_way = not middle or receiver.peek(middle) == UNTOUCHED
        # What fits into shared memory still leaves: that message was nearly over, and its end is heard of soon.
        sent = [] if stopped is sender else [e for _ in range(SETTLING_CALLS) for e in sender.call("pending_events")]
        if is_half_way and not sent:
            return tag, source, target
        stopped.signal(signal.SIGCONT)  # the message was faster than the signal
        receiver.call("wait", 1)
        if not sent:
            sender.call("wait", 1)
        receiver.call("refill", target, UNTOUCHED)
    raise AssertionError(f"no message was caught under way in {ATTEMPTS} attempts")


def test_a_slot_of_a_cut_receive_serves_the_next_while_the_old_sender_goes_on(wire_rig: Rig) -> None:
    sender, receiver, other = slow_pair(wire_rig, num_slots=2)
    tag, source, slot = stop_half_way(sender, receiver, stopped=sender)
    receiver.call("disconnect", sender.name)
    (failed,) = receiver.call("wait", 1)
    assert isinstance(failed, Failed)
    assert (failed.tag, failed.slot) == (tag, slot)

    receiver.call("post", other.name, 100, slot)  # reused at once, by another peer's message
    other.call("push", receiver.name, 100, other.call("fill", NEXT))
    if wire_rig.kind == "ucx-shm":
        sender.signal(signal.SIGCONT)  # others could not send while it was stopped
    assert receiver.call("wait", 1) == [arrived(other.name, 100, slot)]
    sender.signal(signal.SIGCONT)  # goes on to send
    assert receiver.call("values", slot) == {NEXT}
    (end,) = [e for e in sender.call("wait", 1) if not isinstance(e, PeerDisconnected)]
    assert isinstance(end, Sent | Failed)
    sender.call("refill", source, REWRITTEN)  # and now something new from the same place
    sender.call("disconnect", receiver.name)
    wire_rig.link(sender, receiver)
    again = receiver.call("fill", UNTOUCHED)
    receiver.call("post", sender.name, 101, again)
    sender.call("push", receiver.name, 101, source)
    ended = [e for e in receiver.call("wait", 1) if not isinstance(e, PeerDisconnected)]
    assert ended == [arrived(sender.name, 101, again)]
    assert receiver.call("values", again) == {REWRITTEN}
    assert receiver.call("values", slot) == {NEXT}


def test_a_slot_of_a_cut_send_serves_the_next_while_the_old_receiver_goes_on(wire_rig: Rig) -> None:
    sender, receiver, other = slow_pair(wire_rig, num_slots=2)
    tag, source, target = stop_half_way(sender, receiver, stopped=receiver)
    sender.call("disconnect", receiver.name)
    (end,) = sender.call("wait", 1)
    one_sided = wire_rig.kind == "nixl"  # which may have written all of it meanwhile
    assert isinstance(end, Sent | Failed if one_sided else Failed)
    assert (end.tag, end.slot) == (tag, source)
    is_sent = isinstance(end, Sent)

    sender.call("refill", source, REWRITTEN)  # reused at once, for another peer
    slot = other.call("fill", UNTOUCHED)
    other.call("post", sender.name, 100, slot)
    sender.call("push", other.name, 100, source)
    assert other.call("wait", 1) == [arrived(sender.name, 100, slot)]
    assert other.call("values", slot) == {REWRITTEN}

    assert sender.call("wait", 1) == [Sent(other.name, 100, source)]

    receiver.signal(
        signal.SIGCONT
    )  # takes in the rest: what was in the slot when it was pushed; or it hears of the cut
    (end,) = receiver.call("wait", 1)
    if is_sent or wire_rig.kind.startswith("ucx"):
        assert end == arrived(sender.name, tag, target)
        assert receiver.call("values", target) == {OLD}
    else:
        assert isinstance(end, Failed)
    receiver.call("disconnect", sender.name)
    receiver.call("pending_events")
    wire_rig.link(sender, receiver)
    receiver.call("refill", target, UNTOUCHED)
    receiver.call("post", sender.name, 101, target)
    sender.call("push", receiver.name, 101, source)
    assert receiver.call("wait", 1) == [arrived(sender.name, 101, target)]
    assert receiver.call("values", target) == {REWRITTEN}


def test_no_block_of_the_pool_changes_but_by_landing(wire_rig: Rig) -> None:
    wire_rig.cuts = True
    sizes = {"part_blocks": BLOCKS, "num_blocks": BLOCKS, "num_slots": 1}
    sender, other = wire_rig.node("sender", seed=1, **sizes), wire_rig.node("sender", seed=3, **sizes)
    receiver = wire_rig.node("receiver", seed=2, **sizes)
    wire_rig.link(sender, receiver)
    wire_rig.link(other, receiver)
    blocks = list(range(BLOCKS))
    for lease in range(1, ATTEMPTS):
        receiver.call("poison", UNTOUCHED)
        assert receiver.call("expect", sender.name, lease, {0: blocks}) == [True]
        receiver.call("withdraw", lease)
        sending = sender.start("send", receiver.name, lease, {0: blocks})
        receiver.call("see_first_byte", 0, UNTOUCHED)
        sender.signal(signal.SIGSTOP)
        if receiver.call("middle_byte", 0) == UNTOUCHED:
            break
        sender.signal(signal.SIGCONT)
        sending()
        assert receiver.call("wait", 1) == [PartUnused(sender.name, lease, 0)]
        sender.call("wait", 1)
    receiver.call("disconnect", sender.name)
    (failed,) = receiver.call("wait", 1)
    assert isinstance(failed, PartFailed)
    assert (failed.lease, failed.part) == (lease, 0)
    assert receiver.call("pool_digest") == digest_of(pool_of(2, BLOCKS))
    assert receiver.call("expect", other.name, 100, {0: blocks}) == [True]  # the only slot there is
    other.call("send", receiver.name, 100, {0: blocks[::-1]})
    sender.signal(signal.SIGCONT)
    assert sending() == [True]
    assert [type(event) for event in receiver.call("wait", 1)] == [PartLanded]
    sender.call("wait", 1)
    wanted = digest_of(pool_of(3, BLOCKS)[::-1].copy())
    assert receiver.call("pool_digest") == wanted
    sender.call("disconnect", receiver.name)
    sender.call("pending_events")
    wire_rig.link(sender, receiver)
    assert receiver.call("expect", sender.name, 101, {0: blocks}) == [True]
    receiver.call("withdraw", 101)  # the lease died: the whole part comes to nothing
    sender.call("send", receiver.name, 101, {0: blocks})
    receiver.call("wait_for", PartUnused(sender.name, 101, 0))
    assert receiver.call("pool_digest") == wanted
    assert receiver.call("free_slots") == 1


def test_close_in_mid_message(wire_rig: Rig) -> None:
    sender, receiver, other = slow_pair(wire_rig, num_slots=2)
    _, source, target = stop_half_way(sender, receiver, stopped=receiver)
    sender.call("close")
    (ended,) = sender.call("wait", 1)
    one_sided = wire_rig.kind == "nixl"  # which may have written all of it: the other side's process has no part in it
    assert isinstance(ended, Failed) or (one_sided and isinstance(ended, Sent))
    sender.call("refill", source, REWRITTEN)
    receiver.signal(signal.SIGCONT)
    receiver.call("disconnect", sender.name)
    (end,) = [e for e in receiver.call("wait", 1) if not isinstance(e, PeerDisconnected)]
    assert isinstance(end, Arrived | Failed)
    receiver.call("refill", target, UNTOUCHED)
    receiver.call("post", other.name, 100, target)
    other.call("push", receiver.name, 100, other.call("fill", NEXT))
    receiver.call("wait_for", arrived(other.name, 100, target))
    assert receiver.call("values", target) == {NEXT}


@pytest.mark.parametrize("kind", ["ucx", pytest.param("ucx-tcp", marks=pytest.mark.full), "nixl", "ordered"])
def test_a_sender_killed_in_mid_message_blocks_nobody_else(kind: str) -> None:
    """Which is why shared memory is not used unasked: there it may block all others."""
    with rig_of(kind) as rig:
        rig.cuts = True
        receiver, other = rig.node("raw", part_blocks=BLOCKS), rig.node("raw", part_blocks=BLOCKS)
        rig.link(receiver, other)
        source, target = other.call("fill", NEXT), receiver.call("fill", UNTOUCHED)
        for tag in range(3):
            victim = rig.node("raw", num_slots=1, part_blocks=BLOCKS)
            rig.link(victim, receiver)
            receiver.call("refill", target, UNTOUCHED)
            receiver.call("post", victim.name, tag, target)
            victim.call("push", receiver.name, tag, victim.call("fill", OLD))
            receiver.call("see_first_byte", target, UNTOUCHED)
            victim.kill()
            ended = receiver.call("wait", 2)
            assert {type(e) for e in ended} <= {Arrived, Failed, PeerDisconnected}
            receiver.call("post", other.name, 100 + tag, target)
            other.call("push", receiver.name, 100 + tag, source)
            assert receiver.call("wait", 1) == [arrived(other.name, 100 + tag, target)]
            assert receiver.call("values", target) == {NEXT}
            assert other.call("wait", 1) == [Sent(receiver.name, 100 + tag, source)]
