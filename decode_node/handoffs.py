"""The decode node's end of handoff streams."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from weakref import WeakValueDictionary

import grpc
from google.protobuf.message import DecodeError

from baton import wire
from baton.errors import BatonError, InvalidRequest, NodeUnavailable
from baton.handoff_messages import Hello
from baton.messages import Auth
from baton.rpc.cluster_secret import HANDOFF, NotTrusted, admit
from baton.rpc.streams import ENDED, EOF, HELLO_S, LEFT, STOPPED
from node.events import ClosePeer, PeerClosed, PeerOpened, ToPrefill
from node.handoffs.stream import (
    CONNECT_S,
    DECODE_CODEC,
    HandoffEnd,
    HandoffStream,
    check_hello,
    check_target,
    connect,
    describe,
    routes_to,
)
from node.loop import Turn
from node.sessions import Context

log = logging.getLogger(__name__)


class HandoffServer:
    """Serves one stream for each prefill incarnation. Asyncio thread only.

    A second stream of an incarnation replaces the first, which the peer has given up although this node did not notice.
    The second connects only after the role knows that the first has ended. Otherwise the role could post receives for
    leases of the first stream on the second's connection, where they would keep their slots as long as it lasts.
    """

    def __init__(self, ours: HandoffEnd) -> None:
        self._ours = ours
        self._streams: dict[str, HandoffStream] = {}
        self._opened: dict[str, int] = {}  # peer -> the number of its stream's PeerOpened event
        self._closing: dict[str, asyncio.Future[None]] = {}  # by peer: until the role has handled its PeerClosed
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()  # one stream of a peer at a time

    def deliver(self, turn: Turn) -> None:
        """Send a turn's messages, and end streams; drop what is for a stream that has since ended or been replaced."""
        for output in turn.outputs:
            match output:
                case ToPrefill(peer, message) if turn.num_handled >= self._opened.get(peer, turn.num_handled + 1):
                    self._streams[peer].send(message)
                case ClosePeer(peer, reason) if peer in self._opened:  # else it is the last stream that was lost
                    self._streams[peer].end(reason)

    async def close(self) -> None:
        """End all streams; their calls finish within the server's grace."""
        for stream in self._streams.values():
            stream.end(STOPPED)

    async def serve(self, context: Context) -> None:
        """One `Handoff` call, from Hello to its end."""
        theirs = await self._read_hello(context)
        peer = theirs.incarnation
        if old := self._streams.get(peer):
            old.end("a new stream of the peer took its place")
        lock = self._turns.setdefault(peer, asyncio.Lock())
        async with lock:
            await self._talk(context, theirs)

    async def _read_hello(self, context: Context) -> Hello:
        try:
            async with asyncio.timeout(HELLO_S):
                incarnation, said = await self._admit(context)
        except (TimeoutError, InvalidRequest, DecodeError):
            said = None
        except NotTrusted as error:
            log.warning("refused a prefill node from=%s reason=%s", context.peer(), error.message)
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, error.message)
        if not isinstance(said, Hello):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "a handoff stream opens with Hello")
        if incarnation not in (None, said.incarnation):
            await context.abort(
                grpc.StatusCode.UNAUTHENTICATED, "the prefill node has proved to be another incarnation"
            )
        return said

    async def _admit(self, context: Context) -> tuple[str | None, wire.FromPrefill | None]:
        """The incarnation that the peer has proved (None without a secret) and its next message. Raises NotTrusted,
        InvalidRequest."""

        async def say(message: Auth) -> None:
            await context.write(wire.write_decode_message(message))

        async def hear() -> wire.FromPrefill | None:
            message = await context.read()
            return wire.read_prefill_message(message) if message is not EOF else None

        return await admit(
            self._ours.trust.secret, HANDOFF, self._ours.hello.incarnation, "the prefill node", say, hear
        )

    async def _talk(self, context: Context, theirs: Hello) -> None:
        peer, reason = theirs.incarnation, LEFT
        stream = self._streams[peer] = HandoffStream(peer, DECODE_CODEC, self._ours.limits)
        try:
            error = await self._connect(theirs)
            if error is None:
                opened = PeerOpened(peer, theirs.part_blocks, theirs.layout, theirs.node_id)
                self._opened[peer] = self._ours.post(opened)
                log.info("handoff open peer=%s node=%s", peer, theirs.node_id)
            answer = dataclasses.replace(self._ours.hello, error=error)
            await context.write(wire.write_decode_message(answer))
            if error is not None:
                reason = describe(error)
                return
            patience_s = CONNECT_S + self._ours.silence_s
            reason = await stream.carry(
                context.read, context.write, self._ours.post, self._ours.silence_s, first_s=patience_s
            )
        finally:
            self._ours.transport.disconnect(peer)
            del self._streams[peer]
            if self._opened.pop(peer, None):
                self._close(peer, reason)
            log.info("handoff over peer=%s node=%s reason=%s", peer, theirs.node_id, reason)
        if reason != ENDED:
            await context.abort(grpc.StatusCode.ABORTED, reason)

    async def _connect(self, theirs: Hello) -> BatonError | None:
        """Check the peer and connect the transport to it; returns the error that refuses it, if any."""
        try:
            check_target(self._ours.hello, theirs)
            check_hello(self._ours.hello, theirs)
            await self._until_closed(theirs.incarnation)
            await connect(self._ours.transport, theirs.incarnation, routes_to(self._ours.hello, theirs))
        except BatonError as error:
            return error
        return None

    def _close(self, peer: str, reason: str) -> None:
        self._ours.post(PeerClosed(peer, reason))
        handled = self._closing[peer] = self._ours.handled()
        handled.add_done_callback(lambda _: self._closing.pop(peer))

    async def _until_closed(self, peer: str) -> None:
        """Wait until the role has handled the end of the peer's previous stream. Raises NodeUnavailable."""
        if (handled := self._closing.get(peer)) is not None:
            await asyncio.wait([handled], timeout=CONNECT_S)
            if not handled.done():
                raise NodeUnavailable("the decode node has not taken note yet that the last stream ended")
