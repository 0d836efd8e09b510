"""KV events: what a subscriber reads, with a decoder of its own, is what the prefix cache holds."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import zmq

from baton.block_hash import chain
from baton.settings import parse
from decode_node.node import make_role
from decode_node.settings import DecodeSettings
from node.events import SessionLost, SessionOpened
from node.kv_events.publisher import END_OF_REPLAY, KvEventPublisher, KvEvents, as_int
from node.kv_events_config import KvEventsConfig
from node.parts import assemble

SIZE = 4
WAIT_MS = 10_000
BEFORE, AFTER = b"\0" * 32, b"\1" * 32


@pytest.fixture
def context() -> Iterator[zmq.Context]:
    with zmq.Context() as context:
        yield context


def publisher(**config: Any) -> KvEventPublisher:
    stated = {"enable_kv_cache_events": True, "endpoint": "tcp://127.0.0.1:*", **config}
    return KvEventPublisher(KvEventsConfig.parse(json.dumps(stated)), "kv@node-0@tiny")


def read(socket: zmq.Socket) -> tuple[bytes, int, list[Any]]:
    topic, sequence, payload = socket.recv_multipart()
    return topic, int.from_bytes(sequence, "big"), msgspec.msgpack.decode(payload)


def fill(events: KvEvents, tokens: list[int], salt: str = "", first: int = 0) -> list[bytes]:
    hashes = chain(tokens, SIZE, salt)
    events.sealed(tokens, salt, hashes, first)
    events.turned(dict.fromkeys(hashes[first:], True))
    return hashes


def received(context: zmq.Context, published: KvEventPublisher, steps: Any) -> list[tuple[bytes, int, list[Any]]]:
    """The batches that `steps` publishes. What comes before a subscription is not sent, so something is published until
    it is read."""
    events = KvEvents(published, SIZE)
    with context.socket(zmq.SUB) as socket:
        socket.subscribe(b"kv@")
        socket.connect(published.endpoint)
        while not socket.poll(50):
            events.turned({BEFORE: False})
        steps(events)
        events.turned({AFTER: False})
        socket.setsockopt(zmq.RCVTIMEO, WAIT_MS)
        batches = []
        while (batch := read(socket))[2][1] != removed(AFTER):
            if batch[2][1] != removed(BEFORE):
                batches.append(batch)
    return batches


def removed(block_hash: bytes) -> list[Any]:
    return [["BlockRemoved", [as_int(block_hash)], "GPU"]]


def test_a_subscriber_reads_what_is_stored_and_removed(context: zmq.Context) -> None:
    tokens = list(range(100, 113))  # three full blocks and a token
    hashes = chain(tokens, SIZE)
    ints = [as_int(block_hash) for block_hash in hashes]

    def steps(events: KvEvents) -> None:
        fill(events, tokens[:8])
        fill(events, tokens, first=2)
        fill(events, tokens[:4], salt="s")
        events.turned({hashes[1]: False, hashes[2]: False})

    published = publisher()
    batches = received(context, published, steps)
    published.close()
    assert {topic for topic, _, _ in batches} == {b"kv@node-0@tiny"}
    numbers = [number for _, number, _ in batches]
    assert numbers == list(range(numbers[0], numbers[0] + 4))
    events = [batch[1] for _, _, batch in batches]
    assert events[0] == [["BlockStored", ints[:2], None, tokens[:8], SIZE, None, "GPU", None, None]]
    assert events[1] == [["BlockStored", [ints[2]], ints[1], tokens[8:12], SIZE, None, "GPU", None, None]]
    salted = as_int(chain(tokens[:4], SIZE, "s")[0])
    assert events[2] == [["BlockStored", [salted], None, tokens[:4], SIZE, None, "GPU", None, [["s"]]]]
    assert events[3] == [["BlockRemoved", ints[1:], "GPU"]]
    assert all(isinstance(batch[0], float) and batch[2] == 0 for _, _, batch in batches)


def test_blocks_that_another_sequence_had_stored_are_no_event(context: zmq.Context) -> None:
    tokens = list(range(12))

    def steps(events: KvEvents) -> None:
        hashes = chain(tokens, SIZE)
        events.sealed(tokens, "", hashes, 0)
        events.turned({hashes[1]: True})  # the first one was there already, the last one is another block's

    published = publisher()
    ((_, _, (_, events, _)),) = received(context, published, steps)
    published.close()
    first, second, _ = map(as_int, chain(tokens, SIZE))
    assert events == [["BlockStored", [second], first, tokens[4:8], SIZE, None, "GPU", None, None]]


def test_missed_batches_are_sent_again(context: zmq.Context) -> None:
    published = publisher(replay_endpoint="tcp://127.0.0.1:*", buffer_steps=3)
    events = KvEvents(published, SIZE)
    for number in range(5):
        fill(events, [number] * SIZE)
    assert published._replay is not None
    with context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.RCVTIMEO, WAIT_MS)
        socket.connect(published._replay.getsockopt_string(zmq.LAST_ENDPOINT))
        replayed: list[int] = []
        while replayed != [3, 4]:  # the publisher's thread may not have sent all of them yet
            replayed = []
            socket.send_multipart((b"", (3).to_bytes(8, "big")))
            while (frames := socket.recv_multipart())[1] != END_OF_REPLAY:
                replayed.append(int.from_bytes(frames[1], "big"))
                assert msgspec.msgpack.decode(frames[2])[1][0][0] == "BlockStored"
        socket.send_multipart((b"", b"hello"))  # left out
        socket.send_multipart((b"", (0).to_bytes(8, "big")))
        assert int.from_bytes(socket.recv_multipart()[1], "big") == 2, "only the last three are kept"
    published.close()


def test_a_long_replay_comes_whole_to_a_subscriber_that_reads_slowly(context: zmq.Context) -> None:
    num, batch = 2000, b"x" * 4096  # more than the buffers between the processes hold
    published = publisher(replay_endpoint="tcp://127.0.0.1:*", buffer_steps=num)
    published._sent.extend((number, batch) for number in range(num))
    assert published._replay is not None
    with context.socket(zmq.DEALER) as socket, context.socket(zmq.SUB) as follower:
        socket.setsockopt(zmq.RCVTIMEO, WAIT_MS)
        socket.setsockopt(zmq.RCVHWM, 1)
        socket.connect(published._replay.getsockopt_string(zmq.LAST_ENDPOINT))
        follower.subscribe(b"kv@")
        follower.connect(published.endpoint)
        socket.send_multipart((b"", (0).to_bytes(8, "big")))
        numbers = [socket.recv_multipart()[1]]
        while not follower.poll(20):  # the publisher's thread goes on once it has answered
            published.publish([])
        while numbers[-1] != END_OF_REPLAY:
            numbers.append(socket.recv_multipart()[1])
    published.close()
    assert [int.from_bytes(number, "big") for number in numbers[:-1]] == list(range(num))


def test_a_publisher_that_falls_behind_tells_less_and_never_blocks() -> None:
    published = publisher(max_queue_size=2)
    published.close()  # its thread takes nothing any more
    for number in range(4):
        published.publish([number])
    published._queue.get_nowait()
    published._queue.get_nowait()
    published.publish(["next"])
    batch = published._queue.get_nowait()
    assert [type(event).__name__ for event in batch.events] == ["AllBlocksCleared", "str"]
    published.publish(["after"])
    assert published._queue.get_nowait().events == ["after"]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "JSON"),
        ('{"publisher": "kafka"}', "publisher"),
        ('{"enabled": true}', "enabled"),
        ('{"buffer_steps": -1}', "buffer_steps"),
    ],
)
def test_a_wrong_configuration_is_refused(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=f"--kv-events-config: .*{reason}"):
        KvEventsConfig.parse(text)


def test_an_endpoint_that_is_taken_is_refused() -> None:
    published = publisher(endpoint="tcp://127.0.0.1:*")
    with pytest.raises(ValueError, match="--kv-events-config: cannot listen"):
        publisher(replay_endpoint=published.endpoint)
    published.close()


def test_without_the_flag_nothing_of_it_is_imported() -> None:
    code = "import sys, node.parts, node.core; print([name for name in ('zmq', 'msgspec') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"


def test_a_core_is_followed_whether_routers_listen_or_not() -> None:
    """From the first turn on; a session that ends, or begins, loses nothing of it."""
    heard: list[dict[bytes, bool]] = []

    class Follower:
        def sealed(self, tokens: Any, cache_salt: str, hashes: Any, first: int) -> None: ...

        def turned(self, changes: Any) -> None:
            heard.append(dict(changes))

    settings = parse(DecodeSettings, ["--model=baton-tiny", "--engine=simulated", "--profile=h200-8b"])
    parts = assemble(make_role, settings, lambda: None)
    core: Any = parts.role
    core.block_changes.follow(Follower())
    blocks = core.engine.blocks
    for event in (None, SessionOpened(1), SessionLost(1), None):
        if event is not None:
            core.handle(event, 0.0)
        (block,) = blocks.allocate(1).blocks
        blocks.seal([block], [bytes([len(heard)]) * 32])
        core.compute(0.0)
        told = len(heard)
        core.end_turn()
        assert len(heard) == told + 1, "no token waits for a follower"
    assert sum(len(changes) for changes in heard) == 4
    parts.close()
