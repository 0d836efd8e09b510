"""Streams write in turn, each once for all that has come; and what one token costs in function calls."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from baton import wire
from baton.messages import Adopted, End, HandedOff, Load, Prefill, SampleEnd, Started, Tokens, Update
from baton.node_info import NodeRole
from baton.sampling import FinishReason, SamplingParams
from baton.telemetry import ROUTER, RouterMetrics, new_registry
from router.deliveries import SLICE_S, Deliveries
from router.generation import Generation, Part
from router.http.body_writer import BodyWriter
from router.http.chunks import ChunkEvents
from router.http.event_stream import EventStream
from router.http.shapes import ChatShape
from router.nodes.dispatcher import Dispatcher
from router.request_metrics import RequestMetrics
from router.requests.admission import Admission
from router.requests.core import RouterCore
from router.requests.request_state import RoutedRequest
from router.text.answer import Answer, Delta
from router.text.stops import StopScanner, StopStrings
from tests.router.rig import info
from tests.router.tiny_tokenizer import tiny_tokenizer

CALLS_PER_TOKEN = 78
"""Of Python and C functions, from the wire to the connection; 68 when this was written."""
ATTENTION_S = 60.0


class Connection:
    """In place of a BodyWriter."""

    def __init__(self) -> None:
        self.is_paused = False
        self.pieces: list[bytes] = []
        self.resume: Callable[[], None] = lambda: None

    def on_resumed(self, call: Callable[[], None]) -> None:
        self.resume = call

    def write_piece(self, piece: bytes) -> None:
        self.pieces.append(piece)

    @property
    def num_chunks(self) -> int:
        return sum(piece.count(b"data: ") for piece in self.pieces)


class Streams:
    """Some streams that flow from a decode node to connections."""

    def __init__(self) -> None:
        sent: list[Any] = []
        core = RouterCore(1)
        self.dispatcher = Dispatcher(core, RequestMetrics(RouterMetrics(new_registry(ROUTER)), lambda: "m"))
        for name, role in (("p", NodeRole.PREFILL), ("d", NodeRole.DECODE)):
            self.dispatcher.node_up(info(name, role), sent.append)
            self.dispatcher.handle_node_message(name, Load())
        self.sent = sent
        self.deliveries = Deliveries()
        self.connections: list[Connection] = []
        self.streams: list[EventStream] = []
        self.tasks: list[asyncio.Task[None]] = []
        self.attention_s = ATTENTION_S
        self.events = ChunkEvents
        self.connect: Callable[[], Any] = Connection

    async def open(self, count: int) -> None:
        for number in range(count):
            answer = Answer(0, tiny_tokenizer().detokenizer(), StopScanner(StopStrings(())), frozenset())
            request = RoutedRequest(f"r{number}", (1, 2), 1, SamplingParams(max_tokens=1000), 60.0)
            admitted = Admission().admit(1, 2)
            generation = Generation(f"r{number}", self.dispatcher, [Part(request, [answer])], admitted, self.deliveries)
            await generation.start(time.monotonic())
            self.dispatcher.handle_node_message(
                "p", self.updates(Started(0, 0.0), Tokens(0, 0, (300,)), HandedOff(0.0))[-3:]
            )
            self.dispatcher.handle_node_message("d", self.updates(Adopted(0.0, 0, 0))[-1:])
            model: Any = type("Model", (), {"name": "m"})
            connection = self.connect()
            self.connections.append(connection)
            shape = ChatShape(generation.request_id, model, None, None)
            stream = EventStream(generation, self.events(generation, shape, None), connection)
            self.streams.append(stream)
            self.tasks.append(asyncio.create_task(stream.run(await generation.next(), self.attention_s)))
        await asyncio.sleep(0)

    def updates(self, *kinds: Any) -> tuple[Update, ...]:
        prefills = [message for message in self.sent if isinstance(message, Prefill)]
        return tuple(Update(prefill.attempt_id, kind) for prefill in prefills for kind in kinds)

    def step(self, index: int) -> None:
        """A token to each stream, as it comes over the wire."""
        message = wire.write_node_message(self.updates(Tokens(0, index, (300 + index % 50,))))
        self.dispatcher.handle_node_message("d", wire.read_node_message(message))  # type: ignore[arg-type]  # updates

    async def close(self) -> None:
        self.dispatcher.close()
        await asyncio.gather(*self.tasks, return_exceptions=True)


@pytest.fixture
async def streams(monkeypatch):
    monkeypatch.setattr("router.deliveries.SLICE_S", 60.0)  # however slow the machine, all write in one slice
    streams = Streams()
    yield streams
    await streams.close()


async def test_tokens_that_wait_for_their_turn_are_one_chunk(streams):
    await streams.open(2)
    assert [connection.num_chunks for connection in streams.connections] == [1, 1]
    for index in range(1, 6):
        streams.step(index)
    await asyncio.sleep(0)
    expected = "".join(tiny_tokenizer().decode([300 + index]) for index in range(1, 6))
    for connection in streams.connections:
        assert connection.num_chunks == 2
        assert f'"content":"{expected}"' in connection.pieces[-1].decode()


async def test_a_client_that_does_not_read_gets_all_when_it_does(streams):
    await streams.open(1)
    (connection,) = streams.connections
    connection.is_paused = True
    for index in range(1, 4):
        streams.step(index)
        await asyncio.sleep(0)
    assert connection.num_chunks == 1
    connection.is_paused = False
    connection.resume()
    await asyncio.sleep(0)
    assert connection.num_chunks == 2


async def test_a_client_that_leaves_what_is_complete_unread_ends_its_stream(streams):
    flow, transport = SimpleNamespace(write_paused=True), SimpleNamespace(write=lambda data: None, close=None)
    cycle: Any = SimpleNamespace(flow=flow, transport=transport, scope={})
    streams.connect = lambda: BodyWriter(cycle, asyncio.get_running_loop(), cycle.transport.close)
    await streams.open(1)
    (writer,) = streams.connections
    streams.dispatcher.handle_node_message(
        "d", streams.updates(Tokens(0, 1, (301,)), SampleEnd(0, FinishReason.LENGTH), End())
    )
    await asyncio.sleep(0)
    assert not streams.tasks[0].done()
    writer.left()
    async with asyncio.timeout(10):
        await asyncio.gather(*streams.tasks)


class Texts(ChunkEvents):
    """Events that are texts. OpenAI's keep the last one of all answers until the end."""

    def __init__(self) -> None:
        pass

    def delta(self, delta: Delta) -> bytes:
        return delta.text.encode()


async def test_the_last_text_is_left_for_the_write_with_the_tail(streams):
    await streams.open(1)
    (connection,), (stream,) = streams.connections, streams.streams
    before = list(connection.pieces)
    stream._shape = Texts()
    kinds = Tokens(0, 1, (301,)), Tokens(0, 2, (302,)), SampleEnd(0, FinishReason.LENGTH), End()
    streams.dispatcher.handle_node_message("d", streams.updates(*kinds))
    await asyncio.gather(*streams.tasks)
    assert connection.pieces == before
    assert stream.rest.decode() == tiny_tokenizer().decode([301, 302])


async def test_a_silent_stream_shows_signs_of_life_again_and_again(streams):
    streams.attention_s = 0.002
    await streams.open(1)
    (connection,), shown = streams.connections, asyncio.Event()

    def write(piece: bytes) -> None:
        connection.pieces.append(piece)
        if connection.pieces.count(ChunkEvents.keep_alive) == 3:
            shown.set()

    connection.write_piece = write
    async with asyncio.timeout(10):
        await shown.wait()


class Held(ChunkEvents):
    """Events of which none goes out before the end, like the chunk of an answer that came at once."""

    def delta(self, delta: Delta) -> bytes:
        return b""


async def test_a_stream_that_has_just_begun_shows_no_sign_of_life(streams):
    streams.events = Held
    await streams.open(1)
    for _ in range(3):  # a timer that is due fires meanwhile
        await asyncio.sleep(0)
    (connection,) = streams.connections
    assert connection.pieces == []


async def test_streams_write_in_slices_and_the_loop_goes_on_between_them():
    deliveries, order = Deliveries(), list[str]()

    def slow(name: str) -> None:
        order.append(name)
        until = time.monotonic() + SLICE_S
        while time.monotonic() < until:
            pass

    for name in ("first", "second"):
        deliveries.add(partial(slow, name))
    await asyncio.sleep(0)
    order.append("the loop")
    await asyncio.sleep(0)
    assert order == ["first", "the loop", "second"]


async def test_who_has_its_turn_ahead_has_it_once_unless_it_leaves():
    deliveries, order = Deliveries(), list[str]()
    stays, leaves = partial(order.append, "stays"), partial(order.append, "leaves")
    for deliver in (stays, leaves, stays):
        deliveries.add(deliver)
    deliveries.discard(leaves)
    deliveries.discard(leaves)
    await asyncio.sleep(0)
    assert order == ["stays"]


async def test_a_token_takes_few_calls(streams):
    await streams.open(20)
    num_steps, num_calls = 20, 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal num_calls
        num_calls += event in ("call", "c_call")

    for index in range(1, 4):
        streams.step(index)
    await asyncio.sleep(0)
    messages = [streams.updates(Tokens(0, index, (310,))) for index in range(4, 4 + num_steps)]
    wires = [wire.write_node_message(updates) for updates in messages]
    sys.setprofile(count)
    try:
        for message in wires:
            streams.dispatcher.handle_node_message("d", wire.read_node_message(message))
            streams.deliveries._run()
    finally:
        sys.setprofile(None)
    assert all(connection.num_chunks == 2 + num_steps for connection in streams.connections)
    assert num_calls / num_steps / 20 <= CALLS_PER_TOKEN, num_calls / num_steps / 20
