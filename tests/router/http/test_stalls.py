"""Clients' time runs only while the server does."""

import asyncio
import socket
import time
from concurrent.futures import ThreadPoolExecutor

from tests.router.http_wire import GET, LOOPBACK, PATIENCE_S, echo, on_uvloop, peer, refuse, serving


async def stand_still(seconds, last):
    """Do `last`; then nothing else runs on the loop, server or client. It is where the loop waits for sockets, as when
    a process is stopped: the timers that are due then come before what has come to the sockets."""
    loop, over = asyncio.get_running_loop(), asyncio.Event()
    woken, wake = socket.socketpair()

    def stand() -> None:
        loop.remove_reader(woken)
        last()
        time.sleep(seconds)
        over.set()

    with woken, wake:
        loop.add_reader(woken, stand)
        wake.send(b"x")
        await over.wait()


def read_all(client):
    """All that comes until the other side ends it."""
    return b"".join(iter(lambda: client.recv(2**16), b""))


@on_uvloop
async def test_a_request_that_comes_while_the_server_does_not_run_is_not_late():
    """A part of it lies in the socket meanwhile, and its client waits for room there."""
    async with serving(refuse, linger_s=0.6) as port, peer(port) as client:
        await client.send(b"POST /a HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % 2**23)
        assert (await client.answer())[0] == 401
        rest = asyncio.create_task(client.send(bytes(2**23) + GET))
        await stand_still(0.7, lambda: None)
        assert (await client.answer())[0] == 401
        await rest


@on_uvloop
async def test_a_connection_is_not_idle_because_the_server_does_not_run():
    async with serving(echo, idle_timeout_s=0.6) as port:
        with socket.create_connection((LOOPBACK, port), timeout=PATIENCE_S) as client:
            client.sendall(GET)
            assert await asyncio.to_thread(client.recv, 2**16)
            await stand_still(0.7, lambda: client.sendall(GET))
            assert (await asyncio.to_thread(client.recv, 2**16)).startswith(b"HTTP/1.1 200 ")


@on_uvloop
async def test_a_client_that_reads_while_the_server_does_not_run_is_not_cut_off():
    """What is in the sockets' buffers: there is more."""
    body, paused = bytes(2**24), asyncio.Event()

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": [(b"connection", b"close")]})
        await send({"type": "http.response.body", "body": body})
        paused.set()

    async with serving(app, write_timeout_s=1.0) as port:
        with socket.create_connection((LOOPBACK, port), timeout=PATIENCE_S) as client:
            client.sendall(GET)
            await paused.wait()
            with ThreadPoolExecutor() as pool:
                reading = pool.submit(read_all, client)
                await stand_still(1.1, lambda: None)
                assert len(await asyncio.wrap_future(reading)) > len(body)
