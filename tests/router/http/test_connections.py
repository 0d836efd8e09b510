"""What one connection may take of the HTTP server, in bytes and in time, and how it is told."""

import asyncio
import logging
import socket

import pytest

from router.http.limits import ConnectionLimits
from router.http.server import HttpServer
from tests.router.http_wire import GET, HEADER, LOOPBACK, PATIENCE_S, echo, echoing, on_uvloop, peer, refuse, serving

# ---- sizes ----


@pytest.mark.parametrize(
    ("head", "filler", "status", "says"),
    [
        (b"GET / HTTP/1.1\r\n", HEADER, 431, "larger than 4096 bytes"),
        (b"GET / HTTP/1.1\r\nx-long: ", b"a" * 1000, 431, "larger than 4096 bytes"),
        (b"GET / HTTP/1.1\r\n", b"a:\r\n" * 100, 431, "larger than 4096 bytes"),
        (b"GET /", b"a" * 1000, 414, "address is longer"),
        (b"", b"\r\n" * 500, 431, "larger than 4096 bytes"),
        (b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n0\r\n", HEADER, 431, "larger"),  # trailers
        (b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n1;x=", b"a" * 1000, 431, "larger"),
    ],
)
@on_uvloop
async def test_a_head_without_end_is_refused_in_time(head, filler, status, says):
    async with echoing() as port, peer(port) as client:
        await client.send(head)
        await client.flood(filler * 20, 2**20)
        told, message = await client.refusal()
    assert (told, says in message) == (status, True), message


@on_uvloop
async def test_a_flood_of_headers_is_read_no_further_than_it_takes_to_say_why():
    async with echoing() as port, peer(port) as client:
        await client.send(b"GET / HTTP/1.1\r\n")
        flood = asyncio.create_task(client.flood(HEADER * 64, 2**40))
        assert (await client.answer())[0] == 431
        async with asyncio.timeout(PATIENCE_S):
            await flood


@on_uvloop
async def test_a_head_within_the_limit_passes_in_any_pieces():
    head = b"POST /abc HTTP/1.1\r\nhost: x\r\nx-long: " + b"a" * 3000 + b"\r\ncontent-length: 3\r\n\r\nxyz"
    async with echoing() as port, peer(port) as client:
        for i in range(0, len(head), 7):
            await client.send(head[i : i + 7])
        assert (await client.answer())[2] == b"/abc 3"
        await client.send(head)
        assert (await client.answer())[2] == b"/abc 3"


# ---- times ----


@on_uvloop
async def test_heads_bodies_and_idle_connections_have_their_time():
    async with serving(echo, header_timeout_s=0.2, body_timeout_s=0.2, idle_timeout_s=0.2) as port:
        async with peer(port) as client:
            await client.send(GET[:-2])
            assert await client.refusal() == (408, "The request's headers did not come within 0.2 s.")
        async with peer(port) as client:
            await client.send(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\nabc")
            assert await client.refusal() == (408, "The request's body did not come within 0.2 s.")
        async with peer(port) as client:
            await client.gone()  # never said anything
        async with peer(port) as client:
            await client.send(GET)
            assert (await client.answer())[0] == 200
            await client.send(b"\r\n")  # nothing, to HTTP
            await client.gone()


@on_uvloop
async def test_a_slow_drip_does_not_extend_the_time():
    async with serving(echo, header_timeout_s=0.3) as port, peer(port) as client:
        await client.send(b"GET / HTTP/1.1\r\n")
        began = asyncio.get_running_loop().time()
        answer = asyncio.create_task(client.refusal())
        while not answer.done() and asyncio.get_running_loop().time() - began < PATIENCE_S:
            await client.flood(b"a: b\r\n", 1)
            await asyncio.wait([answer], timeout=0.05)
        assert (await answer)[0] == 408


@on_uvloop
async def test_a_long_answer_is_no_slow_request():
    release = asyncio.Event()

    async def app(scope, receive, send):
        await release.wait()
        await echo(scope, receive, send)

    limits = {"header_timeout_s": 0.1, "body_timeout_s": 0.1, "idle_timeout_s": 0.1}
    async with serving(app, **limits) as port, peer(port) as client:
        await client.send(GET + GET[:-2])  # and half of the next, which may wait as long
        asyncio.get_running_loop().call_later(0.4, release.set)
        assert (await client.answer())[0] == 200
        assert (await client.refusal())[0] == 408


# ---- slow readers ----


@pytest.mark.parametrize("whole", [False, True])
@on_uvloop
async def test_who_does_not_read_is_cut_off(whole):
    left, sent = asyncio.Event(), 0

    async def app(scope, receive, send):
        nonlocal sent
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        if whole:
            await send({"type": "http.response.body", "body": bytes(32 * 2**20)})
        else:
            while not left.is_set() and sent < 2**30:
                await send({"type": "http.response.body", "body": bytes(65536), "more_body": True})
                sent += 65536
                if sent % 2**20 == 0:
                    await asyncio.sleep(0)

    async def run(scope, receive, send):
        watch = asyncio.create_task(leave(receive))
        await app(scope, receive, send)
        await watch

    async def leave(receive):
        while (await receive())["type"] != "http.disconnect":
            pass
        left.set()

    async with serving(run, write_timeout_s=0.3) as port, peer(port, receive_bytes=4096) as client:
        await client.send(GET)
        async with asyncio.timeout(PATIENCE_S):
            await left.wait()
        assert sent < 32 * 2**20  # the sockets' buffers and ours, not what the application would have said


@on_uvloop
async def test_who_reads_slowly_may_go_on():
    """For longer than the limit, and so slowly that nothing more goes to the socket meanwhile."""
    body, limit_s = bytes(16 * 2**20), 0.2
    reading = asyncio.Event()

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": [(b"connection", b"close")]})
        await send({"type": "http.response.body", "body": body})
        reading.set()

    async with serving(app, write_timeout_s=limit_s) as port:
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
            client.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(client, (LOOPBACK, port))
            await loop.sock_sendall(client, GET)
            await reading.wait()
            size, end = 0, loop.time() + 3 * limit_s
            async with asyncio.timeout(PATIENCE_S):
                while piece := await loop.sock_recv(client, 4096 if loop.time() < end else 2**20):
                    size += len(piece)
                    if loop.time() < end:
                        await asyncio.sleep(limit_s / 40)
    assert size > len(body)


@on_uvloop
async def test_an_answer_left_unread_keeps_no_connection_that_would_close():
    """So little that its writer was not paused."""
    answered = asyncio.Event()

    async def app(scope, receive, send):
        (connection,) = server.server_state.connections
        await send({"type": "http.response.start", "status": 200, "headers": [(b"connection", b"close")]})
        while not connection.transport.get_write_buffer_size():
            await send({"type": "http.response.body", "body": bytes(8192), "more_body": True})
            await asyncio.sleep(0)
        await send({"type": "http.response.body"})
        answered.set()

    listener = socket.create_server((LOOPBACK, 0))
    server = HttpServer(app, ConnectionLimits(write_timeout_s=0.2), drain_timeout_s=PATIENCE_S)
    serving = asyncio.create_task(server.serve([listener]))
    await server.up.wait()
    async with peer(listener.getsockname()[1], receive_bytes=4096) as client, asyncio.timeout(PATIENCE_S / 2):
        await client.send(GET)
        await answered.wait()
        assert server.server_state.connections
        while server.server_state.connections:  # noqa: ASYNC110 - uvicorn tells nobody
            await asyncio.sleep(0.01)
    server.stop()
    await serving


# ---- how many ----


@on_uvloop
async def test_connections_beyond_the_limit_are_told_so_with_one_line(caplog):
    async with serving(echo, max_connections=2) as port, peer(port) as first, peer(port) as second:
        for client in (first, second):
            await client.send(GET)
            assert (await client.answer())[0] == 200
        with caplog.at_level(logging.INFO):
            for _ in range(3):
                async with peer(port) as third:
                    assert (await third.refusal())[0] == 503
        assert [r.getMessage() for r in caplog.records] == ["all --max-connections=2 are in use refused=1"]
        first.close()
        async with asyncio.timeout(PATIENCE_S):
            while True:
                async with peer(port) as third:
                    await third.send(GET)
                    if (await third.answer())[0] == 200:
                        return


@on_uvloop
async def test_what_follows_a_request_in_one_piece_is_bounded():
    release = asyncio.Event()
    left = asyncio.Event()

    async def app(scope, receive, send):
        while (await receive())["type"] != "http.disconnect":
            pass
        left.set()

    async with serving(app) as port, peer(port) as client:
        await client.send(GET * 100)
        assert await client.refusal() == (400, "more than 64 requests at once on one connection")
        async with asyncio.timeout(PATIENCE_S):
            await left.wait()
    release.set()


@on_uvloop
async def test_a_client_that_leaves_ends_the_request_that_runs_though_another_waits():
    started, left = [], asyncio.Event()

    async def app(scope, receive, send):
        started.append(scope["path"])
        while (await receive())["type"] != "http.disconnect":
            pass
        left.set()

    async with serving(app) as port:
        async with peer(port) as client:
            await client.send(GET * 2)
        async with asyncio.timeout(PATIENCE_S):
            await left.wait()
        assert started == ["/a"]


@on_uvloop
async def test_requests_in_one_piece_are_answered_in_turn():
    async with echoing() as port, peer(port) as client:
        await client.send(b"".join(b"GET /%d HTTP/1.1\r\nhost: x\r\n\r\n" % i for i in range(20)))
        assert [(await client.answer())[2] for _ in range(20)] == [b"/%d 0" % i for i in range(20)]


# ---- answers before the end of the request ----


@on_uvloop
async def test_a_request_answered_early_may_end_and_the_next_come():
    async with serving(refuse) as port, peer(port) as client:
        await client.send(b"POST /a HTTP/1.1\r\nhost: x\r\ncontent-length: 100000\r\n\r\n")
        assert (await client.answer())[0] == 401
        await client.send(b"x" * 100_000 + GET)
        assert (await client.answer())[0] == 401


@pytest.mark.parametrize("head", [b"HTTP/1.1\r\nhost: x\r\nconnection: close", b"HTTP/1.0"])
@on_uvloop
async def test_who_closes_with_the_answer_gets_to_read_it_while_sending(head):
    """A connection that is closed before all has come is reset, and so is the answer that was not read yet."""
    async with serving(refuse) as port, peer(port) as client:
        await client.send(b"POST /a " + head + b"\r\ncontent-length: 9999999\r\n\r\n")
        for _ in range(50):
            await client.send(bytes(65536))
        assert (await client.answer())[0] == 401
        assert await client.rest() == b""


@on_uvloop
async def test_one_that_goes_on_is_cut_off():
    async with serving(refuse, linger_s=0.3) as port, peer(port) as client:
        await client.send(b"POST /a HTTP/1.1\r\nhost: x\r\ncontent-length: 999999999999\r\n\r\n")
        assert (await client.answer())[0] == 401
        async with asyncio.timeout(PATIENCE_S):
            await client.flood(bytes(65536), 2**40)
