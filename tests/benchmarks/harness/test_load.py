"""An answer counts if it has all of its tokens."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator

import pytest

from baton.address import HostPort
from benchmarks.harness.http_stream import RequestFailed
from benchmarks.harness.load import Load, Prompts


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Two tokens in one event, however many are asked for."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = next(line for line in head.split(b"\r\n") if line.startswith(b"content-length"))
    await reader.readexactly(int(length.partition(b":")[2]))
    event = b"data: " + json.dumps({"choices": [{"token_ids": [5, 6], "text": "ab"}]}).encode() + b"\n\n"
    writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(event), event))
    await writer.drain()
    writer.close()


@pytest.fixture
async def address() -> AsyncIterator[HostPort]:
    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        yield HostPort("127.0.0.1", server.sockets[0].getsockname()[1])


async def test_an_answer_that_ends_early_fails(address: HostPort) -> None:
    prompts = Prompts([7, 8, 9], seed=0)
    assert (await Load(address, prompts, 3, 2).one()).tokens == [5, 6]
    longer = Load(address, prompts, 3, 4)
    for send in (lambda: longer.many(1, 1), lambda: longer.arriving(1, 1e3, 0)):
        with pytest.raises(ExceptionGroup) as failed:
            await send()
        (error,) = failed.value.exceptions
        assert isinstance(error, RequestFailed)
        assert str(error) == "an answer ended with 2 of 4 tokens"


async def test_a_client_that_falls_behind_says_by_how_much(address: HostPort) -> None:
    """Latencies count from when a request is sent; a client that is busy sends it late."""
    load, busy_s = Load(address, Prompts([7, 8, 9], seed=0), 3, 2), 0.1
    sending = asyncio.create_task(load.arriving(3, 1e3, 0))
    asyncio.get_running_loop().call_soon(time.sleep, busy_s)
    answers = await sending
    assert max(answer.late_s for answer in answers) > busy_s / 2
    assert (await load.one()).late_s == 0
