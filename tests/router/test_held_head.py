"""The head of an answer goes out with what follows it, and alone if nothing does."""

import asyncio
from typing import Any

from router.http.held_head import HeldHead, flush_head, hold_head


class Cycle:
    """As much of uvicorn's as its transport sees."""

    def __init__(self) -> None:
        self.response_started = False
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


def held() -> Any:
    cycle: Any = Cycle()
    hold_head(cycle, asyncio.get_running_loop())
    cycle.response_started = True
    cycle.transport.write(b"head ")
    return cycle


async def test_the_head_and_what_follows_it_are_one_write():
    cycle = held()
    assert cycle.writes == []
    cycle.transport.write(b"body")
    assert cycle.writes == [b"head body"]
    cycle.transport.write(b"more")
    await asyncio.sleep(0)
    assert cycle.writes == [b"head body", b"more"]
    assert isinstance(cycle.transport, Transport)  # nothing stands between any more


async def test_a_head_without_a_body_waits_for_one_turn_of_the_loop():
    cycle = held()
    await asyncio.sleep(0)
    assert cycle.writes == [b"head "]


async def test_a_head_goes_out_before_its_connection_closes():
    cycle = held()
    transport = cycle.transport
    transport.close()
    assert cycle.writes == [b"head "]
    assert transport.is_closing()


async def test_a_complete_answer_holds_nothing_back():
    cycle = held()
    flush_head(cycle)
    flush_head(cycle)
    assert cycle.writes == [b"head "]


async def test_what_comes_before_the_head_is_not_held():
    cycle: Any = Cycle()
    hold_head(cycle, asyncio.get_running_loop())
    cycle.transport.write(b"HTTP/1.1 100 Continue")
    assert cycle.writes == [b"HTTP/1.1 100 Continue"]
    assert isinstance(cycle.transport, HeldHead)
