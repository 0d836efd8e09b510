"""KV events over ZMQ, as vLLM publishes them, for routers and indexers that place by prefix (llm-d, Dynamo, ...).

    engine's thread                                publisher's thread
    sealed: tokens and parent of each block   ->   queue   ->   PUB: [topic, sequence number, msgpack]
    turned: what the prefix cache gained and lost                ROUTER: batches that a subscriber missed

These are the changes of the prefix cache that baton's routers get too (`node.kv_events.feed`), one batch per turn. The
engine's thread never waits: if the publisher falls behind by `max_queue_size` batches, the next one begins with
AllBlocksCleared, after which subscribers know less than the cache holds, but never more. The format is that of vLLM,
`vllm/distributed/kv_events.py`; events are arrays, which all of its readers understand.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import zmq

from baton.block_hash import BlockHash
from node.kv_events_config import KvEventsConfig, is_bound

log = logging.getLogger(__name__)

END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
_POLL_S = 0.1
_PAUSE_S = 0.005
"""A pause before a batch is sent, unless other batches wait: the thread that sends the turn's tokens needs the CPU
meanwhile."""
_CLOSE_S = 2.0
_INT_BITS = 64


class _Event(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, tag=True):
    """An array that begins with the class's name."""


class BlockStored(_Event, tag="BlockStored"):
    """Consecutive blocks after the block with the parent hash. extra_keys: for each block, what its hash covers besides
    its tokens and its parent, which is the first block's cache_salt."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = "GPU"
    lora_name: str | None = None
    extra_keys: list[tuple[str] | None] | None = None


class BlockRemoved(_Event, tag="BlockRemoved"):
    block_hashes: list[int]
    medium: str | None = "GPU"


class AllBlocksCleared(_Event, tag="AllBlocksCleared"):
    pass


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """ts: seconds since 1970."""

    ts: float
    events: list[Any]
    data_parallel_rank: int | None = 0


class KvEvents:
    """Collects a turn's events. Engine's thread only."""

    def __init__(self, publisher: KvEventPublisher, block_size: int) -> None:
        self._publisher = publisher
        self._block_size = block_size
        self._sealed: dict[BlockHash, tuple[BlockHash | None, Sequence[int], str]] = {}

    def sealed(self, tokens: Sequence[int], cache_salt: str, hashes: Sequence[BlockHash], first: int) -> None:
        """A sequence's blocks from number `first` on have got their hashes; `hashes` begins with block 0's."""
        size = self._block_size
        for i in range(first, len(hashes)):
            parent = hashes[i - 1] if i else None
            self._sealed[hashes[i]] = (parent, tokens[i * size : (i + 1) * size], "" if i else cache_salt)

    def turned(self, changes: Mapping[BlockHash, bool]) -> None:
        """The turn ends. changes: for each hash, whether the prefix cache holds it now."""
        events: list[Any] = []
        if removed := [as_int(block_hash) for block_hash, is_held in changes.items() if not is_held]:
            events.append(BlockRemoved(removed))
        last: BlockHash | None = None
        for block_hash, is_held in changes.items():
            if not is_held or block_hash not in self._sealed:
                continue
            parent, tokens, salt = self._sealed[block_hash]
            if parent is not None and parent == last:
                events[-1].block_hashes.append(as_int(block_hash))
                events[-1].token_ids.extend(tokens)
                if events[-1].extra_keys is not None:
                    events[-1].extra_keys.append(None)
            else:
                known = None if parent is None else as_int(parent)
                keys: list[tuple[str] | None] | None = [(salt,)] if salt else None
                events.append(BlockStored([as_int(block_hash)], known, list(tokens), self._block_size, extra_keys=keys))
            last = block_hash
        self._sealed.clear()
        if events:
            self._publisher.publish(events)


def as_int(block_hash: BlockHash) -> int:
    """The integer to which vLLM shortens a SHA-256 for its readers."""
    return int.from_bytes(block_hash, "big") & (1 << _INT_BITS) - 1


class KvEventPublisher:
    """Owns the sockets and their thread, until `close`. Raises ValueError if an address is not available."""

    def __init__(self, config: KvEventsConfig, topic: str) -> None:
        self._topic = (config.topic or topic).encode()
        self._queue: queue.Queue[EventBatch | None] = queue.Queue(config.max_queue_size)
        self._lost = False
        self._sequence = 0
        self._closing = threading.Event()
        self._sent: deque[tuple[int, bytes]] = deque(maxlen=config.buffer_steps)
        self._encoder = msgspec.msgpack.Encoder()
        self._context = zmq.Context()
        self._pub = self._context.socket(zmq.PUB)
        self._replay = None if config.replay_endpoint is None else self._context.socket(zmq.ROUTER)
        try:
            self._pub.set_hwm(config.hwm)
            _open(self._pub, config.endpoint)
            if self._replay is not None and config.replay_endpoint is not None:
                # A ROUTER drops what a subscriber's queue has no room for. A replay is sent all at once.
                self._replay.set_hwm(config.buffer_steps + 1)
                self._replay.bind(config.replay_endpoint)
        except zmq.ZMQError as error:
            self._end()
            raise ValueError(f"--kv-events-config: cannot listen on an endpoint: {error}") from None
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()

    @property
    def endpoint(self) -> str:
        """Where subscribers connect, with the port that was chosen for `tcp://...:*`."""
        return self._pub.getsockopt_string(zmq.LAST_ENDPOINT)

    def publish(self, events: list[Any]) -> None:
        """Queue a batch. Never blocks. For any thread, but one at a time."""
        if self._lost:
            events = [AllBlocksCleared(), *events]
        try:
            self._queue.put_nowait(EventBatch(time.time(), events))
        except queue.Full:
            if not self._lost:
                log.warning("kv events are lost: the publisher is %d batches behind", self._queue.maxsize)
            self._lost = True
        else:
            self._lost = False

    def close(self) -> None:
        """Send what is queued, for up to two seconds."""
        self._closing.set()
        try:
            self._queue.put(None, timeout=_CLOSE_S)
        except queue.Full:
            log.warning("kv events are lost: the publisher does not end")
        self._thread.join(_CLOSE_S)
        self._end()

    def _end(self) -> None:
        self._pub.close(linger=int(_CLOSE_S * 1e3))
        if self._replay is not None:
            self._replay.close(linger=0)
        self._context.term()

    def _run(self) -> None:
        try:
            while True:
                if self._replay is not None and self._replay.poll(0):
                    self._answer(self._replay)
                try:
                    batch = self._queue.get(timeout=_POLL_S)
                except queue.Empty:
                    continue
                if batch is None:
                    return
                if self._queue.empty():
                    self._closing.wait(_PAUSE_S)
                self._send(batch)
        except zmq.ZMQError as error:
            log.warning("kv events end: %s", error)  # closed, although batches were left

    def _send(self, batch: EventBatch) -> None:
        payload = self._encoder.encode(batch)
        self._pub.send_multipart((self._topic, self._sequence.to_bytes(8, "big"), payload))
        self._sent.append((self._sequence, payload))
        self._sequence += 1

    def _answer(self, replay: zmq.Socket[bytes]) -> None:
        """All kept batches from a sequence number on, and then -1."""
        frames = replay.recv_multipart()
        if len(frames) != 3 or len(frames[2]) != 8:
            log.info("kv events: a replay request of %d frames is left out", len(frames))
            return
        client, start = frames[0], int.from_bytes(frames[2], "big")
        for sequence, payload in self._sent:
            if sequence >= start:
                replay.send_multipart((client, b"", sequence.to_bytes(8, "big"), payload))
        replay.send_multipart((client, b"", END_OF_REPLAY, b""))


def _open(socket: zmq.Socket[bytes], endpoint: str) -> None:
    if is_bound(endpoint):
        socket.bind(endpoint)
    else:
        socket.connect(endpoint)
