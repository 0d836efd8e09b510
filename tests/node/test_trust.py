"""Whom a node believes: the cluster secret and mutual TLS, over real gRPC."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import shutil
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from baton import wire
from baton.handoff_messages import Hello, Reserve
from baton.messages import AttemptId, Auth, DecodeTarget, Subscribe, Subscribed
from baton.node_info import NodeRole, TransportEndpoint
from baton.rpc.channels import CHANNEL_OPTIONS, open_channel
from baton.rpc.cluster_secret import HANDOFF, SESSION, ClusterSecret, prove, read_secret
from baton.v1 import node_pb2, node_pb2_grpc
from decode_node.server import DECODE_SIDE
from node.events import FromPeer, PeerClosed, PeerOpened, ToDecode
from prefill_node.server import PREFILL_SIDE
from tests.certificates import Certificate, make_certificate
from tests.node.scripted import LAYOUT, WAIT_S, RouterStream, Running, running

WORK = AttemptId(1, "r", 0)
HELLO = Hello("p9", "prefill-9", LAYOUT, (TransportEndpoint(0, "memory", b"there"),), "d1", 4)


@pytest.fixture
def secrets(tmp_path: Path) -> tuple[Path, Path]:
    """Two files with different secrets."""
    files = tmp_path / "one", tmp_path / "other"
    for number, path in enumerate(files):
        path.write_text(f"secret of a cluster, number {number}\n")
        path.chmod(0o600)
    return files


def a_session(node: Running, subscribe: Subscribe | None, secret: ClusterSecret | None = None) -> RouterStream:
    return RouterStream(node_pb2_grpc.PrefillNodeStub(node.channel), subscribe, secret)


async def test_a_router_that_proves_the_secret_has_a_session(secrets):
    async with (
        running(PREFILL_SIDE, NodeRole.PREFILL, cluster_secret_file=secrets[0]) as node,
        a_session(node, Subscribe(1, "i1"), read_secret(secrets[0])) as router,
    ):
        assert await router.read() == Subscribed("i1")


async def test_who_does_not_prove_it_is_refused_by_name_and_nothing_becomes_of_it(secrets, caplog):
    missing = "this node wants a cluster secret, and the router has none"
    differs = "the cluster secret differs: what the router has is not this node's"
    async with running(PREFILL_SIDE, NodeRole.PREFILL, cluster_secret_file=secrets[0]) as node:
        async with a_session(node, Subscribe(1, "i1")) as router:
            assert await router.end() == ("UNAUTHENTICATED", missing)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            async with a_session(node, Subscribe(1, "i1"), read_secret(secrets[1])):
                pass
        assert refused.value.details() == differs
        async with a_session(node, None) as router:
            await router.send(Auth("1", b"short"))
            assert (await router.end())[0] == "UNAUTHENTICATED"
        assert node.role.events == []
    assert [text in caplog.text for text in (missing, differs)] == [True, True]
    assert "secret of a cluster" not in caplog.text


async def test_a_router_proves_its_epoch_and_opens_no_other(secrets):
    async with running(PREFILL_SIDE, NodeRole.PREFILL, cluster_secret_file=secrets[0]) as node:
        async with a_session(node, None) as router:
            await prove(read_secret(secrets[0]), SESSION, "1", router.send, router.read)
            await router.send(Subscribe(2, "i1"))
            assert await router.end() == ("UNAUTHENTICATED", "the router has proved to be of another epoch")
        assert node.role.events == []


async def test_a_node_without_a_secret_says_so_to_who_has_one(secrets):
    async with running(PREFILL_SIDE, NodeRole.PREFILL) as node:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            async with a_session(node, Subscribe(1, "i1"), read_secret(secrets[0])):
                pass
        assert refused.value.details() == "the router has a cluster secret, and this node has none"


@asynccontextmanager
async def pair(prefill: dict[str, Any], decode: dict[str, Any]):
    async with (
        running(DECODE_SIDE, NodeRole.DECODE, incarnation="d1", **decode) as d,
        running(PREFILL_SIDE, NodeRole.PREFILL, incarnation="p1", **prefill) as p,
    ):
        p.say(ToDecode(DecodeTarget(d.address, "d1"), Reserve(WORK, "d1", 2, (), 1, 5.0, 8)))
        yield p, d


async def test_nodes_with_one_secret_hand_over(secrets):
    both = {"cluster_secret_file": secrets[0]}
    async with pair(both, both) as (p, d):
        await d.role.saw(FromPeer)
        await p.role.saw(PeerOpened)


@pytest.mark.parametrize(
    ("prefill", "decode", "reason"),
    [
        (None, 0, "this node wants a cluster secret, and the prefill node has none"),
        (0, None, "the prefill node has a cluster secret, and this node has none"),
        (0, 1, "the cluster secret differs: what the prefill node has is not this node's"),
    ],
)
async def test_nodes_whose_secrets_do_not_fit_say_so_and_look_at_no_address(secrets, caplog, prefill, decode, reason):
    files = [{} if which is None else {"cluster_secret_file": secrets[which]} for which in (prefill, decode)]
    async with pair(*files) as (p, d):
        (closed,) = await p.role.saw(PeerClosed)
        assert closed.reason == f"UNAUTHENTICATED: {reason}"
        assert d.transport.notes == d.role.events == []
    assert f"reason={reason}" in caplog.text


async def test_a_prefill_node_proves_its_incarnation_and_is_no_other(secrets):
    async with running(DECODE_SIDE, NodeRole.DECODE, incarnation="d1", cluster_secret_file=secrets[0]) as d:
        call = node_pb2_grpc.DecodeNodeStub(d.channel).Handoff()

        async def say(message: wire.FromPrefill) -> None:
            await call.write(wire.write_prefill_message(message))

        async def hear() -> wire.FromDecode:
            return wire.read_decode_message(await call.read())

        async with asyncio.timeout(WAIT_S):
            await prove(read_secret(secrets[0]), HANDOFF, "p8", say, hear)
            await say(HELLO)
            assert await call.code() is grpc.StatusCode.UNAUTHENTICATED
        assert await call.details() == "the prefill node has proved to be another incarnation"
        assert not d.role.events
        assert not d.transport.notes


# ---- TLS ----


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    return make_certificate(tmp_path_factory.mktemp("certificates"))


async def test_with_tls_nodes_and_routers_show_each_other_certificates(certificate):
    async with pair(certificate.settings, certificate.settings) as (p, d):
        await d.role.saw(FromPeer)
        async with a_session(p, Subscribe(1, "i1")) as router:  # over the channel that `running` opens, with TLS
            assert (await router.end())[1] == "this is incarnation p1, not i1"


async def test_who_shows_none_or_a_stranger_s_is_not_heard(certificate, tmp_path):
    stranger = make_certificate(tmp_path, "theirs")
    stolen = Certificate(stranger.keyfile, stranger.certfile, certificate.ca_certs)  # believes in ours
    async with running(PREFILL_SIDE, NodeRole.PREFILL, **certificate.settings) as node:
        authorities = grpc.ssl_channel_credentials(certificate.ca_certs.read_bytes())
        channels = [
            grpc.aio.insecure_channel(node.address, options=CHANNEL_OPTIONS),
            grpc.aio.secure_channel(node.address, authorities, options=CHANNEL_OPTIONS),
            open_channel(node.address, node.node._settings.model_copy(update=stolen.settings).trust().tls),
        ]
        for channel in channels:
            async with channel:
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await node_pb2_grpc.NodeStatusStub(channel).Describe(node_pb2.DescribeRequest(), timeout=WAIT_S)
                assert refused.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_node_whose_certificate_names_another_address_is_not_talked_to(certificate, tmp_path):
    elsewhere = make_certificate(tmp_path, names="DNS:node-7.example")
    async with running(PREFILL_SIDE, NodeRole.PREFILL, **elsewhere.settings) as node:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await node_pb2_grpc.NodeStatusStub(node.channel).Describe(node_pb2.DescribeRequest(), timeout=WAIT_S)
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_renewed_certificates_count_from_the_next_connection_on(tmp_path):
    """At both ends; what is open stays open."""
    made, new = make_certificate(tmp_path), make_certificate(tmp_path, "new")
    old = Certificate(*(Path(shutil.copy(path, f"{path}.old")) for path in dataclasses.astuple(made)))
    async with running(PREFILL_SIDE, NodeRole.PREFILL, **made.settings) as node:
        await describe(node.channel)
        ours = node.node._settings.trust().tls
        for renewed, path in zip(dataclasses.astuple(new), dataclasses.astuple(made), strict=True):
            renewed.replace(path)
        async with open_channel(node.address, ours) as channel:
            await describe(channel)
        outdated = node.node._settings.model_copy(update=old.settings).trust().tls
        async with open_channel(node.address, outdated) as channel:
            with pytest.raises(grpc.aio.AioRpcError):
                await describe(channel)
        await describe(node.channel)


async def describe(channel: grpc.aio.Channel) -> None:
    await node_pb2_grpc.NodeStatusStub(channel).Describe(node_pb2.DescribeRequest(), timeout=WAIT_S)


@pytest.mark.parametrize(
    ("name", "is_it"), [("d-0.pool.ns.svc", True), ("pool.ns.svc", True), ("a.d-0.pool.ns.svc", False)]
)
async def test_a_wildcard_stands_for_each_name_below_a_service(tmp_path, name, is_it):
    """So one certificate does for all pods behind headless services."""
    names = "DNS:pool.ns.svc,DNS:*.pool.ns.svc"
    made = make_certificate(tmp_path, names=names)
    async with (
        running(PREFILL_SIDE, NodeRole.PREFILL, **made.settings) as node,
        open_channel(node.address, node.node._settings.trust().tls, name) as channel,
    ):
        asked = node_pb2_grpc.NodeStatusStub(channel).Describe(node_pb2.DescribeRequest(), timeout=WAIT_S)
        if is_it:
            await asked
        else:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await asked
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE


# ---- what an operator is told ----


async def test_a_node_that_others_reach_without_a_secret_is_warned_of(secrets, caplog):
    caplog.set_level(logging.WARNING)
    async with running(PREFILL_SIDE, NodeRole.PREFILL):
        assert caplog.text == ""
    secrets[0].chmod(0o644)
    async with running(PREFILL_SIDE, NodeRole.PREFILL, cluster_secret_file=secrets[0]):
        assert f"--cluster-secret-file: others than its owner may read {secrets[0]}" in caplog.text
