"""What one connection may take of the HTTP server, in bytes and in time, and how it is told."""

import asyncio
import logging
import socket

import pytest

from router.http.body_writer import body_writer_of
from router.http.limits import ConnectionLimits
from router.http.server import HttpServer
from tests.router.http_wire import GET, LOOPBACK, PATIENCE_S, echo, on_uvloop, peer, refuse, serving


def echoing():
    return serving(echo, max_header_bytes=4096, linger_s=0.3)


# ---- sizes ----


HEADER = b"x-filler: " + b"a" * 1000 + b"\r\n"


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


# ---- what is no HTTP ----


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # a TLS handshake
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"NONSENSE / HTTP/1.1\r\nhost: x\r\n\r\n",
        b"GET /\x00 HTTP/1.1\r\nhost: x\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: x\r\nbad header\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: x\r\na: b\x00c\r\n\r\n",
        b"CONNECT x:1 HTTP/1.1\r\nhost: x\r\n\r\n",
        b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\nabcdef",
        b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked, identity\r\n\r\n0\r\n\r\n",
        b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: -1\r\n\r\n",
        b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: +5\r\n\r\nabcde",
        b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 99999999999999999999999\r\n\r\n",
        b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nxyz\r\n",
        b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nffffffffffffffffffff\r\n",
        b"GET / HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n",
    ],
)
@on_uvloop
async def test_what_is_no_request_is_refused_with_a_reason(data):
    async with echoing() as port, peer(port) as client:
        await client.send(data)
        status, message = await client.refusal()
        assert (status, bool(message)) == (400, True)


@pytest.mark.parametrize("hosts", [0, 2])
@on_uvloop
async def test_a_request_names_one_host(hosts):
    """RFC 9112, section 3.2. Clients of HTTP/1.0 need not name any."""
    head = b"GET /a HTTP/1.%d\r\n" + b"host: x\r\n" * hosts + b"%b\r\n"
    async with echoing() as port:
        for upgrade in (b"", b"connection: upgrade\r\nupgrade: h2c\r\n"):
            async with peer(port) as client:
                await client.send(head % (1, upgrade))
                assert await client.refusal() == (400, f"The request has {hosts} headers `Host` instead of one.")
        async with peer(port) as client:
            await client.send(head % (0, b""))
            assert (await client.answer())[0] == (400 if hosts else 200)


H2C = b"host: x\r\nupgrade: h2c\r\nhttp2-settings: AA\r\n"


@pytest.mark.parametrize("connection", [b"upgrade, http2-settings", b"upgrade, close"])
@pytest.mark.parametrize(
    "body",
    [b"content-length: 3\r\n\r\nxyz", b"transfer-encoding: chunked\r\n\r\n3\r\nxyz\r\n0\r\n\r\n"],
    ids=["length", "chunked"],
)
@on_uvloop
async def test_requests_that_ask_for_another_protocol_are_answered_in_this_one(body, connection):
    """As Java's client asks with each request, if it is not told otherwise."""
    request = b"POST /a HTTP/1.1\r\nconnection: " + connection + b"\r\n" + H2C + body
    async with echoing() as port:
        for cut in (len(request), len(request) - len(body) // 2, 100):
            async with peer(port) as client:
                await client.send(request[:cut])
                await client.send(request[cut:])
                assert (await client.answer())[2] == b"/a 3"
                if b"close" in connection:
                    await client.gone()
                else:
                    await client.send(request + GET)
                    assert [(await client.answer())[2] for _ in range(2)] == [b"/a 3", b"/a 0"]


@on_uvloop
async def test_such_requests_may_be_pipelined_and_have_the_same_limits():
    async with echoing() as port:
        async with peer(port) as client:
            await client.send((b"GET /a HTTP/1.1\r\nconnection: upgrade\r\n" + H2C + b"\r\n") * 20)
            assert [(await client.answer())[2] for _ in range(20)] == [b"/a 0"] * 20
        async with peer(port) as client:
            await client.send(b"GET /a HTTP/1.1\r\nconnection: upgrade\r\n" + H2C + HEADER * 5 + b"\r\n")
            assert (await client.refusal())[0] == 431


@on_uvloop
async def test_old_clients_and_careful_ones():
    async with echoing() as port:
        async with peer(port) as client:
            await client.send(b"GET /a HTTP/1.0\r\n\r\n")
            assert (await client.answer())[2] == b"/a 0"
            await client.gone()
        async with peer(port) as client:
            await client.send(b"POST /a HTTP/1.1\r\nhost: x\r\ncontent-length: 3\r\nexpect: 100-continue\r\n\r\n")
            async with asyncio.timeout(PATIENCE_S):
                assert await client._reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
            await client.send(b"xyz")
            assert (await client.answer())[2] == b"/a 3"


@on_uvloop
async def test_clients_of_http_1_0_are_not_told_to_continue():
    """They would take it for the answer (RFC 9110, section 10.1.1)."""
    async with echoing() as port, peer(port) as client:
        await client.send(b"POST /a HTTP/1.0\r\ncontent-length: 3\r\nexpect: 100-continue\r\n\r\nxyz")
        assert (await client.answer())[2] == b"/a 3"


@pytest.mark.parametrize("url", [b"http://x", b"http://x/", b"http://x?a=b", b"/"])
@on_uvloop
async def test_an_address_may_name_the_host_and_no_path(url):
    """RFC 9112, section 3.2.2."""
    async with echoing() as port, peer(port) as client:
        await client.send(b"GET " + url + b" HTTP/1.1\r\nhost: x\r\n\r\n")
        assert (await client.answer())[2] == b"/ 0"


@on_uvloop
async def test_trailers_are_no_headers():
    """Whoever checks or sets headers in front of the router does not look at them (RFC 9110, section 6.5.1)."""

    async def app(scope, receive, send):
        while (await receive())["more_body"]:
            pass
        body = b" ".join(name for name, _ in scope["headers"])
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
        await send({"type": "http.response.body", "body": body})

    async with serving(app) as port, peer(port) as client:
        chunked = b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n0\r\nauthorization: a\r\n\r\n"
        await client.send(chunked + GET)
        assert (await client.answer())[2] == b"host transfer-encoding"
        assert (await client.answer())[2] == b"host"


async def pieces(scope, receive, send):
    """Answers with a body of three pieces, whose length it does not say."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"one ", "more_body": True})
    body_writer_of(scope).write_piece(b"two ")
    await send({"type": "http.response.body", "body": b"three"})


@on_uvloop
async def test_clients_of_http_1_0_get_bodies_without_chunks():
    async with serving(pieces) as port:
        for version, body in (
            (b"1.0", b"one two three"),
            (b"1.1", b"4\r\none \r\n4\r\ntwo \r\n5\r\nthree\r\n0\r\n\r\n"),
        ):
            async with peer(port) as client:
                await client.send(b"GET /a HTTP/" + version + b"\r\nhost: x\r\nconnection: close\r\n\r\n")
                head, _, rest = (await client.rest()).partition(b"\r\n\r\n")
                assert (b"chunked" in head, rest) == (version == b"1.1", body)


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
