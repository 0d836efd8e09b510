"""The streams to the nodes: one session per node, opened again whenever it ends.

connect -> Describe -> (GetTokenizer) -> Session: (Auth), Subscribe, Subscribed, work and updates -> lost -> back-off
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio

from baton.address import HostPort
from baton.errors import BatonError, NodeUnavailable
from baton.messages import Abort, Auth, Load, Migrate, Prefill, Subscribe, Subscribed
from baton.node_info import NodeInfo, NodeRole
from baton.rpc.channels import open_channel
from baton.rpc.cluster_secret import SESSION, prove
from baton.rpc.silence import until_silent
from baton.rpc.streams import EOF, PeerStatus, connection_lost, require_message
from baton.rpc.trust import Trust
from baton.v1 import node_pb2, node_pb2_grpc
from baton.wire import Limits, join_router_messages, read_node_info, read_node_message, write_router_message
from router.nodes.dispatcher import Dispatcher
from router.text.models import Models

log = logging.getLogger(__name__)

DESCRIBE_TIMEOUT_S = 5.0
TOKENIZER_TIMEOUT_S = 60.0
MAX_TOKENIZER_BYTES = 256 * 2**20
"""Several times the largest. Whoever is at the address may send without end, and has not proved the cluster's secret
yet."""
LAST_WORD_S = 0.5
"""How long a stream that can no longer be written to has to say why."""
_ENOUGH_BYTES = 2**20
"""Of one write: with so many, what follows waits for the next."""
MAX_UNREAD = 100_000
"""Messages that wait for a node. With more, it does not read, and its session ends: what is placed there would wait in
vain, and be kept after its clients have left."""
_NO_ANSWER = "no answer"
FIRST_BACKOFF_S = 0.1
LAST_BACKOFF_S = 2.0


class NodeLink:
    """Keeps one address connected. `problem` says why it is not in use; None while it is. `info`: of the node that is
    in use; None: there is none. `incarnation`: of the node that was last there. `name`: see `open_channel`; a new one
    counts from the next connection on. `silence_s`: the node is lost if it says nothing for so long while the router
    listens."""

    def __init__(
        self,
        address: HostPort,
        role: NodeRole,
        epoch: int,
        dispatcher: Dispatcher,
        models: Models,
        changed: Callable[[], None],
        trust: Trust,
        silence_s: float,
        name: str = "",
    ) -> None:
        self.address = address
        self.role = role
        self.problem: str | None = "not reached yet"
        self.info: NodeInfo | None = None
        self.incarnation: str | None = None
        self.draining = False
        self.name = name
        self._reached = False
        self._epoch = epoch
        self._dispatcher = dispatcher
        self._models = models
        self._changed = changed
        self._trust = trust
        self._silence_s = silence_s

    def drain(self, problem: str = "is drained, and finishes what it has") -> None:
        """Place nothing more there. `run` returns once no request needs the node, or its session is lost."""
        assert self.info
        self.draining = True
        self._dispatcher.drain_node(self.info.incarnation, True)
        self._set_problem(problem)

    def resume(self) -> None:
        """It is wanted after all."""
        self.draining = False
        if self.info:
            self._dispatcher.drain_node(self.info.incarnation, False)
            self._set_problem(None)

    async def run(self) -> None:
        """Until cancelled, or drained."""
        backoff_s = FIRST_BACKOFF_S
        while True:
            was_up = False
            try:
                await self._connect_once()
            except _SessionLost as lost:
                was_up = True
                problem = str(lost)
            except (BatonError, grpc.aio.AioRpcError, TimeoutError) as error:
                problem = _reason(error)
            except Exception as error:  # a boundary: a bad node must not affect the others
                log.exception("node_address=%s internal error", self.address)
                problem = repr(error)
            self._set_problem(problem)
            if self.draining:
                return
            backoff_s = FIRST_BACKOFF_S if was_up else min(2 * backoff_s, LAST_BACKOFF_S)
            await asyncio.sleep(backoff_s * random.uniform(0.5, 1.0))

    async def _connect_once(self) -> None:
        """One session, from connecting to its end. Always raises; _SessionLost if the node had been in use."""
        async with open_channel(str(self.address), self._trust.tls, self.name) as channel:
            status = node_pb2_grpc.NodeStatusStub(channel)  # type: ignore[no-untyped-call]  # generated
            info = read_node_info(await status.Describe(node_pb2.DescribeRequest(), timeout=DESCRIBE_TIMEOUT_S))
            self._reached = True
            if info.role is not self.role:
                raise NodeUnavailable(f"is a {info.role.value} node, but wanted as a {self.role.value} node")
            self.incarnation = info.incarnation
            tokenizer = await self._models.tokenizer(info, lambda: _fetch_tokenizer(status, info))
            self._models.join(info, tokenizer, str(self.address))
            try:
                await self._session(channel, info)
            finally:
                self._models.leave(info.incarnation)

    async def _session(self, channel: grpc.aio.Channel, info: NodeInfo) -> None:
        prefills = self.role is NodeRole.PREFILL
        make_stub: Any = node_pb2_grpc.PrefillNodeStub if prefills else node_pb2_grpc.DecodeNodeStub
        call: _Call = make_stub(channel).Session()
        try:
            async with asyncio.timeout(DESCRIBE_TIMEOUT_S):
                await self._subscribe(call, info)
            raise _SessionLost(await self._in_use(call, info))
        finally:
            call.cancel()

    async def _subscribe(self, call: _Call, info: NodeInfo) -> None:
        async def say(message: Auth | Subscribe) -> None:
            await call.write(write_router_message(message))

        async def hear() -> Any:
            wire: Any = await call.read()
            return None if wire is EOF else read_node_message(require_message(wire))

        if self._trust.secret is not None:
            await prove(self._trust.secret, SESSION, str(self._epoch), say, hear)
        await say(Subscribe(self._epoch, info.incarnation))
        answer = await hear()
        if not isinstance(answer, Subscribed) or answer.incarnation != info.incarnation:
            raise NodeUnavailable("did not confirm the subscription")

    async def _in_use(self, call: _Call, info: NodeInfo) -> str:
        """From Subscribed to the end of the stream; returns why it ended."""
        status, outgoing = PeerStatus(call), _Outgoing()
        self._dispatcher.node_up(info, outgoing.put_nowait)
        self.info = info
        log.info("node_id=%s node_address=%s role=%s up", info.node_id, self.address, info.role.value)
        self._set_problem(None)
        reading = asyncio.create_task(self._listen(call, info, outgoing))
        writing = asyncio.create_task(_write(call, outgoing))
        reason = "the router ended its session"
        try:
            await asyncio.wait((reading, writing), return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait((reading,), timeout=LAST_WORD_S)  # its last message tells more than a failed write
            reason = reading.result() if reading.done() else f"cannot write to it: {_reason(writing.exception())}"
            reason = reason if status.error is None else _reason(status.error)
        finally:
            self.info = None
            self._dispatcher.node_lost(info.incarnation, reason)  # before any wait, which a second cancel would end
            reading.cancel()
            writing.cancel()
            await asyncio.gather(reading, writing, return_exceptions=True)
        return reason

    async def _listen(self, call: _Call, info: NodeInfo, outgoing: _Outgoing) -> str:
        """Pass on what the node says until its stream ends, breaks or goes silent, or it lets too much of what it is
        told wait; returns which."""
        limits = Limits.of(info)
        try:
            async with until_silent(self._silence_s) as silence:
                wire: Any
                while (wire := await call.read()) is not EOF:
                    silence.heard()
                    message = read_node_message(require_message(wire), limits)
                    if not isinstance(message, Subscribed | Auth):
                        self._dispatcher.handle_node_message(info.incarnation, message)
                    if not isinstance(message, Load):
                        continue
                    if message.draining:
                        self._set_problem("is stopping, and finishes what it has")
                    if self.draining and not self._dispatcher.is_on(info.incarnation):
                        return "drained"
                    if outgoing.qsize() > MAX_UNREAD:
                        return "it does not read"
        except TimeoutError:
            return f"silent for {self._silence_s:g} s"
        except (BatonError, grpc.aio.AioRpcError) as error:
            return _reason(error)
        return "it ended the session"

    def _set_problem(self, problem: str | None) -> None:
        if problem == self.problem:
            return
        self.problem = problem
        if problem:
            expected = self.draining or not self._reached  # no warning for a node that starts later
            level = logging.INFO if expected else logging.WARNING
            log.log(level, "node_address=%s role=%s not in use: %s", self.address, self.role.value, problem)
        self._changed()


class _SessionLost(Exception):
    """The session of a node that was in use ended."""


_Call = grpc.aio.StreamStreamCall[node_pb2.RouterMessage, node_pb2.NodeMessage]
_Outgoing = asyncio.Queue[Prefill | Abort | Migrate]


async def _write(call: _Call, outgoing: _Outgoing) -> None:
    """Write all messages in order, until writing fails: as one what has come while the last was written."""
    while True:
        messages = [write_router_message(await outgoing.get())]
        size = messages[0].ByteSize()
        while size < _ENOUGH_BYTES and not outgoing.empty():
            messages.append(write_router_message(outgoing.get_nowait()))
            size += messages[-1].ByteSize()
        await call.write(join_router_messages(messages))


async def _fetch_tokenizer(status: node_pb2_grpc.NodeStatusStub, info: NodeInfo) -> bytes:
    request = node_pb2.GetTokenizerRequest(digest=info.tokenizer_digest)
    pieces, num_bytes = list[bytes](), 0
    async with until_silent(DESCRIBE_TIMEOUT_S) as watch:
        async for chunk in status.GetTokenizer(request, timeout=TOKENIZER_TIMEOUT_S):
            watch.heard()
            pieces.append(chunk.data)
            num_bytes += len(chunk.data)
            if num_bytes > MAX_TOKENIZER_BYTES:
                raise NodeUnavailable(f"its tokenizer has more than {MAX_TOKENIZER_BYTES} bytes")
    return b"".join(pieces)


def _reason(error: BaseException | None) -> str:
    if isinstance(error, TimeoutError):
        return _NO_ANSWER
    if isinstance(error, grpc.aio.AioRpcError):
        if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:  # ours: no node says so
            return _NO_ANSWER
        if lost := connection_lost(error):
            return lost
        details = error.details() or error.code().name
        return details.rpartition(": ")[2] if "last error:" in details else details  # gRPC wraps the system's message
    return str(error)
