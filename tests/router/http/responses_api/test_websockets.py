"""Responses and chats over WebSockets: OpenAI's client, a plain one, and clients that do what they should not."""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from pydantic import SecretStr
from starlette.types import Receive, Scope, Send

from baton.errors import Overloaded
from router.http.limits import Bodies, WebSockets
from tests.router.conftest import Router, on_shared_loop, says
from tests.router.fake_node import PATIENCE_S, Answer
from tests.router.http.responses_api.shapes import HI
from tests.router.http.test_access import bearer, running
from tests.router.http_shapes import CHAT
from tests.router.http_wire import echo, peer, serving

websockets = pytest.importorskip("websockets", reason="OpenAI's client needs it for this, and so does the router")

pytestmark = on_shared_loop

HANDSHAKE = (
    b"GET / HTTP/1.1\r\nhost: x\r\nupgrade: websocket\r\nconnection: upgrade\r\n"
    b"sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\nsec-websocket-version: 13\r\n\r\n"
)
CREATE = {"type": "response.create", **HI}


@asynccontextmanager
async def socket(router: Router, path: str = "/v1/responses", **more: Any) -> AsyncIterator[Any]:
    async with (
        asyncio.timeout(PATIENCE_S),
        websockets.connect(f"ws://{router.server.http_address}{path}", **more) as websocket,
    ):
        yield websocket


async def say(websocket: Any, **fields: Any) -> None:
    await websocket.send(json.dumps(fields))


async def hear(websocket: Any) -> dict[str, Any]:
    return json.loads(await websocket.recv())


async def response_of(websocket: Any) -> list[dict[str, Any]]:
    """The events of one response."""
    events = [await hear(websocket)]
    while events[-1]["type"] not in ("response.completed", "response.incomplete", "response.failed", "error"):
        events.append(await hear(websocket))
    return events


# ---- responses ----


async def test_openais_client_gets_one_response_after_another(official):
    async with asyncio.timeout(PATIENCE_S), official.responses.connect() as connection:
        previous = None
        for _ in range(2):
            more = {"previous_response_id": previous} if previous else {}
            await connection.response.create(model="tiny", input="hi", **more)
            text = ""
            async for event in connection:
                if event.type == "response.output_text.delta":
                    text += event.delta
                if event.type == "response.completed":
                    break
            assert (text, event.response.output_text) == ("hello world", "hello world")
            assert event.response.previous_response_id == previous
            previous = event.response.id
        assert (await official.responses.retrieve(previous)).output_text == "hello world"
        await connection.response.create(model="other", input="hi")
        error = await connection.recv()
        assert (error.type, error.status, error.error.code) == ("error", 404, "model_not_found")


async def test_events_are_those_of_a_stream(router, client):
    async with socket(router) as websocket:
        await say(websocket, **CREATE)
        events = await response_of(websocket)
    text = (await client.post("/v1/responses", json={**HI, "stream": True})).text
    streamed = [json.loads(line[6:]) for line in text.split("\n") if line.startswith("data: ")]
    kinds = [[event["type"] for event in one if not event["type"].endswith(".delta")] for one in (events, streamed)]
    assert kinds[0] == kinds[1]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))


async def test_mistakes_leave_the_socket_open(router, nodes):
    async with socket(router) as websocket:
        for message, param, text in (
            ("{", None, "not valid JSON"),
            ("[]", None, "must be a JSON object"),
            (json.dumps(HI), "type", "unknown"),
            (json.dumps({**CREATE, "type": "response.steer"}), "type", "'response.steer' is not supported"),
            (json.dumps({**CREATE, "stream": False}), "stream", "everything is streamed"),
            (json.dumps({**CREATE, "stream_id": "a"}), "stream_id", "`stream_id`"),
            (json.dumps({**CREATE, "background": True}), "background", "`background`"),
        ):
            await websocket.send(message)
            error = await hear(websocket)
            assert (error["type"], error["status"], error["error"]["param"]) == ("error", 400, param)
            assert text in error["error"]["message"]
        nodes.script = lambda prefill: Answer(error=Overloaded("full"))
        await say(websocket, **CREATE)
        assert (await hear(websocket))["status"] == 429
        nodes.script = says("hello world")
        await websocket.send(json.dumps(CREATE).encode())  # binary
        assert (await response_of(websocket))[-1]["type"] == "response.completed"


async def test_a_socket_remembers_its_last_response_that_is_not_stored(router, nodes):
    async with socket(router) as websocket:
        ids = []
        for _ in range(2):
            await say(websocket, **CREATE, store=False)
            ids.append((await response_of(websocket))[-1]["response"]["id"])
        await say(websocket, **CREATE, store=False, previous_response_id=ids[0])
        assert (await hear(websocket))["error"]["code"] == "previous_response_not_found"
        await say(websocket, **CREATE, previous_response_id=ids[1])
        assert (await response_of(websocket))[-1]["type"] == "response.completed"
    assert len(nodes.prefills[-1].prompt_tokens) > len(nodes.prefills[0].prompt_tokens)
    async with socket(router) as websocket:
        await say(websocket, **CREATE, previous_response_id=ids[1])
        assert (await hear(websocket))["error"]["code"] == "previous_response_not_found"


async def test_a_failure_in_mid_stream_fails_the_response(router, nodes):
    nodes.script = says("hello world, hello there", hold=asyncio.Event(), hold_at=2)
    async with socket(router) as websocket:
        await say(websocket, **CREATE, timeout=1)
        assert (await response_of(websocket))[-1]["type"] == "response.failed"


# ---- chats ----


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/ws/chat"])
async def test_a_chat_is_the_chunks_of_its_stream(router, nodes, path):
    async with socket(router, path) as websocket:
        for _ in range(2):
            await say(websocket, **CHAT, stream_options={"include_usage": True})
            chunks = []
            while (message := await websocket.recv()) != "[DONE]":
                chunks.append(json.loads(message))
            assert "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks[:-1]) == "hello world"
            assert chunks[-1]["usage"]["completion_tokens"] > 0
        await say(websocket, **CHAT, n=0)
        assert (await hear(websocket))["error"]["param"] == "n"


async def test_an_error_ends_a_chat_and_nothing_of_it_comes_with_the_next_one(router, nodes):
    script, nodes.script = nodes.script, says("hello world, hello there", hold=asyncio.Event(), hold_at=2)
    async with socket(router, "/ws/chat") as websocket:
        await say(websocket, **CHAT, timeout=1)
        while "error" not in (failed := await hear(websocket)):
            pass
        nodes.script = script
        await say(websocket, **CHAT)
        assert (failed["error"]["code"], "choices" in await hear(websocket)) == ("deadline_exceeded", True)


# ---- limits ----


@pytest.mark.parametrize("hold_at", [0, 2])
async def test_a_client_that_leaves_cancels_its_response(router, nodes, hold_at):
    nodes.script = says("hello world, hello there", hold=asyncio.Event(), hold_at=hold_at)
    async with socket(router) as websocket:
        await say(websocket, **CREATE)
        await nodes.until(lambda: nodes.prefills)
        websocket.transport.abort()
        await nodes.until(lambda: nodes.aborts)
        await router.idle()


async def test_requests_wait_for_each_other_but_few_of_them(router, nodes):
    hold = asyncio.Event()
    nodes.script = says("hello world", hold=hold)
    async with socket(router) as websocket:
        for _ in range(3):
            await say(websocket, **CREATE)
        await nodes.until(lambda: nodes.prefills)
        assert len(nodes.prefills) == 1
        hold.set()
        ids = [(await response_of(websocket))[-1]["response"]["id"] for _ in range(3)]
        assert len(set(ids)) == 3
        nodes.script = says("hello world", hold=asyncio.Event())
        await say(websocket, **CREATE)
        await nodes.until(lambda: len(nodes.prefills) == 4)
        for _ in range(5):
            await say(websocket, **CREATE)
        await nodes.until(lambda: nodes.aborts)
        await websocket.wait_closed()
        assert websocket.close_code == 1008
    await router.idle()


async def test_requests_that_wait_take_room_of_bodies(nodes):
    async with running(nodes, max_body_bytes=2048, max_buffered_body_bytes=3000) as (router, _):
        nodes.script = says("hello world", hold=asyncio.Event())
        long = {**CREATE, "metadata": {"a": "x" * 500, "b": "x" * 500, "c": "x" * 500}}
        async with socket(router) as websocket:
            await say(websocket, **CREATE)
            await nodes.until(lambda: nodes.prefills)
            await say(websocket, **long)
            await (await websocket.ping())  # the router has taken it
            await say(websocket, **long)
            await websocket.wait_closed()
            assert websocket.close_code == 1013
        await router.idle()
        nodes.script = says("hello world")
        async with socket(router) as websocket:
            for _ in range(3):
                await say(websocket, **long)
                assert (await response_of(websocket))[-1]["type"] == "response.completed"


async def test_an_idle_socket_is_closed(nodes):
    async with running(nodes, websocket_idle_timeout=0.2) as (router, _), socket(router) as websocket:
        await say(websocket, **CREATE)
        assert (await response_of(websocket))[-1]["type"] == "response.completed"
        await websocket.wait_closed()
        assert (websocket.close_code, websocket.close_reason) == (1000, "no request for 0.2 s")


async def test_a_socket_is_not_idle_because_the_router_does_not_run(nodes):
    async with running(nodes, websocket_idle_timeout=0.4) as (router, _), socket(router) as websocket:
        for stands_still_s in (0.0, 0.5):
            await say(websocket, **CREATE)
            time.sleep(stands_still_s)  # noqa: ASYNC251 - nothing else runs, router or client
            assert (await response_of(websocket))[-1]["type"] == "response.completed"


async def test_a_message_is_as_large_as_a_body_may_be(nodes):
    async with running(nodes, max_body_bytes=2048, max_buffered_body_bytes=3000) as (router, _):
        for size, code in ((2048, None), (2049, 1009)):
            async with socket(router) as websocket:
                await websocket.send("x" * size)
                if code is None:
                    assert (await hear(websocket))["error"]["message"].startswith("The request body is not valid JSON")
                else:
                    await websocket.wait_closed()
                assert websocket.close_code == code
        async with socket(router) as first, socket(router) as second:
            begun = asyncio.Event()
            sending = asyncio.create_task(first.send(_endless("x" * 1900, begun)))
            await begun.wait()
            await (await first.ping())  # what the first has sent has come
            await second.send("x" * 1900)
            await second.wait_closed()
            assert second.close_code == 1013
            sending.cancel()


async def _endless(text: str, begun: asyncio.Event) -> AsyncIterator[str]:
    """A message that begins with this. `begun`: that is written."""
    yield text
    begun.set()
    await asyncio.Event().wait()


async def test_a_client_that_does_not_read_is_cut_off():
    ended = asyncio.Event()

    async def flood(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "websocket.accept"})
        with contextlib.suppress(OSError):
            while True:
                await send({"type": "websocket.send", "text": "x" * 65_536})
        ended.set()

    sockets = WebSockets(frozenset({"/"}), Bodies(1024, 1024))
    async with serving(flood, websockets=sockets, write_timeout_s=0.2) as port, peer(port) as client:
        await client.send(HANDSHAKE)
        async with asyncio.timeout(PATIENCE_S):
            await ended.wait()


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (HANDSHAKE.replace(b"GET", b"POST"), 400),
        (HANDSHAKE.replace(b"version: 13", b"version: 12"), 400),
        (HANDSHAKE.replace(b"dGhlIHNhbXBsZSBub25jZQ==", b"x"), 400),
        (HANDSHAKE.replace(b"host: x\r\n", b"host: x\r\n" + b"".join(b"a%d: x\r\n" % i for i in range(200))), None),
        (HANDSHAKE.replace(b"host: x\r\n", b"host: x\r\ncontent-length: 3\r\n"), None),
    ],
)
async def test_what_is_no_handshake_ends_the_connection(head, status):
    sockets = WebSockets(frozenset({"/"}), Bodies(1024, 1024))
    async with serving(echo, websockets=sockets) as port, peer(port) as client:
        await client.send(head)
        answer = await client.rest()
        assert answer.startswith(b"HTTP/1.1 %d" % status) if status else answer == b""


async def test_a_request_that_is_still_answered_keeps_its_connection():
    release = asyncio.Event()

    async def slow(scope: Scope, receive: Receive, send: Send) -> None:
        await release.wait()

    sockets = WebSockets(frozenset({"/"}), Bodies(1024, 1024))
    async with serving(slow, websockets=sockets) as port, peer(port) as client:
        await client.send(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n" + HANDSHAKE)
        status, text = await client.refusal()
        release.set()
    assert (status, "cannot begin" in text) == (400, True)


async def test_keys_and_origins_are_checked_when_it_opens_and_keys_also_later(nodes, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("sk-file\n")
    async with running(nodes, api_key=(SecretStr("sk-one"),), api_key_file=keys) as (router, _):
        for headers, status in (
            ({}, 401),
            (bearer("sk-no"), 401),
            ({**bearer("sk-one"), "origin": "https://evil.example"}, 403),
        ):
            with pytest.raises(websockets.InvalidStatus) as refusal:
                async with socket(router, additional_headers=headers):
                    pass
            assert refusal.value.response.status_code == status
            assert set(json.loads(refusal.value.response.body)["error"]) == {"message", "type", "param", "code"}
        async with socket(router, additional_headers=bearer("sk-file")) as websocket:
            await say(websocket, **CREATE)
            made = (await response_of(websocket))[-1]["response"]["id"]
            async with socket(router, additional_headers=bearer("sk-one")) as other:
                await say(other, **CREATE, previous_response_id=made)
                assert (await hear(other))["error"]["code"] == "previous_response_not_found"
            keys.write_text("sk-other-key\n")
            router.server._edge.keys._next_look = 0.0
            await say(websocket, **CREATE)
            await websocket.wait_closed()
            assert websocket.close_code == 1008


async def test_web_pages_of_allowed_origins_may_open_it(nodes):
    async with running(nodes, allowed_origins=("https://chat.example",)) as (router, _):
        headers = {"origin": "https://chat.example"}
        async with socket(router, "/ws/chat", additional_headers=headers) as websocket:
            await say(websocket, **CHAT)
            assert (await hear(websocket))["object"] == "chat.completion.chunk"


async def test_there_is_none_at_other_paths(router):
    for path in ("/v1/completions", "/v1/responses/x", "/"):
        with pytest.raises(websockets.InvalidStatus) as refusal:
            async with socket(router, path):
                pass
        assert refusal.value.response.status_code == 400


async def test_a_server_that_stops_ends_the_response_first(nodes):
    hold = asyncio.Event()
    nodes.script = says("hello world", hold=hold, hold_at=1)
    router = Router(nodes, drain_timeout=10.0)
    await router.start()
    await router.ready()
    async with socket(router) as busy, socket(router) as idle:
        await say(busy, **CREATE)
        await hear(busy)
        stopping = asyncio.create_task(router.server.stop(asyncio.Event()))
        await idle.wait_closed()
        hold.set()
        assert (await response_of(busy))[-1]["type"] == "response.completed"
        await busy.wait_closed()
        assert (idle.close_code, busy.close_code) == (1012, 1012)
    await stopping
