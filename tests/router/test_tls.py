"""TLS on the public ports, and files that cannot be used."""

import asyncio
import shutil
import ssl
from pathlib import Path

import grpc
import grpc.aio
import httpx
import pytest

from baton.v1 import generation_pb2 as pb
from baton.v1 import generation_pb2_grpc
from router.startup import StartError
from tests.router.certificates import Certificates, encrypt_key, make_certificates
from tests.router.conftest import Router
from tests.router.http_shapes import CHAT


@pytest.fixture(scope="module")
def certificates(tmp_path_factory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("certificates"))


@pytest.mark.parametrize("needed", [False, True])
async def test_both_ports_speak_tls(nodes, certificates, needed):
    settings = {"ssl_ca_certs": certificates.ca, "ssl_cert_reqs": 2} if needed else {}
    router = Router(nodes, ssl_certfile=certificates.cert, ssl_keyfile=certificates.key, **settings)
    await router.start()
    await router.ready()
    try:
        trust = ssl.create_default_context(cafile=certificates.ca)
        url = router.http.replace("http:", "https:")
        if needed:
            async with httpx.AsyncClient(base_url=url, verify=trust) as stranger:
                with pytest.raises(httpx.TransportError):
                    await stranger.get("/health")
            trust = ssl.create_default_context(cafile=certificates.ca)
            trust.load_cert_chain(certificates.cert, certificates.key)
        async with httpx.AsyncClient(base_url=url, verify=trust, timeout=20) as client:
            assert (await client.get("/health")).json() == {"status": "ok"}
            assert "data: [DONE]" in (await client.post("/v1/chat/completions", json={**CHAT, "stream": True})).text
        own = (certificates.key.read_bytes(), certificates.cert.read_bytes()) if needed else (None, None)
        credentials = grpc.ssl_channel_credentials(certificates.ca.read_bytes(), *own)
        async with grpc.aio.secure_channel(router.grpc, credentials) as channel:
            stub = generation_pb2_grpc.GenerationStub(channel)
            assert (await stub.ListModels(pb.ListModelsRequest(), timeout=20)).models[0].id == "tiny"
        async with httpx.AsyncClient(base_url=router.http) as plain:
            with pytest.raises(httpx.TransportError):
                await plain.get("/health")
    finally:
        await router.stop()


async def test_renewed_certificates_count_from_the_next_connection_on(nodes, tmp_path):
    """For HTTP and gRPC, also the authorities that clients must be signed by."""
    old, new = (make_certificates(tmp_path / name) for name in ("old", "new"))
    served = Certificates(Path(shutil.copytree(old.folder, tmp_path / "served")))
    router = Router(
        nodes, ssl_certfile=served.cert, ssl_keyfile=served.key, ssl_ca_certs=served.ca, ssl_cert_reqs=ssl.CERT_REQUIRED
    )
    await router.start()
    await router.ready()
    async with client_of(router, old) as connected:
        try:
            await connected.get("/health")
            shutil.copy(new.cert, served.cert)
            await ask(router, old)  # the key is still the old one
            for path in (new.key, new.ca):
                shutil.copy(path, served.folder)
            await ask(router, new)
            with pytest.raises((httpx.TransportError, grpc.aio.AioRpcError)):
                await ask(router, old)
            await connected.get("/health")
        finally:
            await router.stop()


async def ask(router: Router, certificates: Certificates) -> None:
    """Both ports, by new connections."""
    async with client_of(router, certificates) as client:
        await client.get("/health")
    files = (path.read_bytes() for path in (certificates.ca, certificates.key, certificates.cert))
    credentials = grpc.ssl_channel_credentials(*files)
    alone = [("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.secure_channel(router.grpc, credentials, options=alone) as channel:
        await generation_pb2_grpc.GenerationStub(channel).ListModels(pb.ListModelsRequest(), timeout=20)


def client_of(router: Router, certificates: Certificates) -> httpx.AsyncClient:
    trust = ssl.create_default_context(cafile=certificates.ca)
    trust.load_cert_chain(certificates.cert, certificates.key)
    return httpx.AsyncClient(base_url=router.http.replace("http:", "https:"), verify=trust, timeout=20)


async def test_who_says_nothing_does_not_keep_its_connection(nodes, certificates):
    router = Router(nodes, ssl_certfile=certificates.cert, ssl_keyfile=certificates.key, header_timeout=0.2)
    await router.start()
    try:
        address = router.server.http_address
        reader, writer = await asyncio.open_connection(address.host, address.port)
        async with asyncio.timeout(20):
            assert await reader.read() == b""
        writer.close()
    finally:
        await router.stop()


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({"ssl_certfile": "none.pem"}, "--ssl-certfile: cannot read .*none.pem: No such file"),
        ({"ssl_certfile": "cert.pem", "ssl_keyfile": "none.pem"}, "--ssl-keyfile: cannot read"),
        ({"ssl_certfile": "cert.pem", "ssl_keyfile": "ca.key"}, "--ssl-certfile, --ssl-keyfile: .*KEY_VALUES_MISMATCH"),
        ({"ssl_certfile": "cert.pem"}, "--ssl-certfile, --ssl-keyfile: .*the key in it"),
        ({"ssl_certfile": "cert.pem", "ssl_keyfile": "locked.pem"}, "the key is encrypted"),
        (
            {"ssl_certfile": "cert.pem", "ssl_keyfile": "key.pem", "ssl_ca_certs": "key.pem"},
            "--ssl-ca-certs: .*holds no certificates",
        ),
    ],
)
async def test_files_that_cannot_be_used_are_named(nodes, certificates, files, says):
    encrypt_key(certificates)
    paths = {name: certificates.folder / file for name, file in files.items()}
    with pytest.raises(StartError, match=says) as error:
        await Router(nodes, **paths).start()
    assert "\n" not in str(error.value)
