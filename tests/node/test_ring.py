"""Messages over shared memory: each reader gets each of them once, whole and in order, and nothing is written over."""

from __future__ import annotations

import os
import select
import threading
import time
from collections import deque

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.ranks.ring import _LINE, NUM_SLOTS, SLOT_VALUES, RingReader, RingWriter, SharedRing

pytestmark = pytest.mark.timeout(20)  # a reader waits without an end

FITTING = SLOT_VALUES - 3
"""Values of a message in one slot."""
LARGEST = 2**31 - 1
SOON_S = 30.0


class Scene:
    """A writer and its readers, after so many parts."""

    def __init__(self, num_readers: int, written: int = 0, timeout_s: float = 0.0) -> None:
        self.ring = SharedRing(num_readers)
        self.writer = RingWriter(self.ring, timeout_s)
        self.writer._written = written
        for reader in range(num_readers):
            self.ring.values[reader * _LINE] = written
        self.readers = [RingReader(self.ring, number) for number in range(num_readers)]

    def has_message(self, reader: int) -> bool:
        return bool(select.select([self.ring.eventfds[reader]], [], [], 0)[0])

    def close(self) -> None:
        for eventfd in self.ring.eventfds:
            os.close(eventfd)


def message(number: int, length: int) -> np.ndarray:
    """Values that tell messages and places apart."""
    return np.arange(length, dtype=np.int32) * 31 - number


@pytest.mark.parametrize("length", [0, 1, FITTING, FITTING + 1])
def test_a_message_is_whole_when_its_last_part_is_there(length: int) -> None:
    scene = Scene(1)
    scene.writer.send(3, message(1, length))
    assert scene.has_message(0)
    kind, array = scene.readers[0].receive()
    assert kind == 3
    assert np.array_equal(array, message(1, length))
    assert not scene.has_message(0)
    scene.close()


@given(
    st.sampled_from([0, 5, 2**31 - NUM_SLOTS - 1, LARGEST - 1, LARGEST]),
    st.integers(1, 3),
    st.lists(
        st.one_of(st.sampled_from([0, 1, 7, FITTING - 1, FITTING, FITTING + 1, 3 * FITTING]), st.none()), max_size=40
    ),
    st.randoms(use_true_random=False),
)
def test_each_reader_gets_each_message_once_and_whole(written, num_readers, acts, rng) -> None:
    """Whatever the lengths, whoever is behind, also where the counts wrap around. An act: a message of so many values,
    or None, one that somebody takes. What does not fit is refused when the time is up, and tried again later."""
    scene = Scene(num_readers, written)
    waiting: list[deque[tuple[int, np.ndarray, int]]] = [deque() for _ in scene.readers]

    def take(reader: int) -> None:
        kind, array = scene.readers[reader].receive()
        wanted_kind, wanted, _ = waiting[reader].popleft()
        assert kind == wanted_kind
        assert np.array_equal(array, wanted)

    for number, length in enumerate(acts):
        if length is None:
            if behind := [reader for reader in range(num_readers) if waiting[reader]]:
                take(rng.choice(behind))
            continue
        num_parts, array = max(1, -(-length // FITTING)), message(number, length)
        while any(sum(parts for *_, parts in queue) + num_parts > NUM_SLOTS for queue in waiting):
            take(max(range(num_readers), key=lambda reader: len(waiting[reader])))
        scene.writer.send(number % 5, array)
        for queue in waiting:
            queue.append((number % 5, array, num_parts))
    for reader, queue in enumerate(waiting):
        while queue:
            take(reader)
        assert not scene.has_message(reader)
    scene.close()


@pytest.mark.parametrize("written", [0, LARGEST - 3])
def test_nothing_is_written_over_that_a_reader_has_not_taken(written: int) -> None:
    scene = Scene(2, written)
    for number in range(NUM_SLOTS):
        scene.writer.send(0, message(number, 3))
        scene.readers[0].receive()
    with pytest.raises(TimeoutError, match="a rank has taken no step for 0 s"):
        scene.writer.send(0, message(99, 3))
    for number in range(NUM_SLOTS):
        assert scene.readers[1].receive()[1].tolist() == message(number, 3).tolist()
    assert not scene.has_message(0)
    scene.writer.send(4, message(NUM_SLOTS, 3))
    for reader in scene.readers:
        assert reader.receive()[1].tolist() == message(NUM_SLOTS, 3).tolist()
    scene.close()


def test_a_message_longer_than_the_ring_goes_as_it_is_taken() -> None:
    scene = Scene(1, LARGEST - 5, timeout_s=SOON_S)
    array = message(1, (2 * NUM_SLOTS + 1) * FITTING + 1)
    got: list[tuple[int, np.ndarray]] = []
    reader = threading.Thread(target=lambda: got.append(scene.readers[0].receive()))
    reader.start()
    scene.writer.send(3, array)
    reader.join(SOON_S)
    ((kind, taken),) = got
    assert kind == 3
    assert np.array_equal(taken, array)
    scene.close()


def test_a_reader_waits_for_the_rest_of_a_message() -> None:
    """One that has taken part of it is told no half."""
    scene = Scene(1)
    got: list[tuple[int, np.ndarray]] = []
    reader = threading.Thread(target=lambda: got.append(scene.readers[0].receive()))
    with pytest.raises(TimeoutError):  # the ring is full before it is all there
        scene.writer.send(3, message(1, NUM_SLOTS * FITTING + 1))
    reader.start()
    deadline = time.monotonic() + SOON_S
    while scene.ring.taken(0) < NUM_SLOTS:
        assert time.monotonic() < deadline
    assert not got
    slot = scene.ring.slot(NUM_SLOTS)  # what was missing
    slot[0], slot[1], slot[2], slot[3] = 3, 1, 0, message(1, NUM_SLOTS * FITTING + 1)[-1]
    os.eventfd_write(scene.ring.eventfds[0], 1)
    reader.join(SOON_S)
    assert np.array_equal(got[0][1], message(1, NUM_SLOTS * FITTING + 1))
    scene.close()


def test_the_writer_waits_as_long_as_it_was_told() -> None:
    scene = Scene(1, timeout_s=0.05)
    for _ in range(NUM_SLOTS):
        scene.writer.send(0, message(0, 1))
    began = time.monotonic()
    with pytest.raises(TimeoutError, match=r"for 0\.05 s"):
        scene.writer.send(0, message(0, 1))
    assert 0.05 <= time.monotonic() - began < SOON_S
    scene.close()
