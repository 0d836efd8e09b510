"""HTTP bodies and bytes that no client would send: each is answered, or its connection closed."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from random import Random

import httpx
import pytest

from tests.fuzz.mutations import wrong_bytes, wrong_json
from tests.fuzz.served import AT_ONCE, BODIES, CASE_S, SHARES, answers_as_ever, no_mistakes, serving, some_at_once

ALLOWED = frozenset((200, 400, 404, 405, 408, 411, 413, 414, 415, 422, 429, 431, 501, 504, 505))
"""What may be said of a request; 500 and 503 would be ours."""
NUM_BODIES = {
    "/v1/chat/completions": 600,
    "/v1/completions": 700,
    "/inference/v1/generate": 150,
    "/generate": 150,
    "/v1/chat/completions/render": 120,
    "/v1/completions/render": 160,
    "/v1/responses": 250,
    "/v1/responses/input_tokens": 150,
    "/v1/messages": 250,
    "/v1/messages/count_tokens": 200,
    "/tokenize": 300,
    "/detokenize": 300,
}
NUM_RAW = 900
ANSWER_S = 0.05
"""For an answer to begin. What is no whole request gets none before the client ends it."""
STATUS = re.compile(rb"HTTP/1\.[01] (\d{3}) ")

REQUESTS = (
    b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n",
    b"HEAD /health HTTP/1.1\r\nhost: x\r\n\r\n",
    b"GET /v1/models/tiny?a=b HTTP/1.1\r\nhost: x\r\nx-request-id: 17\r\n\r\n",
    b'POST /tokenize HTTP/1.1\r\nhost: x\r\ncontent-length: 16\r\n\r\n{"prompt": "hi"}',
    b'POST /tokenize HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n10\r\n{"prompt": "hi"}\r\n0\r\n\r\n',
    b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: 33\r\n\r\n"
    b'{"prompt": "hi", "stream": true} ',
    b"GET /health HTTP/1.1\r\nhost: x\r\n\r\nGET /ready HTTP/1.1\r\nhost: x\r\n\r\n"
    b"GET /none HTTP/1.1\r\nhost: x\r\n\r\n",
    b"GET /health HTTP/1.1\r\nhost: x\r\nupgrade: websocket\r\nconnection: upgrade\r\n"
    b"sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\nsec-websocket-version: 13\r\n\r\n",
    b"OPTIONS * HTTP/1.1\r\nhost: x\r\norigin: http://evil\r\naccess-control-request-method: POST\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
)


@pytest.mark.parametrize("path", BODIES)
@SHARES
async def test_bodies(share: int, path: str, caplog: pytest.LogCaptureFixture) -> None:
    statuses = Counter[int]()
    limits = httpx.Limits(max_connections=AT_ONCE)
    async with serving() as router, httpx.AsyncClient(base_url=router.http, timeout=CASE_S, limits=limits) as client:

        async def one(number: int) -> None:
            body = wrong_json(Random(f"{path} {number}"), BODIES[path])
            answer = await client.post(path, content=body)
            statuses[answer.status_code] += 1
            what = f"case {number}: {body[:300]!r}: {answer.status_code} {answer.text[:300]}"
            assert answer.status_code in ALLOWED, what
            assert '"internal"' not in answer.text, what
            if answer.status_code >= 400:
                fields = {"message", "type"} if "messages" in path else {"message", "type", "param", "code"}
                assert set(answer.json()["error"]) == fields, what

        await some_at_once(one, NUM_BODIES[path] // share)
        await answers_as_ever(client)
        await router.idle()
    assert statuses[400] > 100 / share
    assert statuses[200] > 10 / share, "no longer near a valid request"
    no_mistakes(caplog)


@SHARES
async def test_bytes(share: int, caplog: pytest.LogCaptureFixture) -> None:
    statuses = Counter[int]()
    async with serving() as router, httpx.AsyncClient(base_url=router.http, timeout=CASE_S) as client:
        address = router.server.http_address

        async def one(number: int) -> None:
            random = Random(f"bytes {number}")
            sent = wrong_bytes(random, random.choice(REQUESTS))
            async with asyncio.timeout(CASE_S):
                reader, writer = await asyncio.open_connection(address.host, address.port)
                try:
                    got = await _answers(reader, writer, sent)
                finally:
                    writer.transport.abort()
            found = [int(status) for status in STATUS.findall(got)]
            statuses.update(found)
            assert set(found) <= {*ALLOWED, 100, 426}, f"case {number}: {sent!r}: {got[:300]!r}"

        await some_at_once(one, NUM_RAW // share)
        await answers_as_ever(client)
        await router.idle()
    assert min(statuses[200], statuses[400]) > 20
    no_mistakes(caplog)


async def _answers(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, sent: bytes) -> bytes:
    """All that comes until the other side closes, which it does after our end."""
    got = b""
    try:
        writer.write(sent)
        try:
            async with asyncio.timeout(ANSWER_S):
                got = await reader.read(65536)
        except TimeoutError:
            pass
        writer.write_eof()
        while piece := await reader.read(65536):
            got += piece
    except (ConnectionError, BrokenPipeError):
        pass  # it was hung up on
    return got
