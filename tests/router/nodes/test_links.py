"""A router's link to one node: how its session ends, what is written to it, and what is said of it."""

import asyncio
import random
import socket
from typing import Any

import grpc.aio
import pytest

from baton import wire
from baton.address import HostPort
from baton.errors import NodeUnavailable
from baton.messages import Abort, AttemptId, Auth, End, Load, Subscribed, Tokens, Update
from baton.node_info import NodeRole
from baton.rpc.streams import EOF
from baton.rpc.trust import Trust
from baton.v1 import node_pb2
from router.nodes import links


class SlowCall:
    """A session's stream that takes no second message before it is told to."""

    def __init__(self) -> None:
        self.written: asyncio.Queue[list[str]] = asyncio.Queue()
        self.free = asyncio.Event()

    async def write(self, message: node_pb2.RouterMessage) -> None:
        parts = map(wire.read_router_message, wire.split_router_message(message))
        self.written.put_nowait([part.attempt_id.request_id for part in parts if isinstance(part, Abort)])
        await self.free.wait()


class NoMessages:
    """What a session's stream reads if the node sends bytes that are no message."""

    async def read(self) -> None:
        return None


class EndedCall:
    """A session's stream that the node has ended while the router wrote: gRPC tells once why, and then forgets it."""

    def add_done_callback(self, told: Any) -> None:
        told(self)

    async def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.ABORTED

    async def details(self) -> str:
        return "too many aborts"

    async def read(self) -> None:
        metadata = grpc.aio.Metadata()
        raise grpc.aio.AioRpcError(grpc.StatusCode.INTERNAL, metadata, metadata, "Internal error from Core", None)


class Losses:
    """A dispatcher that notes what nodes say, and why they are lost."""

    def __init__(self) -> None:
        self.reasons: list[str] = []
        self.heard: list[Any] = []

    def node_up(self, *_: object) -> None:
        pass

    def node_lost(self, _: str, reason: str) -> None:
        self.reasons.append(reason)

    def handle_node_message(self, _: str, message: object) -> None:
        self.heard.append(message)


async def test_why_a_node_ended_its_session_is_told_if_a_write_meets_the_end_too(nodes):
    node, losses = nodes.nodes[0], Losses()
    unused: Any = None
    told: Any = losses
    call: Any = EndedCall()
    link = links.NodeLink(node.port.address, NodeRole.PREFILL, 1, told, unused, lambda: None, Trust(), 20.0)
    assert await link._in_use(call, node.info) == "too many aborts"
    assert losses.reasons == ["too many aborts"]


async def test_bytes_of_a_node_that_are_no_message_end_its_session(nodes):
    unused: Any = None
    node = nodes.nodes[0]
    link = links.NodeLink(node.port.address, NodeRole.PREFILL, 1, unused, unused, unused, Trust(), 20.0)
    call: Any = NoMessages()
    assert await link._listen(call, node.info, asyncio.Queue()) == "its bytes are no message"


class Says:
    """What a session's stream reads from a node that says this and ends the session."""

    def __init__(self, *messages: wire.NodeToRouter | Auth) -> None:
        self.messages = [*map(wire.write_node_message, messages), EOF]

    async def read(self) -> Any:
        return self.messages.pop(0)

    async def write(self, message: node_pb2.RouterMessage) -> None:
        pass


@pytest.mark.parametrize(("num_waiting", "says_"), [(2, "it ended the session"), (3, "it does not read")])
async def test_a_node_that_lets_what_it_is_told_wait_is_lost(nodes, monkeypatch, num_waiting, says_):
    """Its load comes as before."""
    monkeypatch.setattr(links, "MAX_UNREAD", 2)
    unused: Any = None
    told: Any = Losses()
    call: Any = Says(Load())
    node, outgoing = nodes.nodes[0], asyncio.Queue[Any]()
    link = links.NodeLink(node.port.address, NodeRole.PREFILL, 1, told, unused, unused, Trust(), 20.0)
    for number in range(num_waiting):
        outgoing.put_nowait(Abort(AttemptId(1, str(number), 0), (), 5.0))
    assert await link._listen(call, node.info, outgoing) == says_


async def test_a_node_that_takes_connections_and_says_nothing_gives_no_answer(monkeypatch):
    monkeypatch.setattr(links, "DESCRIBE_TIMEOUT_S", 0.1)
    unused: Any = None
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = HostPort("127.0.0.1", silent.getsockname()[1])
        link = links.NodeLink(address, NodeRole.PREFILL, 1, unused, unused, unused, Trust(), 20.0)
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await link._connect_once()
    assert links._reason(error.value) == "no answer"


@pytest.mark.parametrize("says_", [[], [Subscribed("another")], [Load()]])
async def test_a_session_that_is_not_confirmed_is_none(nodes, says_):
    unused: Any = None
    node = nodes.nodes[0]
    call: Any = Says(*says_)
    link = links.NodeLink(node.port.address, NodeRole.PREFILL, 1, unused, unused, unused, Trust(), 20.0)
    with pytest.raises(NodeUnavailable, match="did not confirm the subscription"):
        await link._subscribe(call, node.info)


async def test_of_what_no_node_says_in_a_session_nothing_counts(nodes):
    """Nor does a token that its vocabulary does not have: its attempt ends alone."""
    unused: Any = None
    losses, node, attempt_id = Losses(), nodes.nodes[0], AttemptId(1, "r", 0)
    told: Any = losses
    tokens = [Update(attempt_id, Tokens(0, 0, (node.info.vocab_size - more,))) for more in (1, 0)]
    call: Any = Says(Subscribed("again"), tuple(tokens))
    link = links.NodeLink(node.port.address, NodeRole.PREFILL, 1, told, unused, unused, Trust(), 20.0)
    assert await link._listen(call, node.info, asyncio.Queue()) == "it ended the session"
    ((well, wrong),) = losses.heard
    assert well == tokens[0]
    assert isinstance(wrong.kind, End)


class Away(links.NodeLink):
    """To a node that is there at times, and to be given up in the end."""

    def __init__(self, comes: list[bool]) -> None:
        unused: Any = None
        super().__init__(HostPort("a", 1), NodeRole.PREFILL, 1, unused, unused, lambda: None, Trust(), 20.0)
        self._comes = comes

    async def _connect_once(self) -> None:
        was_up = self._comes.pop(0)
        self.draining = not self._comes
        raise links._SessionLost("reset") if was_up else NodeUnavailable("away")


async def test_a_node_that_stays_away_is_tried_less_and_less_often_and_one_that_was_there_soon(monkeypatch):
    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    monkeypatch.setattr(random, "uniform", lambda least, most: most)
    link = Away([False] * 6 + [True, False, False])
    await link.run()
    assert pauses == [0.2, 0.4, 0.8, 1.6, 2.0, 2.0, 0.1, 0.2]
    assert link.problem == "away"


def test_a_lost_connection_to_a_node_is_told_in_plain_words():
    metadata = grpc.aio.Metadata()
    error = grpc.aio.AioRpcError(grpc.StatusCode.INTERNAL, metadata, metadata, "Internal error from Core", "")
    assert links._reason(error) == "the connection was lost"


MESSAGES = [Abort(AttemptId(1, name, 0), (), 5.0) for name in "abcd"]
SIZE = wire.write_router_message(MESSAGES[0]).ByteSize()


@pytest.mark.parametrize(
    ("enough_bytes", "rest"),
    [(2**20, [["b", "c", "d"]]), (SIZE + 1, [["b", "c"], ["d"]]), (1, [["b"], ["c"], ["d"]])],
)
async def test_what_comes_while_a_message_is_written_follows_as_one(monkeypatch, enough_bytes, rest):
    monkeypatch.setattr(links, "_ENOUGH_BYTES", enough_bytes)
    call, outgoing, (first, *others) = SlowCall(), asyncio.Queue[Any](), MESSAGES
    writing = asyncio.create_task(links._write(call, outgoing))  # type: ignore[arg-type]  # all that it uses
    async with asyncio.timeout(20):
        outgoing.put_nowait(first)
        assert await call.written.get() == ["a"]
        for message in others:
            outgoing.put_nowait(message)
        call.free.set()
        assert [await call.written.get() for _ in rest] == rest
    writing.cancel()
