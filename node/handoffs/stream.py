"""The common part of both ends of a handoff stream: the Hello exchange, messages, detection of silence.

prefill node                decode node
  | <- Auth, both ways ----> |  where there is a cluster secret (`baton.rpc.cluster_secret`)
  | -- Hello ---------------> |  checks version, incarnation and layout, connects the transport
  | <---------------- Hello - |  with an error if it refuses the peer
  |   connects the transport  |
  | <-> messages, heartbeats  |  silence ends the stream
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from baton import PROTOCOL_VERSION, wire
from baton.errors import BatonError, InvalidRequest, NodeUnavailable, TransferError
from baton.handoff_messages import CommitReply, Heartbeat, Hello, Refuse, Release, Reserve
from baton.messages import AttemptId, Auth
from baton.node_info import Route
from baton.rpc.streams import HEARTBEAT_S, Stream, first_end, read_all
from baton.rpc.trust import Trust
from node.events import Event, FromPeer

log = logging.getLogger(__name__)

MAX_WAITING = 10_000
CONNECT_S = 3.0
"""Timeout for the transport to connect. No message is sent meanwhile; the peer, which has connected first, tolerates
that silence."""


class PeerTransport(Protocol):
    """The part of a KV transport that the shell uses. Any thread may call it."""

    def connect(self, peer: str, routes: Sequence[Route], timeout_s: float) -> None:
        """Block until parts can travel between these ranks. Raises TransferError."""

    def disconnect(self, peer: str) -> None:
        """Disconnect the peer. A no-op if it is not connected."""

    def close(self) -> None:
        """End all transfers and threads."""


Post = Callable[[Event], int]


@dataclass(frozen=True, slots=True)
class HandoffEnd:
    """This node's end of its handoff streams. `hello` describes it; `post` takes events for the role; `handled` returns
    a future that is done once the role has handled all events posted so far; `limits` are for messages to this node; a
    peer that is silent for `silence_s` is given up."""

    hello: Hello
    transport: PeerTransport
    post: Post
    handled: Callable[[], asyncio.Future[None]]
    trust: Trust
    limits: wire.Limits
    silence_s: float


@dataclass(frozen=True, slots=True)
class Codec:
    """How one end reads and writes messages. `fail`: for an attempt and the reason why a message about it is invalid,
    returns the answer to the peer, if any, and the message to handle instead."""

    read: Callable[[Any, wire.Limits], Any]
    write: Callable[[Any], Any]
    fail: Callable[[AttemptId, InvalidRequest], tuple[Any | None, Any]]


def _fail_at_prefill(attempt_id: AttemptId, error: InvalidRequest) -> tuple[None, Refuse]:
    """No answer from here: handling the Refuse, the role sends a Release."""
    return None, Refuse(attempt_id, TransferError(f"the decode node's message makes no sense: {error.message}"))


def _fail_at_decode(attempt_id: AttemptId, error: InvalidRequest) -> tuple[Refuse, Release]:
    return Refuse(attempt_id, error), Release(attempt_id)


PREFILL_CODEC = Codec(wire.read_decode_message, wire.write_prefill_message, _fail_at_prefill)
DECODE_CODEC = Codec(wire.read_prefill_message, wire.write_decode_message, _fail_at_decode)


class HandoffStream(Stream[Any]):
    """One stream. `open_attempts`: the attempts whose handoff is under way on it; `limits`: for messages to this node;
    the peer's Hello may widen them."""

    def __init__(self, peer: str, codec: Codec, limits: wire.Limits) -> None:
        super().__init__(MAX_WAITING)
        self.peer = peer
        self.open_attempts: set[AttemptId] = set()
        self._codec = codec
        self.limits = limits
        self.was_idle = False  # it has ended since it was not used
        self._last_used = time.monotonic()

    def send(self, message: Any) -> None:
        self._note(message)
        self.put(message)

    async def carry(
        self,
        read: Callable[[], Awaitable[Any]],
        write: Callable[[Any], Awaitable[Any]],
        post: Post,
        silence_s: float,
        idle_s: float = math.inf,
        first_s: float = 0.0,
    ) -> str:
        """Run both directions until the stream ends, which it also does if the peer is silent or the stream is not
        used. Returns why it ended."""

        def receive(message: Any) -> None:
            said = self._read(message)
            if isinstance(said, Hello | Auth):
                raise InvalidRequest(f"a second {type(said).__name__}")
            if not isinstance(said, Heartbeat):
                self._note(said)
                post(FromPeer(self.peer, said))

        reading = read_all(read, receive, silence_s, first_s)
        return await first_end(self.until_end(), reading, self._write_all(write, idle_s))

    def _read(self, message: Any) -> Any:
        """Parse a message. An invalid one that names its attempt ends that attempt here. Raises InvalidRequest for one
        that names none."""
        try:
            return self._codec.read(message, self.limits)
        except InvalidRequest as error:
            if (attempt_id := wire.attempt_of(message)) is None:
                raise
            log.info("refused peer=%s error=%s", self.peer, error.message, extra={"request_id": attempt_id.request_id})
            answer, said = self._codec.fail(attempt_id, error)
            if answer is not None:
                self.send(answer)
            return said

    async def _write_all(self, write: Callable[[Any], Awaitable[Any]], idle_s: float) -> str:
        while self.open_attempts or time.monotonic() - self._last_used < idle_s:
            for message in await self.take(HEARTBEAT_S) or [Heartbeat()]:
                await write(self._codec.write(message))
        self.was_idle = True
        return f"idle for {idle_s:g} s"

    def take_unsent(self) -> list[Any]:
        """The messages that wait, once nothing more is written."""
        unsent, self._waiting = self._waiting, []
        return unsent

    def _note(self, message: Any) -> None:
        self._last_used = time.monotonic()
        match message:
            case Reserve(attempt_id=attempt_id):
                self.open_attempts.add(attempt_id)
            case Release(attempt_id=attempt_id) | Refuse(attempt_id=attempt_id) | CommitReply(attempt_id=attempt_id):
                self.open_attempts.discard(attempt_id)


def check_hello(mine: Hello, theirs: Hello) -> None:
    """Raise a BatonError that says why no handoff between these two nodes is possible."""
    if theirs.protocol_version != PROTOCOL_VERSION:
        raise TransferError(f"protocol version {theirs.protocol_version} of {theirs.node_id} != {PROTOCOL_VERSION}")
    mine.layout.require_compatible(theirs.layout, theirs.node_id)
    if theirs.part_blocks < 1:
        raise TransferError(f"{theirs.node_id} takes no block in a part")


def check_target(mine: Hello, theirs: Hello) -> None:
    """Raise NodeUnavailable for a Hello that was meant for another incarnation of this node."""
    if theirs.target_incarnation != mine.incarnation:
        raise NodeUnavailable(f"this is incarnation {mine.incarnation}, not {theirs.target_incarnation}")


def routes_to(mine: Hello, theirs: Hello) -> list[Route]:
    """Connect each rank here to each of the peer's ranks whose KV slice overlaps, over this node's transport. The
    layouts must be compatible. Raises TransferError."""
    spoken = mine.endpoints[0].transport
    addresses = {endpoint.rank: endpoint.address for endpoint in theirs.endpoints if endpoint.transport == spoken}
    routes = [
        (rank, peer_rank)
        for rank, held in enumerate(mine.layout.ranks)
        for peer_rank, theirs_held in enumerate(theirs.layout.ranks)
        if held.overlap(theirs_held)
    ]
    if missing := {peer_rank for _, peer_rank in routes} - addresses.keys():
        offered = ", ".join(f"{endpoint.transport} of rank {endpoint.rank}" for endpoint in theirs.endpoints) or "none"
        needed = f"transport {spoken} of rank {min(missing)}"
        raise TransferError(f"{needed} is not offered by {theirs.node_id} ({offered})")
    return [Route(rank, peer_rank, addresses[peer_rank]) for rank, peer_rank in routes]


async def connect(transport: PeerTransport, peer: str, routes: Sequence[Route]) -> None:
    """`transport.connect` off the event loop. When cancelled, waits for it to return, so that a disconnect follows."""
    call = asyncio.create_task(asyncio.to_thread(transport.connect, peer, routes, CONNECT_S))
    try:
        await asyncio.shield(call)
    except asyncio.CancelledError:
        await asyncio.wait([call])
        if not call.cancelled():
            call.exception()  # else asyncio logs that it was never retrieved
        raise


def describe(error: BatonError) -> str:
    return f"{type(error).__name__} {error.message}"
