"""Which forms of requests a connection takes: those of HTTP/1.1 and 1.0, and what is no request."""

import asyncio

import pytest

from router.http.body_writer import body_writer_of
from tests.router.http_wire import GET, HEADER, PATIENCE_S, echoing, on_uvloop, peer, serving


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
