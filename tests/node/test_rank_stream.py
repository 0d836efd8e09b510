"""Frames between rank 0 and a rank on another host: whole and in order however the bytes are cut, and nonsense ends the
connection."""

from __future__ import annotations

import os
import socket
import struct
import threading
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.ranks.stream import (
    FULL_TIMEOUT_S,
    MAX_BODY_BYTES,
    Content,
    FrameReader,
    RankStream,
    pack_message,
    pack_step,
)
from tests.node.scenes import PATIENCE_S

pytestmark = pytest.mark.timeout(20)

INT32 = st.integers(-(2**31), 2**31 - 1)
JSON = st.recursive(st.none() | st.booleans() | INT32 | st.text(max_size=9), lambda inner: st.lists(inner, max_size=3))
STEPS = st.tuples(INT32, st.lists(INT32, max_size=20))
SAID = st.dictionaries(st.text(max_size=9), JSON, max_size=3)


def packed(message: tuple[int, list[int]] | dict[str, Any]) -> bytes:
    return pack_message(message) if isinstance(message, dict) else pack_step(message[0], np.array(message[1], np.int32))


@given(messages=st.lists(STEPS | SAID, max_size=6), data=st.data())
def test_frames_are_whole_and_in_order_however_bytes_are_cut(
    messages: list[tuple[int, list[int]] | dict[str, Any]], data: st.DataObject
) -> None:
    sent = b"".join(map(packed, messages))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(sent)), max_size=8)))
    reader, frames = FrameReader(), []
    for start, end in pairwise([0, *cuts, len(sent)]):
        frames += reader.feed(sent[start:end])
    assert len(frames) == len(messages)
    for frame, message in zip(frames, messages, strict=True):
        if isinstance(message, dict):
            assert frame.message() == message
        else:
            kind, values = frame.step()
            assert (kind, values.tolist()) == message


def test_values_of_a_step_may_be_written_to() -> None:
    """They become a tensor, which must own its memory."""
    (frame,) = FrameReader().feed(pack_step(0, np.arange(3, dtype=np.int32)))
    frame.step()[1][0] = 7


@pytest.mark.parametrize(
    "data",
    [
        struct.pack("<IB", MAX_BODY_BYTES + 1, Content.MESSAGE),
        struct.pack("<IB", 4, 2),
        struct.pack("<IB", 0, Content.STEP),
        struct.pack("<IB", 7, Content.STEP),
    ],
)
def test_what_begins_no_frame_is_refused_at_once(data: bytes) -> None:
    with pytest.raises(OSError, match=r"no frame begins|no step has"):
        FrameReader().feed(data)


@pytest.mark.parametrize("body", [b"", b"{", b"\xff", b"[]", b"3", b"[" * 100_000])
def test_what_is_no_object_is_refused(body: bytes) -> None:
    (frame,) = FrameReader().feed(struct.pack("<IB", len(body), Content.MESSAGE) + body)
    with pytest.raises(OSError, match=r"not JSON|no object"):
        frame.message()


@given(data=st.binary(max_size=40))
def test_any_bytes_are_frames_or_refused(data: bytes) -> None:
    try:
        frames = FrameReader().feed(data)
        for frame in frames:
            frame.step() if frame.content == Content.STEP else frame.message()
    except OSError:
        pass


@pytest.fixture
def streams() -> Iterator[tuple[RankStream, RankStream]]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = RankStream(socket.create_connection(listener.getsockname()))
        theirs = RankStream(listener.accept()[0])
    yield ours, theirs
    ours.close()
    theirs.close()


def test_what_threads_send_is_not_mixed(streams: tuple[RankStream, RankStream]) -> None:
    ours, theirs = streams
    values = np.arange(2_000_000, dtype=np.int32)  # more than the connection's buffers hold, so all wait in the middle

    def send(number: int) -> None:
        ours.send_step(number, values + number)
        ours.send_message(number=number)

    threads = [threading.Thread(target=send, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    frames = []
    while len(frames) < 6:
        frames += theirs.receive()
    for thread in threads:
        thread.join()
    steps = [frame.step() for frame in frames if frame.content == Content.STEP]
    assert all(np.array_equal(array, values + kind) for kind, array in steps)
    assert sorted(kind for kind, _ in steps) == sorted(
        f.message()["number"] for f in frames if f.content == Content.MESSAGE
    )


def test_a_connection_that_had_a_deadline_waits_for_steps_without_one_and_holds_none_back() -> None:
    """As that by which it was made. A send has a deadline of its own."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        connection = socket.create_connection(listener.getsockname(), timeout=PATIENCE_S)
    stream = RankStream(connection)
    assert connection.gettimeout() is None
    assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    limit = connection.getsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, 16)
    assert struct.unpack("@ll", limit) == (FULL_TIMEOUT_S, 0)
    stream.close()


def test_an_end_that_takes_nothing_is_not_waited_for_long(streams: tuple[RankStream, RankStream]) -> None:
    ours, _ = streams
    ours.limit_sends(0.05)
    with pytest.raises(BlockingIOError):
        ours.send_step(0, np.zeros(16 * 1024 * 1024, np.int32))


def test_nothing_follows_a_frame_that_was_cut_off(streams: tuple[RankStream, RankStream]) -> None:
    """It would be taken for the rest of it. Both ends hear that the connection is broken."""
    ours, theirs = streams
    ours.limit_sends(0.05)
    step = np.zeros(16 * 1024 * 1024, np.int32)
    with pytest.raises(BlockingIOError):
        ours.send_step(0, step)
    with pytest.raises(BrokenPipeError):
        ours.send_message(number=1)
    with pytest.raises(ConnectionError):
        ours.receive()
    while True:
        try:
            assert theirs.receive() == []
        except ConnectionError:
            break


def test_the_end_of_the_other_is_told(streams: tuple[RankStream, RankStream]) -> None:
    ours, theirs = streams
    theirs.close()
    with pytest.raises(ConnectionError):
        ours.receive()


def test_the_other_learns_of_the_end_at_once(streams: tuple[RankStream, RankStream]) -> None:
    """Though a fork of this process has the connection, too."""
    ours, theirs = streams
    of_fork = os.dup(ours.fileno())
    ours.close()
    with pytest.raises(ConnectionResetError, match="has closed the connection"):
        theirs.receive()
    os.close(of_fork)
