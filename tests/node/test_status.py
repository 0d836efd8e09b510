"""What a node tells: description, tokenizer, health, reflection, metrics, audit, draining."""

import asyncio
import urllib.error
import urllib.request

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from baton import wire
from baton.address import HostPort
from baton.messages import Load, NodeRole, Subscribed
from baton.v1 import node_pb2, node_pb2_grpc
from decode_node.server import DECODE_SIDE
from engine.node.errors import StartupError
from engine.node.events import Draining
from engine.node.run import require_free
from engine.node.settings import NodeSettings
from prefill_node.server import PREFILL_SIDE
from tests.node.scripted import WAIT_S, running, session

TOKENIZER = bytes(range(256)) * 4096 * 2 + b"end"  # two pieces and a bit


async def test_a_node_describes_itself():
    async with running(DECODE_SIDE, NodeRole.DECODE, incarnation="d7") as node:
        stub = node_pb2_grpc.NodeStatusStub(node.channel)
        assert wire.read_node_info(await stub.Describe(node_pb2.DescribeRequest())) == node.info


async def test_advertise_takes_the_place_of_the_address():
    async with running(DECODE_SIDE, NodeRole.DECODE, advertise=HostPort("node.example", 0)) as node:
        assert node.node.address.host == "node.example"
        assert node.node.address.port != 0


async def test_the_tokenizer_comes_in_pieces_with_its_digest():
    async with running(PREFILL_SIDE, NodeRole.PREFILL, tokenizer=TOKENIZER) as node:
        stub = node_pb2_grpc.NodeStatusStub(node.channel)
        pieces = [piece async for piece in stub.GetTokenizer(node_pb2.GetTokenizerRequest(digest="d1"))]
        assert b"".join(piece.data for piece in pieces) == TOKENIZER
        assert {piece.digest for piece in pieces} == {"d1"}
        assert max(len(piece.data) for piece in pieces) == 1024 * 1024
        with pytest.raises(grpc.aio.AioRpcError, match="digest d1, not other"):
            await stub.GetTokenizer(node_pb2.GetTokenizerRequest(digest="other")).read()


@pytest.mark.parametrize(("side", "role"), [(PREFILL_SIDE, NodeRole.PREFILL), (DECODE_SIDE, NodeRole.DECODE)])
async def test_health_and_reflection(side, role):
    async with running(side, role) as node:
        health = health_pb2_grpc.HealthStub(node.channel)
        for service in ("", "baton.v1.NodeStatus", side.service):
            answer = await health.Check(health_pb2.HealthCheckRequest(service=service))
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        call = reflection_pb2_grpc.ServerReflectionStub(node.channel).ServerReflectionInfo()
        await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        names = {service.name for service in (await call.read()).list_services_response.service}
        assert names >= {"baton.v1.NodeStatus", side.service, "grpc.health.v1.Health"}
        call.cancel()


def fetch(address: HostPort, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://{address}{path}", timeout=WAIT_S) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


async def test_the_metrics_page_and_the_audit():
    async with running(PREFILL_SIDE, NodeRole.PREFILL) as node:
        page = node.node.metrics.address
        text = (await asyncio.to_thread(fetch, page, "/metrics"))[1]
        assert 'baton:kv_blocks{model_name="tiny",role="prefill",state="free"} 3.0' in text
        assert await asyncio.to_thread(fetch, page, "/health") == (200, "ok\n")
        assert await asyncio.to_thread(fetch, page, "/integrity") == (200, "ok\n")
        node.role.broken = "block 3 is lost"
        assert await asyncio.to_thread(fetch, page, "/integrity") == (503, "block 3 is lost\n")


async def test_draining_waits_for_the_work_that_is_there():
    async with running(PREFILL_SIDE, NodeRole.PREFILL) as node, session(node) as router:
        assert await router.read() == Subscribed("i1")
        node.role.is_idle = False
        drain = asyncio.create_task(node.node.drain())
        await node.role.saw(Draining)
        health = health_pb2_grpc.HealthStub(node.channel)
        answer = await health.Check(health_pb2.HealthCheckRequest())
        assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING
        assert await asyncio.to_thread(fetch, node.node.metrics.address, "/health") == (503, "stopping\n")
        assert not drain.done()
        node.role.is_idle, node.role.state = True, Load()
        node.loop.wake()
        async with asyncio.timeout(WAIT_S):
            assert await drain


async def test_draining_an_idle_node_takes_no_time():
    async with running(PREFILL_SIDE, NodeRole.PREFILL) as node:
        async with asyncio.timeout(WAIT_S / 2):
            assert await node.node.drain()


async def test_draining_gives_up_at_its_deadline():
    async with running(PREFILL_SIDE, NodeRole.PREFILL) as node:
        node.role.is_idle = False
        node.node._settings = NodeSettings(model="none", drain_timeout=0.1)
        assert not await node.node.drain()


async def test_a_busy_port_is_named():
    async with running(PREFILL_SIDE, NodeRole.PREFILL) as node:
        busy = node.node.address
        with pytest.raises(StartupError, match=f"--listen: cannot listen on {busy}: Address already in use"):
            require_free("--listen", busy)
    require_free("--listen", busy)


async def test_an_engine_that_dies_is_told_to_the_process(caplog):
    async with running(PREFILL_SIDE, NodeRole.PREFILL) as node:

        def die(_):
            raise RuntimeError("odd")

        node.role.compute = die
        node.loop.wake()
        async with asyncio.timeout(WAIT_S):
            assert str(await node.node.failure) == "odd"
        assert (await asyncio.to_thread(fetch, node.node.metrics.address, "/health"))[0] == 503


def test_settings_refuse_an_address_that_nobody_can_reach():
    with pytest.raises(ValueError, match=r"--advertise: required with --listen 0\.0\.0\.0:1"):
        NodeSettings(model="m", listen=HostPort("0.0.0.0", 1))
    settings = NodeSettings(model="m", listen=HostPort("0.0.0.0", 1), advertise=HostPort("a", 2))
    assert settings.advertised(1) == HostPort("a", 2)


@pytest.mark.parametrize(("port", "metrics_port", "expected"), [(0, None, 0), (9000, None, 10000), (65000, None, 0)])
def test_the_metrics_port(port, metrics_port, expected):
    settings = NodeSettings(model="m", listen=HostPort("127.0.0.1", port), metrics_port=metrics_port)
    assert settings.metrics_listen == HostPort("127.0.0.1", expected)
