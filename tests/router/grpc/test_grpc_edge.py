"""What one client may take of the gRPC port."""

import asyncio
import gc
import math
import time
from typing import Any

import grpc
import grpc.aio
import pytest

from baton.address import HostPort
from baton.errors import BatonError
from baton.settings import LONGEST_S
from baton.v1 import generation_pb2 as pb
from baton.v1 import generation_pb2_grpc
from router.grpc.service import write_in_time
from tests.router.conftest import Router, says
from tests.router.fake_node import PATIENCE_S
from tests.router.http.test_access import running

GENEROUS = (("grpc.max_send_message_length", 2**28), ("grpc.max_metadata_size", 2**20))


def channel_to(router: Router, *options: tuple[str, int]) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(router.grpc, options=[*GENEROUS, *options])


async def read_on(call) -> None:
    while await call.read() is not grpc.aio.EOF:  # type: ignore[attr-defined]
        pass


async def test_messages_and_metadata_have_one_limit_each(nodes):
    async with (
        running(nodes, max_body_bytes=100_000, max_header_bytes=8192) as (router, _),
        channel_to(router) as channel,
    ):
        tokenize = generation_pb2_grpc.GenerationStub(channel).Tokenize
        assert (await tokenize(pb.TokenizeRequest(prompt="x" * 100))).token_ids
        for prompt, metadata in (("x" * 100_001, ()), ("x", (("k", "v" * 9000),))):
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await tokenize(pb.TokenizeRequest(prompt=prompt), metadata=metadata, timeout=PATIENCE_S)
            assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert (await tokenize(pb.TokenizeRequest(prompt="x"), timeout=PATIENCE_S)).token_ids


async def test_both_ports_on_all_addresses_are_for_clients_of_ipv4_and_ipv6(nodes):
    any_port = HostPort("::", 0)
    async with running(nodes, http=any_port, grpc=any_port) as (router, _):
        for port in (router.server.http_address.port, router.server.grpc_address.port):
            for host in ("127.0.0.1", "::1"):
                _, writer = await asyncio.open_connection(host, port)
                writer.close()


async def test_limits_beyond_32_bits_are_limits_too(nodes):
    """gRPC takes no larger numbers: of bytes, and of milliseconds, which end after 25 days."""
    seconds = dict.fromkeys(("header_timeout", "body_timeout", "write_timeout", "idle_timeout"), math.inf)
    sizes = dict.fromkeys(("max_body_bytes", "max_buffered_body_bytes", "max_header_bytes"), 2**32)
    async with (
        running(nodes, request_timeout=LONGEST_S, **seconds, **sizes) as (router, client),
        channel_to(router) as channel,
    ):
        answers = generation_pb2_grpc.GenerationStub(channel).Generate(pb.GenerateRequest(prompt="hello"))
        assert [answer.WhichOneof("event") async for answer in answers][-1] == "finished"
        (await client.post("/v1/completions", json={"prompt": "hello"})).raise_for_status()


async def test_connections_have_a_limit(nodes):
    async with running(nodes, max_connections=2) as (router, _):
        channels = [channel_to(router, ("grpc.use_local_subchannel_pool", 1)) for _ in range(5)]
        waits = [asyncio.create_task(channel.channel_ready()) for channel in channels]
        done, waiting = await asyncio.wait(waits, timeout=1.0)
        for wait in waiting:
            wait.cancel()
        await asyncio.gather(*(channel.close(None) for channel in channels))
        assert 1 <= len(done) <= 3


async def test_a_client_that_does_not_read_loses_its_request(nodes):
    """The node is told to stop; the client learns it when it reads on."""
    nodes.script = says("hello world, hello there " * 24)  # beyond what sockets and flow control hold
    async with running(nodes, write_timeout=0.3) as (router, _):
        narrow = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1))
        async with channel_to(router, *narrow) as channel:
            request = pb.GenerateRequest(prompt="hello", n=128, logprobs=20)
            call = generation_pb2_grpc.GenerationStub(channel).Generate(request)
            assert (await call.read()).WhichOneof("event") == "started"
            await router.idle()
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await read_on(call)
            assert error.value.code() is grpc.StatusCode.CANCELLED
            assert "did not read for 0.3 s" in str(error.value.details())


async def test_a_client_that_reads_while_the_router_does_not_run_keeps_its_request():
    loop, has_read = asyncio.get_running_loop(), asyncio.Event()

    class Call:
        async def write(self, response: pb.GenerateResponse) -> None:
            loop.call_soon(stand_still)
            await has_read.wait()

    def stand_still() -> None:
        time.sleep(0.4)
        loop.call_soon_threadsafe(has_read.set)  # gRPC has told so meanwhile

    context: Any = Call()
    await write_in_time(context, pb.GenerateResponse(), 0.3)


@pytest.mark.parametrize("method", ["Generate", "ListModels"])
async def test_a_call_whose_request_does_not_come_ends(nodes, method):
    """Else it would take up memory, and one of a connection's calls, for as long as its client likes."""
    async with running(nodes, body_timeout=0.2) as (router, _), channel_to(router) as channel:
        begin: Any = channel.stream_stream(f"/baton.v1.Generation/{method}", None, None)
        silent, without = begin(), begin()
        await without.done_writing()
        async with asyncio.timeout(PATIENCE_S):
            assert await silent.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            assert await silent.details() == "the request did not come within 0.2 s"
            assert await without.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_call_that_is_refused_is_no_garbage(nodes):
    """Its message may have megabytes, and collections are rare in a router."""

    def num_errors() -> int:
        errors = (BatonError, grpc.aio.AbortError)
        return sum(issubclass(type(found), errors) for found in gc.get_objects())  # torch's own warn if asked

    gc.disable()
    try:
        before = num_errors()
        async with running(nodes) as (router, _), channel_to(router) as channel:
            with pytest.raises(grpc.aio.AioRpcError):
                await generation_pb2_grpc.GenerationStub(channel).Tokenize(pb.TokenizeRequest(prompt="x", model="none"))
        assert num_errors() <= before
    finally:
        gc.enable()
