"""What a node tells: description, tokenizer, health, reflection, metrics, audit, draining."""

import asyncio
import dataclasses
import json
import threading
import urllib.error
import urllib.request
from typing import Any, cast

import grpc
import pytest
from google.protobuf import json_format
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from baton import wire
from baton.address import HostPort
from baton.audit import KvSlot, KvUse, epoch_name
from baton.messages import AttemptId, End, Load, Subscribe, Subscribed, Update
from baton.node_info import NodeRole, TransportEndpoint
from baton.rpc.channels import CHANNEL_OPTIONS
from baton.v1 import common_pb2, node_pb2, node_pb2_grpc
from decode_node.server import DECODE_SIDE
from engine.holdings import Holding
from node.errors import StartupError
from node.events import Draining
from node.preflight import require_free
from node.settings import NodeSettings
from prefill_node.server import PREFILL_SIDE
from tests.node.scripted import (
    WAIT_S,
    NotingTransport,
    RouterStream,
    Running,
    info_for,
    make_node,
    running,
    session,
)

TOKENIZER = bytes(range(256)) * 4096 * 2 + b"end"  # two pieces and a bit


async def test_a_node_describes_itself():
    async with running(DECODE_SIDE, NodeRole.DECODE, incarnation="d7") as node:
        stub = node_pb2_grpc.NodeStatusStub(node.channel)
        said = wire.read_node_info(await stub.Describe(node_pb2.DescribeRequest()))
        assert said == dataclasses.replace(node.info, endpoints=(TransportEndpoint(0, "memory", b""),))


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


async def test_the_audit_lists_every_block_and_slot():
    """The same as JSON and as a message."""
    async with running(PREFILL_SIDE, NodeRole.PREFILL) as node:
        await asyncio.wrap_future(node.loop.run_engine_call(lambda: fill(node)))
        status, text = await asyncio.to_thread(fetch, node.node.metrics.address, "/debug/kv")
        assert status == 200
        page = json.loads(text)
        ages = [entry.pop("age_s") for kind in ("holders", "blocks", "slots") for entry in page[kind]]
        assert page == {
            "node_id": "prefill-0",
            "incarnation": "i1",
            "role": "prefill",
            "integrity": "block 3 is lost",
            "idle": False,
            "num_blocks": {"free": 1, "cached": 1, "owned": 0, "in_flight": 1, "loading": 0},
            "num_slots": {"in_flight": 1},
            "holders": [
                {"kind": "sequence", "state": "parked", "use": use, "lease": 7, "peer": "d", "samples": [0, 1]}
                | {"attempt_id": {"router_epoch": epoch_name(1), "request_id": "r", "attempt": 2}}
                for use in ("owns", "reads")
            ],
            "blocks": [
                {"block": 1, "state": "in_flight", "ref": 1, "readers": 1, "writer": 0, "hash": "", "holders": [0, 1]},
                {"block": 2, "state": "cached", "ref": 0, "readers": 0, "writer": 0, "hash": "ab" * 32, "holders": []},
            ],
            "slots": [{"slot": 0, "state": "in_flight", "peer": "d", "lease": 7, "part": 3}],
        }
        now = node.loop.clock()
        assert [round(now - age) for age in ages] == [100, 100, 10, 20, round(now) - 5]

        stub = node_pb2_grpc.NodeStatusStub(node.channel)
        said = await stub.AuditKv(node_pb2.AuditKvRequest(), timeout=WAIT_S)
        assert said.role == common_pb2.NODE_ROLE_PREFILL
        message = json_format.MessageToDict(
            said, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
        )
        for entry in (*message["holders"], *message["blocks"], *message["slots"]):
            assert entry.pop("age_s") > 0
        page["role"] = "NODE_ROLE_PREFILL"
        assert through_json(message) == through_json(page)


async def test_with_an_admin_key_it_is_needed_for_every_look(tmp_path):
    key = tmp_path / "key"
    key.write_text("secret\n")
    async with running(PREFILL_SIDE, NodeRole.PREFILL, admin_key_file=key) as node:
        page = node.node.metrics.address
        for path in ("/debug/kv", "/integrity"):
            assert (await asyncio.to_thread(fetch, page, path))[0] == 401
        assert (await asyncio.to_thread(fetch, page, "/health"))[0] == 200
        stub = node_pb2_grpc.NodeStatusStub(node.channel)
        for metadata in ([], [("authorization", "Bearer wrong")]):
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await stub.AuditKv(node_pb2.AuditKvRequest(), timeout=WAIT_S, metadata=metadata)
            assert error.value.code() is grpc.StatusCode.UNAUTHENTICATED
        said = [("authorization", "Bearer secret")]
        answer = await stub.AuditKv(node_pb2.AuditKvRequest(), timeout=WAIT_S, metadata=said)
        assert answer.node_id == "prefill-0"


async def test_an_audit_for_a_stranger_is_refused(monkeypatch):
    monkeypatch.setattr("baton.telemetry.admin.is_loopback", lambda host: False)
    async with running(PREFILL_SIDE, NodeRole.PREFILL) as node:
        stub = node_pb2_grpc.NodeStatusStub(node.channel)
        with pytest.raises(grpc.aio.AioRpcError, match="--admin-key-file") as error:
            await stub.AuditKv(node_pb2.AuditKvRequest(), timeout=WAIT_S)
        assert error.value.code() is grpc.StatusCode.PERMISSION_DENIED
        assert await stub.Describe(node_pb2.DescribeRequest(), timeout=WAIT_S)


def fill(node: Running) -> None:
    """Of three blocks one is being sent, one cached, one free."""
    role = node.role
    role.blocks.now = 10.0
    blocks = role.blocks.allocate(2).blocks
    role.blocks.pin_read(blocks[:1])
    role.blocks.now = 20.0
    role.blocks.seal([blocks[1]], [b"\xab" * 32])
    role.blocks.release(blocks[1:])
    held = Holding("sequence", "parked", AttemptId(1, "r", 2), (0, 1), 100.0, blocks[:1], lease=7, peer="d")
    role.holdings = [held, dataclasses.replace(held, use=KvUse.READS)]
    role.slots = [KvSlot(0, "in_flight", "d", 7, 3, 5.0)]
    role.is_idle, role.broken = False, "block 3\nis lost"


def through_json(value: object) -> object:
    """64-bit numbers are strings in protobuf's JSON."""
    if isinstance(value, dict):
        return {name: through_json(field) for name, field in value.items()}
    if isinstance(value, list):
        return [through_json(field) for field in value]
    return value if isinstance(value, bool) else str(value)


async def test_an_engine_that_hangs_lets_nobody_wait_for_an_audit():
    go = threading.Event()
    async with running(PREFILL_SIDE, NodeRole.PREFILL, audit_s=0.1) as node:
        node.loop.run_engine_call(lambda: go.wait(WAIT_S))
        page, hangs = node.node.metrics.address, "no turn of the engine ended within 0.1 s"
        assert await asyncio.to_thread(fetch, page, "/debug/kv") == (504, f"{hangs}\n")
        assert await asyncio.to_thread(fetch, page, "/integrity") == (504, f"{hangs}\n")
        stub = node_pb2_grpc.NodeStatusStub(node.channel)
        with pytest.raises(grpc.aio.AioRpcError, match=hangs) as error:
            await stub.AuditKv(node_pb2.AuditKvRequest(), timeout=WAIT_S)
        assert error.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        node.node._auditor._limit_s = WAIT_S  # a turn that ends may take its time where the machine is busy
        go.set()
        assert await asyncio.to_thread(fetch, page, "/integrity") == (200, "ok\n")
        assert not node.node.failure.done()


async def test_a_warm_up_that_hangs_ends_the_start():
    go = threading.Event()
    node, *_ = make_node(PREFILL_SIDE, NodeRole.PREFILL, warm_up=cast(Any, lambda: go.wait(WAIT_S)), turn_timeout_s=0.1)
    with pytest.raises(StartupError, match=r"warm-up: a turn of the engine has not ended within 0\.1 s"):
        async with asyncio.timeout(WAIT_S / 2):
            await node.start()
    go.set()
    assert await node.stop()


async def test_no_turn_comes_before_the_warm_up():
    """In which a data parallel node would take part in what others compute to warm up."""
    order = []
    node, role, *_ = make_node(PREFILL_SIDE, NodeRole.PREFILL, warm_up=lambda: order.append("warm-up"))
    compute = role.compute
    role.compute = lambda now: (order.append("turn"), compute(now))[1]
    await node.start()
    assert await node.stop()
    assert order[0] == "warm-up"


async def test_what_a_warm_up_raises_ends_the_start():
    def fail():
        raise ValueError("too large")

    node, *_ = make_node(PREFILL_SIDE, NodeRole.PREFILL, warm_up=fail)
    with pytest.raises(ValueError, match="too large"):
        await node.start()
    assert await node.stop()


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


async def test_draining_waits_for_work_that_nobody_has_been_told_of_yet(monkeypatch):
    async with running(PREFILL_SIDE, NodeRole.PREFILL) as node:
        posted, goes_on, ends = asyncio.Event(), threading.Event(), threading.Event()
        post = node.loop.post
        monkeypatch.setattr(node.loop, "post", lambda event: (post(event), posted.set()))
        node.loop.run_engine_call(lambda: goes_on.wait(WAIT_S))  # so that all that is posted meanwhile is one turn's
        drain = asyncio.create_task(node.node.drain())
        await posted.wait()
        asked = asyncio.wrap_future(node.loop.run_engine_call(lambda: None))  # right behind what drain asks
        node.role.is_idle = False
        node.role.prepare = cast(Any, lambda now: ends.wait(WAIT_S))
        goes_on.set()
        await asked  # that turn has not ended
        assert not drain.done()
        ends.set()
        node.role.is_idle = True
        node.loop.wake()
        async with asyncio.timeout(WAIT_S):
            assert await drain


@pytest.mark.parametrize("drain_timeout", [WAIT_S, 0.0])
async def test_draining_an_idle_node_takes_no_time(drain_timeout):
    async with running(PREFILL_SIDE, NodeRole.PREFILL) as node:
        node.node._settings = NodeSettings(model="none", drain_timeout=drain_timeout)
        async with asyncio.timeout(WAIT_S / 2):
            assert await node.node.drain()


async def test_draining_gives_up_at_its_deadline():
    async with running(PREFILL_SIDE, NodeRole.PREFILL) as node:
        node.role.is_idle = False
        node.node._settings = NodeSettings(model="none", drain_timeout=0.1)
        assert not await node.node.drain()


async def test_who_drains_stays_subscribed_and_then_says_that_it_was_stopped():
    node, role, loop, _ = make_node(PREFILL_SIDE, NodeRole.PREFILL)
    await node.start()
    async with grpc.aio.insecure_channel(str(node.address), options=CHANNEL_OPTIONS) as channel:
        running = Running(node, role, loop, NotingTransport(), info_for(NodeRole.PREFILL, "i1"), channel)
        async with session(running) as router:
            assert await router.read() == Subscribed("i1")
            role.is_idle = False
            drain = asyncio.create_task(node.drain())
            await role.saw(Draining)
            role.state = Load(num_running=1)
            loop.wake()
            while (await router.read()) != role.state:
                pass
            assert not drain.done()
            running.say(Update(AttemptId(1, "r", 0), End()))
            role.is_idle, role.state = True, Load(draining=True)
            assert await drain
            assert await node.stop()
            said = [message async for message in router.rest()]
            assert said[-1] == role.state, "it would be taken for dead"
            assert [update.kind for updates in said if isinstance(updates, tuple) for update in updates] == [End()]
            assert await router.end() == ("ABORTED", "the node was stopped")


async def test_at_the_end_of_its_time_a_node_says_that_it_was_stopped():
    node, role, loop, _ = make_node(DECODE_SIDE, NodeRole.DECODE)
    await node.start()
    async with grpc.aio.insecure_channel(str(node.address), options=CHANNEL_OPTIONS) as channel:
        running = Running(node, role, loop, NotingTransport(), info_for(NodeRole.DECODE, "i1"), channel)
        stub = node_pb2_grpc.DecodeNodeStub(channel)
        async with RouterStream(stub, Subscribe(1, "i1")) as router:
            assert await router.read() == Subscribed("i1")
            running.role.is_idle = False
            node._settings = NodeSettings(model="none", drain_timeout=0.0)
            assert not await node.drain()
            assert await node.stop()
            assert await router.end() == ("ABORTED", "the node was stopped")


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
