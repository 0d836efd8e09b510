"""The head of an answer goes out with what follows it, and alone if nothing does; pieces of its body go straight on."""

import asyncio
from types import SimpleNamespace
from typing import Any

from router.http.body_writer import BodyWriter, body_writer_of


class Cycle:
    """As much of uvicorn's as its writer sees."""

    def __init__(self) -> None:
        self.flow = SimpleNamespace(write_paused=False)
        self.scope: dict[str, Any] = {}
        self.transport: Any = Transport()
        self.writes: list[bytes] = self.transport.writes


class Transport:
    def __init__(self) -> None:
        self.writes: list[bytes] = []
        self.closed_after = -1

    def write(self, data: bytes) -> None:
        self.writes.append(data)

    def close(self) -> None:
        self.closed_after = len(self.writes)

    def is_closing(self) -> bool:
        return self.closed_after >= 0


def begun() -> Any:
    """An answer whose head has come."""
    cycle: Any = Cycle()
    BodyWriter(cycle, asyncio.get_running_loop(), cycle.transport.close)
    cycle.transport.write(b"head ")
    return cycle


async def test_the_head_and_what_follows_it_are_one_write():
    cycle = begun()
    assert cycle.writes == []
    cycle.transport.write(b"body")
    assert cycle.writes == [b"head body"]
    cycle.transport.write(b"more")
    await asyncio.sleep(0)
    assert cycle.writes == [b"head body", b"more"]


async def test_a_piece_of_the_body_follows_the_head_likewise():
    cycle = begun()
    writer = body_writer_of(cycle.scope)
    assert writer is cycle.transport
    writer.write_piece(b"piece of body")
    writer.write_piece(b"more")
    await asyncio.sleep(0)
    assert cycle.writes == [b"head d\r\npiece of body\r\n", b"4\r\nmore\r\n"]
    writer.left()
    writer.write_piece(b"nobody is there")
    assert len(cycle.writes) == 2


async def test_a_head_without_a_body_waits_for_one_turn_of_the_loop():
    cycle = begun()
    await asyncio.sleep(0)
    assert cycle.writes == [b"head "]


async def test_a_head_goes_out_before_its_connection_closes():
    cycle = begun()
    cycle.transport.close()
    assert cycle.writes == [b"head "]
    assert cycle.transport.is_closing()


async def test_a_complete_answer_holds_nothing_back():
    cycle = begun()
    cycle.transport.end()
    cycle.transport.flush()
    assert cycle.writes == [b"head "]


async def test_who_writes_is_told_that_the_client_reads_again_or_has_left_until_the_answer_is_complete():
    cycle, told = begun(), list[str]()
    writer = cycle.transport
    writer.on_resumed(lambda: told.append("resumed"))
    writer.on_left(lambda: told.append("left"))
    cycle.flow.write_paused = True
    assert writer.is_paused
    writer.resumed()
    writer.left()
    assert told == ["resumed", "left", "resumed"]
    assert not writer.is_paused
    writer.on_left(lambda: told.append("had left"))
    assert told[3:] == ["had left"]
    writer.end()
    writer.resumed()
    writer.left()
    assert len(told) == 4


async def test_what_comes_before_the_head_is_not_held():
    cycle: Any = Cycle()
    BodyWriter(cycle, asyncio.get_running_loop(), cycle.transport.close)
    cycle.transport.write(b"HTTP/1.1 100 Continue")
    assert cycle.writes == [b"HTTP/1.1 100 Continue"]
    cycle.transport.write(b"head ")
    assert len(cycle.writes) == 1
