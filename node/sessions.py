"""Routers' sessions: the only way to place work on a node, and the way its updates go back.

router                      node
  | <- Auth, both ways ------> |   where there is a cluster secret (`baton.rpc.cluster_secret`)
  | -- Subscribe ------------> |   version and incarnation are checked
  | <------------ Subscribed - |   the role gets SessionOpened before any work
  | -- Prefill, Abort -------> |
  | <-- Updates, Load -------- |   Load at least every HEARTBEAT_S
  | <-- KvEvents ------------- |   first a snapshot of the prefix cache, then its changes (`node.kv_events.feed`)
  x                            |   end of the stream: SessionLost, all work of the epoch ends
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from baton import PROTOCOL_VERSION, wire
from baton.audit import epoch_name
from baton.errors import InvalidRequest
from baton.messages import (
    Abort,
    Adopted,
    AttemptId,
    Auth,
    End,
    HandedOff,
    Load,
    Migrate,
    Prefill,
    SampleEnd,
    Started,
    Stayed,
    Subscribe,
    Subscribed,
    Tokens,
    Update,
)
from baton.prompt_logprobs import PromptLogprobs
from baton.rpc.cluster_secret import SESSION, NotTrusted, admit
from baton.rpc.streams import ENDED, EOF, HEARTBEAT_S, HELLO_S, LEFT, STOPPED, Stream, first_end, read_all
from baton.rpc.trust import Trust
from baton.telemetry import NodeMetrics
from baton.v1 import node_pb2
from node.events import (
    BlocksChanged,
    BlocksHeld,
    BlocksWanted,
    CloseSession,
    Event,
    SessionLost,
    SessionOpened,
)
from node.kv_events.feed import KV_PERIOD_S, KvFeed
from node.loop import Turn

log = logging.getLogger(__name__)

MAX_UPDATES = 100_000
"""The most updates queued for one router, some minutes of tokens. If there are more, the router does not read, and its
session ends."""
UPDATES_PER_MESSAGE = 8192
LOGPROBS_BYTES_PER_MESSAGE = 128 * 1024
"""A message with this many bytes of logprobs takes no more updates: reading it keeps the router busy for 1 ms, and all
logprobs of a backlog together could exceed the size of a message."""
LOAD_PERIOD_S = 0.1
"""The shortest interval between reports of a changed load; an unchanged one is sent every HEARTBEAT_S."""

Context = grpc.aio.ServicerContext[Any, Any]


class _Session(Stream[Update]):
    def __init__(self, epoch: int) -> None:
        super().__init__(MAX_UPDATES)
        self.epoch = epoch
        self.opened = 0  # number of its SessionOpened
        self.blocks = KvFeed()


class Sessions:
    """All sessions of a node. Asyncio thread only.

    `post` queues an event for the role and returns its number; `limits`: on messages to this node.
    """

    def __init__(
        self,
        incarnation: str,
        post: Callable[[Event], int],
        metrics: NodeMetrics,
        limits: wire.Limits,
        trust: Trust,
    ) -> None:
        self._incarnation = incarnation
        self._post = post
        self._metrics = metrics
        self.limits = limits
        self._trust = trust
        self._by_epoch: dict[int, _Session] = {}
        self._load: Load | None = None  # until the first turn
        self._closing = False

    def deliver(self, turn: Turn) -> None:
        """Queue a turn's updates, each for its router; end the session of a router that does not read."""
        was_draining, self._load = self._load is not None and self._load.draining, turn.load
        if turn.load.draining and not was_draining:
            for told in self._by_epoch.values():
                told.wake()
        self._metrics.set_load(turn.load)
        by_epoch: defaultdict[int, list[Update]] = defaultdict(list)
        for output in turn.outputs:
            if isinstance(output, Update):
                by_epoch[output.attempt_id.router_epoch].append(output)
            elif isinstance(output, BlocksChanged | BlocksHeld):
                self._feed(output, turn)
            elif isinstance(output, CloseSession) and (session := self._meant(output.epoch, turn)):
                session.end(output.reason)
        for epoch, updates in by_epoch.items():
            if session := self._meant(epoch, turn):
                for update in updates:  # those of a lost session are not counted, since nothing would end them
                    self._metrics.sent(update)
                    _log(update)
                session.put(*updates)

    def _feed(self, output: BlocksChanged | BlocksHeld, turn: Turn) -> None:
        """Pass on what the prefix cache holds, to the router that asked or to all."""
        for epoch in [output.epoch] if isinstance(output, BlocksHeld) else self._by_epoch:
            if session := self._meant(epoch, turn):
                was_empty = session.blocks.is_empty
                if isinstance(output, BlocksHeld):
                    session.blocks.snapshot(output.hashes)
                else:
                    session.blocks.changed(output.changes)
                if was_empty:
                    session.wake()

    def _meant(self, epoch: int, turn: Turn) -> _Session | None:
        """The epoch's session, unless the turn's outputs are for an earlier session whose end the role had not seen."""
        session = self._by_epoch.get(epoch)
        return session if session and turn.num_handled >= session.opened else None

    def close(self) -> None:
        """End all sessions, each once its queued updates are sent, and new ones likewise."""
        self._closing = True
        for session in self._by_epoch.values():
            session.close(STOPPED)

    async def serve(self, context: Context) -> None:
        """One `Session` call, from Subscribe to its end."""
        epoch = await self._subscribe(context)
        session = self._open(epoch)
        reason = LEFT
        try:
            await context.write(wire.write_node_message(Subscribed(self._incarnation)))
            reason = await first_end(
                session.until_end(),
                read_all(context.read, lambda message: self._receive_all(session, message), silence_s=None),
                self._write(session, context),
            )
        finally:
            self._close(session, reason)
        if reason != ENDED:
            await context.abort(grpc.StatusCode.ABORTED, reason)

    async def _subscribe(self, context: Context) -> int:
        """The epoch of a valid subscriber. Aborts the call of any other."""
        try:
            async with asyncio.timeout(HELLO_S):
                epoch, said = await self._admit(context)
        except (TimeoutError, InvalidRequest, DecodeError):
            said = None
        except NotTrusted as error:
            log.warning("refused a router from=%s reason=%s", context.peer(), error.message)
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, error.message)
        if not isinstance(said, Subscribe):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "a session opens with Subscribe")
        if epoch not in (None, str(said.router_epoch)):
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "the router has proved to be of another epoch")
        if said.protocol_version != PROTOCOL_VERSION:
            text = f"protocol version {said.protocol_version}, this node speaks {PROTOCOL_VERSION}"
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, text)
        if said.target_incarnation != self._incarnation:
            text = f"this is incarnation {self._incarnation}, not {said.target_incarnation}"
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, text)
        return said.router_epoch

    async def _admit(self, context: Context) -> tuple[str | None, wire.RouterToNode | None]:
        """The epoch that the router has proved (None without a secret) and its next message. Raises NotTrusted,
        InvalidRequest."""

        async def say(message: Auth) -> None:
            await context.write(wire.write_node_message(message))

        async def hear() -> wire.RouterToNode | None:
            message = await context.read()
            return wire.read_router_message(message) if message is not EOF else None

        return await admit(self._trust.secret, SESSION, self._incarnation, "the router", say, hear)

    def _open(self, epoch: int) -> _Session:
        if old := self._by_epoch.get(epoch):
            self._close(old, "a new session of the epoch took its place")
        session = _Session(epoch)
        if self._closing:
            session.close(STOPPED)
        self._by_epoch[epoch] = session
        session.opened = self._post(SessionOpened(epoch))
        log.info("session open epoch=%d", epoch_name(epoch))
        return session

    def _close(self, session: _Session, reason: str) -> None:
        """Takes effect once for each session: an old one may have been replaced before its call ends."""
        if self._by_epoch.get(session.epoch) is session:
            del self._by_epoch[session.epoch]
            self._post(SessionLost(session.epoch))
            self._metrics.lost(session.epoch)
            log.info("session over epoch=%d reason=%s", epoch_name(session.epoch), reason)
        session.end(reason)

    def _receive_all(self, session: _Session, message: node_pb2.RouterMessage) -> None:
        if self._by_epoch.get(session.epoch) is not session:
            return  # read before the old call ended, but the epoch's work now belongs to its new session
        for single in wire.split_router_message(message):
            self._receive(session, single)

    def _receive(self, session: _Session, message: node_pb2.RouterMessage) -> None:
        try:
            said = wire.read_router_message(message, self.limits)
        except InvalidRequest as error:
            self._refuse(session, wire.attempt_of(message), error)
            return
        match said:
            case Prefill() | Abort() | Migrate() if said.attempt_id.router_epoch != session.epoch:
                raise InvalidRequest("work of another epoch than the session's")
            case Prefill():
                self._metrics.received(said)
                self._post(said)
            case Abort() | Migrate():
                self._post(said)
            case Subscribe() | Auth():
                raise InvalidRequest(f"a second {type(said).__name__}")

    def _refuse(self, session: _Session, attempt_id: AttemptId | None, error: InvalidRequest) -> None:
        """An invalid message about a request of this router ends that request, in whatever state it is; any other
        invalid message ends the session."""
        if attempt_id is None or attempt_id.router_epoch != session.epoch:
            raise error
        log.info("refused error=%s", error.message, extra={"request_id": attempt_id.request_id})
        session.put(Update(attempt_id, End(error)))
        self._post(Abort(attempt_id))

    async def _write(self, session: _Session, context: Context) -> str:
        """Send updates as they come, the load, and what the prefix cache holds."""
        sent: Load | None = None
        sent_at = kv_sent_at = 0.0
        while True:
            now = time.monotonic()
            due = sent_at + (HEARTBEAT_S if sent == self._load else LOAD_PERIOD_S)
            if now >= due:
                sent, sent_at = self._load, now
                if sent is not None:
                    await context.write(wire.write_node_message(sent))
                continue
            if session.blocks.lacks_snapshot:
                session.blocks.lacks_snapshot = False
                self._post(BlocksWanted(session.epoch))
            if not session.blocks.is_empty:
                if now >= (kv_due := kv_sent_at + KV_PERIOD_S):
                    await context.write(wire.write_node_message(session.blocks.take()))
                    kv_sent_at = now if session.blocks.is_empty else kv_sent_at  # the rest of a batch follows at once
                due = min(due, max(now, kv_due))
            updates = await session.take(due - now)
            if not updates and session.closing:
                if self._load is not None and sent != self._load:  # the router is to know that the node stops
                    await context.write(wire.write_node_message(self._load))
                return session.closing
            for batch in _batches(updates):
                await context.write(wire.write_node_message(batch))


def _batches(updates: Sequence[Update]) -> Iterator[tuple[Update, ...]]:
    """All of them, in messages of bounded size. A sample's end stays with its last token: if it were lost, the router
    would have the sample go on."""
    start = num_bytes = 0
    for end, update in enumerate(updates, 1):
        kind = update.kind
        if isinstance(kind, PromptLogprobs):
            num_bytes += kind.num_bytes
        elif isinstance(kind, Tokens) and kind.logprobs:
            num_bytes += sum([logprobs.num_bytes for logprobs in kind.logprobs])
        is_full = end - start >= UPDATES_PER_MESSAGE or num_bytes >= LOGPROBS_BYTES_PER_MESSAGE
        if end == len(updates) or (is_full and not isinstance(updates[end].kind, SampleEnd)):
            yield tuple(updates[start:end])
            start, num_bytes = end, 0


def _log(update: Update) -> None:
    """Log each stage of a request, so that its id can be followed from node to node."""
    match update.kind:
        case Started(num_cached_tokens, queue_s):
            text = f"started cached_tokens={num_cached_tokens} queue_ms={queue_s * 1e3:.1f}"
        case HandedOff(prefill_s):
            text = f"handed off prefill_ms={prefill_s * 1e3:.1f}"
        case Adopted(transfer_s, num_cached_tokens, transfer_bytes):
            text = (
                f"adopted cached_tokens={num_cached_tokens} handoff_ms={update.kind.handoff_s * 1e3:.1f} "
                f"transfer_ms={transfer_s * 1e3:.1f} bytes={transfer_bytes}"
            )
        case Stayed(move, error):
            text = f"stays move={move} error={error!r}"
        case End(error):
            text = f"ended error={error!r}" if error else "ended error=none"
        case _:
            return
    log.info("%s attempt=%d", text, update.attempt_id.attempt, extra={"request_id": update.attempt_id.request_id})
