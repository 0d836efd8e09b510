"""Nodes that a router believes, and why it does not believe others: told on /ready."""

from __future__ import annotations

import asyncio
import functools
import socket

import pytest

from baton.node_info import NodeRole
from baton.rpc.cluster_secret import read_secret
from baton.rpc.trust import Trust
from baton.settings import SettingsError, load
from deploy.ready import wait_until_serving
from router.settings import RouterSettings
from tests.certificates import make_certificate
from tests.router.conftest import Router, says
from tests.router.fake_node import PATIENCE_S, FakeCluster

SECRETS = "a secret of a cluster", "that of another cluster"
REASONS = {
    (None, 0): "this node wants a cluster secret, and the router has none",
    (0, None): "the router has a cluster secret, and this node has none",
    (0, 1): "the cluster secret differs: what the router has is not this node's",
    (0, 0): "",
}


@pytest.fixture
async def nodes():
    """Stopped until a test says whom they believe."""
    cluster = FakeCluster(says("hello world"))
    for role in NodeRole:
        await (await cluster.add(role)).stop()
    yield cluster
    await cluster.close()


@pytest.mark.parametrize(("ours", "theirs"), REASONS)
async def test_secrets_that_do_not_fit_are_named_on_ready(nodes, tmp_path, ours, theirs):
    files = [tmp_path / "one", tmp_path / "other"]
    for path, text in zip(files, SECRETS, strict=True):
        path.write_text(text)
    for node in nodes.nodes:
        node.trust = Trust(secret=None if theirs is None else read_secret(files[theirs]))
        await node.restart()
    router = Router(nodes, cluster_secret_file=None if ours is None else files[ours])
    await router.start()
    reason = REASONS[ours, theirs]
    if reason:
        await router.until(lambda: router.server.cluster.readiness().status.count(reason) == 2)
        assert not any(node.sessions for node in nodes.nodes)
    else:
        await router.ready()
    await router.stop()


def all_reached(router: Router) -> bool:
    return "not reached yet" not in router.problems()


async def test_a_router_speaks_tls_with_nodes_and_shows_its_certificate(nodes, tmp_path):
    certificate = make_certificate(tmp_path)
    settings = RouterSettings(decode="127.0.0.1:1", **certificate.settings)
    for node in nodes.nodes:
        node.trust = settings.trust()
        await node.restart()
    for files, is_ready in ((certificate.settings, True), ({}, False)):
        router = Router(nodes, **files)
        await router.start()
        if is_ready:
            await router.ready()
        else:
            await router.until(functools.partial(all_reached, router))
            assert not router.server.cluster.readiness().ready
        await router.stop()


async def test_a_proxy_for_the_outside_is_not_asked_for_addresses_of_the_cluster(nodes, tmp_path, monkeypatch):
    """Neither by the router, with and without TLS, nor by the command that waits for it."""
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        proxy = f"http://127.0.0.1:{nobody.getsockname()[1]}"  # free when the block ends
    for name in ("http_proxy", "https_proxy", "grpc_proxy"):
        monkeypatch.setenv(name, proxy)
    for name in ("no_proxy", "no_grpc_proxy"):
        monkeypatch.delenv(name, raising=False)
    for files in ({}, make_certificate(tmp_path).settings):
        for node in nodes.nodes:
            node.trust = RouterSettings(decode="127.0.0.1:1", **files).trust()
            await node.restart()
        router = Router(nodes, **files)
        await router.start()
        await router.ready()
        async with asyncio.timeout(PATIENCE_S):
            await wait_until_serving(router.server.grpc_address)
        await router.stop()


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["secret_file"], "--cluster-secret-file: {folder}/short has 5 bytes, and needs 16 or more"),
        (["ssl_keyfile"], "--cluster-ssl-keyfile, --cluster-ssl-certfile, --cluster-ssl-ca-certs: all three or none"),
        (
            ["ssl_keyfile", "ssl_certfile", "ssl_ca_certs"],
            "--cluster-ssl-keyfile, --cluster-ssl-certfile: no key with its certificate: ",
        ),
    ],
)
def test_files_that_cannot_be_used_end_the_start_with_the_name_of_the_flag(tmp_path, flags, text):
    path = tmp_path / "short"
    path.write_text("short")
    with pytest.raises(SettingsError) as error:
        load(RouterSettings, {"decode": ["127.0.0.1:1"], **{f"cluster_{flag}": str(path) for flag in flags}})
    assert str(error.value).startswith(text.format(folder=tmp_path))
