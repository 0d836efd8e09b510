"""Who hears of what becomes of a transport's operations and peers, and in which order."""

from __future__ import annotations

import threading

import pytest

from kv_transfer.events import EventQueue
from kv_transfer.transport import Arrived, Failed, OperationEvent, PeerDisconnected, Sent

SENT, FAILED = Sent("p", 1, 0), Failed("p", 2, 1, "gone")
ARRIVED, LOST = Arrived("p", 3, 2, b"header"), PeerDisconnected("p", "gone")
WAIT_S = 20.0


class Ears:
    """`wakes`: how often the queue's owner was woken; `told`: what a subscriber was told, by call."""

    def __init__(self) -> None:
        self.wakes = 0
        self.told: list[list[OperationEvent]] = []
        self.queue = EventQueue(self._wake)

    def _wake(self) -> None:
        self.wakes += 1


def test_without_a_subscriber_all_is_polled_in_its_order() -> None:
    ears = Ears()
    for event in (SENT, FAILED, LOST, ARRIVED):
        ears.queue.put(event)
    assert ears.wakes == 0
    ears.queue.deliver()
    ears.queue.deliver()
    assert ears.wakes == 1
    assert ears.queue.poll() == [SENT, FAILED, LOST, ARRIVED]
    assert ears.queue.poll() == []


def test_a_subscriber_is_told_of_operations_and_who_polls_of_peers() -> None:
    ears = Ears()
    ears.queue.subscribe(ears.told.append)
    ears.queue.put(ARRIVED)
    ears.queue.put(FAILED)
    ears.queue.deliver()
    assert (ears.told, ears.wakes) == ([[ARRIVED, FAILED]], 0)
    ears.queue.put(LOST)
    ears.queue.deliver()
    assert (len(ears.told), ears.wakes) == (1, 1)
    assert ears.queue.poll() == [LOST]


def test_who_polls_comes_after_the_subscriber() -> None:
    ears = Ears()
    ears.queue.subscribe(ears.told.append)
    ears.queue.put(FAILED)
    ears.queue.put(LOST)
    assert ears.queue.poll() == [LOST]
    assert ears.told == [[FAILED]]


def test_who_polls_waits_for_the_subscriber() -> None:
    queue, is_told, go_on = EventQueue(lambda: None), threading.Event(), threading.Event()
    polled: list[object] = []

    def listen(events: list[OperationEvent]) -> None:
        is_told.set()
        assert go_on.wait(WAIT_S)

    queue.subscribe(listen)
    queue.put(FAILED)
    queue.put(LOST)
    telling = threading.Thread(target=queue.deliver)
    polling = threading.Thread(target=lambda: polled.extend(queue.poll()))
    telling.start()
    assert is_told.wait(WAIT_S)
    polling.start()
    polling.join(0.2)
    assert polling.is_alive()
    go_on.set()
    for thread in (telling, polling):
        thread.join(WAIT_S)
    assert polled == [LOST]


def test_a_peer_that_is_connected_anew_was_not_lost() -> None:
    ears = Ears()
    other = PeerDisconnected("other", "gone")
    for event in (LOST, SENT, other):
        ears.queue.put(event)
    ears.queue.forget("p")
    assert ears.queue.poll() == [SENT, other]


def test_a_failure_is_told_to_who_polls_again_and_again() -> None:
    ears = Ears()
    ears.queue.fail(ValueError("broken"))
    ears.queue.deliver()
    assert ears.wakes == 1
    for _ in range(2):
        with pytest.raises(RuntimeError, match="broken"):
            ears.queue.poll()
