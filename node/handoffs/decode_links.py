"""Streams to decode nodes: opened by the first Reserve for a node, closed when idle or broken in either direction."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from typing import Any

import grpc

from baton import wire
from baton.errors import BatonError, InvalidRequest, NodeUnavailable
from baton.handoff_messages import Hello, PrefillToDecode, Reserve
from baton.messages import Auth, DecodeTarget
from baton.rpc.channels import open_channel
from baton.rpc.cluster_secret import HANDOFF, prove
from baton.rpc.streams import EOF, HELLO_S, STOPPED, PeerStatus, require_message, rpc_reason
from baton.v1 import node_pb2_grpc
from node.events import ClosePeer, PeerClosed, PeerOpened, ToDecode
from node.handoffs.stream import (
    PREFILL_CODEC,
    HandoffEnd,
    HandoffStream,
    check_hello,
    connect,
    describe,
    routes_to,
)
from node.loop import Turn

log = logging.getLogger(__name__)

IDLE_S = 60.0


class DecodeLinks:
    """One stream for each decode incarnation to which this node hands off. Asyncio thread only.

    Messages queue in order while a stream is being opened. Each stream's end is reported to the role once, as
    PeerClosed; messages that the role sent before it handled that are dropped, and only a Reserve opens a new stream.
    But if a stream is used again while it is being closed for want of use, the next one takes its place.
    """

    def __init__(self, ours: HandoffEnd, *, idle_s: float = IDLE_S) -> None:
        self._ours = ours
        self._idle_s = idle_s
        self._links: dict[str, HandoffStream] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed: dict[str, int] = {}  # peer -> number of its PeerClosed, until the role has handled it

    def deliver(self, turn: Turn) -> None:
        """Send a turn's messages."""
        self._closed = {peer: number for peer, number in self._closed.items() if number > turn.num_handled}
        for output in turn.outputs:
            match output:
                case ToDecode(target, message):
                    self._send(target, message)
                case ClosePeer(peer, reason) if link := self._links.get(peer):
                    link.end(reason)

    async def close(self) -> None:
        """End all streams. The role gets a PeerClosed for each."""
        for link in self._links.values():
            link.end(STOPPED)
        await asyncio.gather(*self._tasks)

    def _send(self, target: DecodeTarget, message: PrefillToDecode) -> None:
        peer = target.incarnation
        if peer in self._closed:
            return
        link = self._links.get(peer)
        if link is None and isinstance(message, Reserve):
            link = self._open(target)
        if link is not None:
            link.send(message)

    def _open(self, target: DecodeTarget) -> HandoffStream:
        link = self._links[target.incarnation] = HandoffStream(target.incarnation, PREFILL_CODEC, self._ours.limits)
        task = asyncio.create_task(self._run(link, target))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return link

    async def _run(self, link: HandoffStream, target: DecodeTarget) -> None:
        reason = "cancelled"
        try:
            reason = await self._talk(link, target)
        finally:
            self._ours.transport.disconnect(link.peer)
            del self._links[link.peer]
            for message in link.take_unsent() if link.was_idle else ():
                self._send(target, message)
            if link.peer not in self._links:
                self._closed[link.peer] = self._ours.post(PeerClosed(link.peer, reason))
            log.info("handoff over peer=%s address=%s reason=%s", link.peer, target.address, reason)

    async def _talk(self, link: HandoffStream, target: DecodeTarget) -> str:
        """Open the stream and run it to its end; returns why it ended or could not be opened."""
        async with open_channel(target.address, self._ours.trust.tls) as channel:
            call = node_pb2_grpc.DecodeNodeStub(channel).Handoff()  # type: ignore[no-untyped-call]
            status = PeerStatus(call)
            try:
                async with asyncio.timeout(HELLO_S):
                    theirs = await self._introduce(call, target)
                    routes = routes_to(self._ours.hello, theirs)
                    await connect(self._ours.transport, link.peer, routes)
            except TimeoutError:
                return f"no answer from {target.address} within {HELLO_S:g} s"
            except grpc.aio.AioRpcError as error:
                return rpc_reason(error)
            except BatonError as error:
                return describe(error)
            link.limits = dataclasses.replace(self._ours.limits, num_pairs=len(routes))
            self._ours.post(PeerOpened(link.peer, theirs.part_blocks, theirs.layout, theirs.node_id))
            log.info("handoff open peer=%s node=%s address=%s", link.peer, theirs.node_id, target.address)
            reason = await link.carry(call.read, call.write, self._ours.post, self._ours.silence_s, self._idle_s)
            return reason if status.error is None else rpc_reason(status.error)

    async def _introduce(self, call: Any, target: DecodeTarget) -> Hello:
        """Exchange Hellos. Raises a BatonError if either side refuses the other."""
        hello = Hello(
            incarnation=self._ours.hello.incarnation,
            node_id=self._ours.hello.node_id,
            layout=self._ours.hello.layout,
            endpoints=self._ours.hello.endpoints,
            target_incarnation=target.incarnation,
            part_blocks=self._ours.hello.part_blocks,
        )

        async def say(message: Auth | Hello) -> None:
            await call.write(wire.write_prefill_message(message))

        async def hear() -> wire.FromDecode | None:
            answer = await call.read()
            return wire.read_decode_message(require_message(answer)) if answer is not EOF else None

        if self._ours.trust.secret is not None:
            await prove(self._ours.trust.secret, HANDOFF, hello.incarnation, say, hear)
        await say(hello)
        theirs = await hear()
        if not isinstance(theirs, Hello):
            raise InvalidRequest("the decode node did not answer with Hello")
        if theirs.error is not None:
            raise theirs.error
        check_hello(self._ours.hello, theirs)
        if theirs.incarnation != target.incarnation:
            raise NodeUnavailable(f"{target.address} is incarnation {theirs.incarnation}, not {target.incarnation}")
        return theirs
