"""Who may ask: API keys, whose cache is whose, web pages of other origins, and what is told to whom."""

import asyncio
import contextlib

import grpc
import grpc.aio
import httpx
import openai
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from pydantic import SecretStr

from baton.settings import parse
from baton.v1 import generation_pb2 as pb
from baton.v1 import generation_pb2_grpc
from router.api_keys import ApiKeys, InvalidApiKey, UnusableKeys
from router.settings import RouterSettings
from router.startup import StartError
from tests.router.conftest import Router
from tests.router.http_shapes import CHAT, error_of
from tests.router.http_wire import peer

NODES = ("--prefill", "127.0.0.1:1", "--decode", "127.0.0.1:2")
KEYS = (SecretStr("sk-one"), SecretStr("sk-two"))
PAGE = "https://chat.example"


@contextlib.asynccontextmanager
async def running(nodes, **settings):
    """A ready router, and a client of its HTTP API."""
    router = Router(nodes, **settings)
    await router.start()
    await router.ready()
    try:
        async with httpx.AsyncClient(base_url=router.http, timeout=20) as client:
            yield router, client
    finally:
        await router.stop()


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


# ---- keys ----


async def test_http_needs_a_key_but_for_what_says_that_it_lives(nodes):
    async with running(nodes, api_key=KEYS) as (router, client):
        for headers in (
            {},
            bearer("sk-on"),
            bearer("sk-onee"),
            {"authorization": "Bearer"},
            {"authorization": "sk-one"},
        ):
            answer = await client.post("/v1/chat/completions", json=CHAT, headers=headers)
            assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
            assert error_of(answer)["code"] == "invalid_api_key"
            assert answer.headers["x-request-id"]
        for path in ("/v1/models", "/version", "/model_info", "/server_info", "/nothing", "/health/", "/%2Fhealth"):
            assert (await client.get(path)).status_code == 401, path
        for path in ("/health", "/health_generate", "/ready", "/metrics"):
            assert (await client.get(path)).status_code == 200, path
        for key in ("sk-one", "sk-two"):
            assert (await client.post("/v1/chat/completions", json=CHAT, headers=bearer(key))).status_code == 200
        for headers, status in (
            ({"x-api-key": "sk-two"}, 200),
            ({"x-api-key": "sk-tw"}, 401),
            ({"x-api-key": ""}, 401),
            ({"x-api-key": "sk-two", **bearer("sk-no")}, 401),
            ({"x-api-key": "sk-no", **bearer("sk-two")}, 200),
        ):
            assert (await client.get("/v1/models", headers=headers)).status_code == status
        with pytest.raises(openai.AuthenticationError):
            async with openai.AsyncOpenAI(base_url=f"{router.http}/v1", api_key="no", max_retries=0) as wrong:
                await wrong.models.list()
        assert nodes.prefills
        assert len(nodes.prefills) == 2


async def test_metrics_can_need_a_key(nodes):
    async with running(nodes, api_key=KEYS, protect_metrics=True) as (_, client):
        assert (await client.get("/metrics")).status_code == 401
        assert (await client.get("/metrics", headers=bearer("sk-one"))).status_code == 200


async def test_grpc_needs_a_key_too(nodes):
    async with running(nodes, api_key=KEYS) as (router, _), grpc.aio.insecure_channel(router.grpc) as channel:
        stub = generation_pb2_grpc.GenerationStub(channel)
        for metadata in ((), (("authorization", "Bearer nobody"),)):
            for call in (
                stub.ListModels(pb.ListModelsRequest(), metadata=metadata),
                stub.Generate(pb.GenerateRequest(prompt="x"), metadata=metadata).read(),
            ):
                with pytest.raises(grpc.aio.AioRpcError) as error:
                    await call
                assert error.value.code() is grpc.StatusCode.UNAUTHENTICATED
        known = (("authorization", "Bearer sk-two"),)
        assert (await stub.ListModels(pb.ListModelsRequest(), metadata=known)).models[0].id == "tiny"
        assert [r async for r in stub.Generate(pb.GenerateRequest(prompt="x"), metadata=known)]
        health = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        assert health.status == health_pb2.HealthCheckResponse.SERVING


def test_a_file_of_keys_is_read_again(tmp_path, caplog):
    now, file = 0.0, tmp_path / "keys"
    file.write_text("# of the team\nsk-a\n\n  sk-b  \n")
    keys = ApiKeys(["sk-given"], file, clock=lambda: now)

    def known(key: str) -> bool:
        with contextlib.suppress(InvalidApiKey):
            keys.owner(f"Bearer {key}")
            return True
        return False

    names = ("sk-given", "sk-a", "sk-b", "sk-c", "# of the team", "")
    assert [known(key) for key in names] == [True, True, True, False, False, False]
    file.write_text("sk-c-longer\n")
    assert known("sk-a")  # it is looked at once a second
    now = 1.0
    assert [known(key) for key in ("sk-given", "sk-a", "sk-c-longer")] == [True, False, True]
    file.write_text("sk-d with a space\n")
    now = 2.0
    assert [known(key) for key in ("sk-c-longer", "sk-d")] == [True, False]
    file.unlink()
    now = 3.0
    assert known("sk-c-longer")
    assert caplog.text.count("the keys stay as they were") == 2
    assert "sk-" not in caplog.text.replace("sk-given", "")
    with pytest.raises(UnusableKeys, match="cannot read"):
        ApiKeys([], file)


async def test_every_known_key_is_compared(monkeypatch):
    keys, compared = ApiKeys([f"sk-{i}" for i in range(5)]), []
    monkeypatch.setattr("hmac.compare_digest", lambda a, b: compared.append((a, b)) or a == b)
    keys.owner("Bearer sk-0")
    assert len(compared) == 5
    assert all(len(digest) == 32 for pair in compared for digest in pair)


def test_keys_are_shown_nowhere(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("BATON_API_KEY", "sk-secret sk-other")
    settings = parse(RouterSettings, NODES)
    assert [key.get_secret_value() for key in settings.api_key] == ["sk-secret", "sk-other"]
    assert "sk-secret" not in f"{settings!r} {settings} {settings.model_dump()} {settings.model_dump_json()}"
    flags = parse(RouterSettings, (*NODES, "--api-key", "a1", "--api-key=b2"))
    assert [key.get_secret_value() for key in flags.api_key] == ["a1", "b2"]
    config = tmp_path / "baton.yaml"
    config.write_text("api-key: [secret-in, [secret-list]]")
    for argv in (
        ("--help",),
        (*NODES, "--api-key", "sécret"),
        (*NODES, "--api-key", ""),
        (*NODES, "--config", str(config)),
    ):
        if "--config" in argv:
            monkeypatch.delenv("BATON_API_KEY")
        with pytest.raises(SystemExit):
            parse(RouterSettings, argv)
        out = "".join(capsys.readouterr())
        assert "--api-key" in out
        assert "cret" not in out.replace("cluster-secret-file", "").replace("with a secret", "")


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--cache-salt-per-key",), "--cache-salt-per-key: needs --api-key"),
        (("--protect-metrics",), "--protect-metrics: needs --api-key"),
        (("--ssl-keyfile", "k"), "--ssl-keyfile: needs --ssl-certfile"),
        (("--ssl-ca-certs", "k"), "--ssl-ca-certs: needs --ssl-certfile"),
        (("--ssl-certfile", "c", "--ssl-cert-reqs", "2"), "--ssl-cert-reqs: needs --ssl-ca-certs"),
        (("--allowed-origins", "*", "--allow-credentials"), "--allow-credentials: name"),
        (("--max-buffered-body-bytes", "2048"), "--max-buffered-body-bytes: must not be below"),
    ],
)
def test_settings_that_cannot_work_together(flags, says, capsys):
    with pytest.raises(SystemExit):
        parse(RouterSettings, (*NODES, *flags))
    assert says in capsys.readouterr().err


async def test_a_file_of_keys_must_be_there_at_the_start(nodes, tmp_path):
    with pytest.raises(StartError, match="--api-key-file: cannot read"):
        await Router(nodes, api_key_file=tmp_path / "none").start()


# ---- whose cache is whose ----


async def test_keys_share_no_cache_when_told_so(nodes):
    async with running(nodes, api_key=KEYS, cache_salt_per_key=True) as (router, client):
        for key, salt in (("sk-one", ""), ("sk-one", ""), ("sk-two", ""), ("sk-one", "s"), ("sk-two", "s")):
            body = {**CHAT, "cache_salt": salt} if salt else CHAT
            assert (await client.post("/v1/chat/completions", json=body, headers=bearer(key))).status_code == 200
        tokens = {"token_ids": [5]}
        for path, body in (("/inference/v1/generate", tokens), ("/generate", {"input_ids": [5]})):
            assert (await client.post(path, json=body, headers=bearer("sk-two"))).status_code == 200
            assert nodes.prefills.pop().cache_salt == nodes.prefills[2].cache_salt
        messages = {**CHAT, "max_tokens": 5}
        assert (await client.post("/v1/messages", json=messages, headers={"x-api-key": "sk-two"})).status_code == 200
        salts = [prefill.cache_salt for prefill in nodes.prefills]
        assert salts[0] == salts[1]
        assert salts.pop() == salts[2]
        assert len(set(salts)) == 4
        assert all(len(salt) == 64 for salt in salts)
        async with grpc.aio.insecure_channel(router.grpc) as channel:
            request = pb.GenerateRequest(prompt="x", cache_salt="s")
            call = generation_pb2_grpc.GenerationStub(channel).Generate(
                request, metadata=(("authorization", "Bearer sk-two"),)
            )
            assert [r async for r in call]
        assert nodes.prefills[-1].cache_salt == salts[4]


async def test_without_the_flag_salts_are_the_clients_own(nodes):
    async with running(nodes, api_key=KEYS) as (_, client):
        await client.post("/v1/chat/completions", json={**CHAT, "cache_salt": "s"}, headers=bearer("sk-one"))
        assert nodes.prefills[-1].cache_salt == "s"


# ---- what is told ----


@pytest.mark.parametrize("timings", [True, False])
async def test_timings_and_cached_tokens_can_be_kept_from_clients(nodes, timings):
    async with running(nodes, timings=timings) as (router, client):
        whole = (await client.post("/v1/chat/completions", json=CHAT)).json()
        stream = {**CHAT, "stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
        text = (await client.post("/v1/chat/completions", json=stream)).text
        plain = (await client.post("/v1/completions", json={"prompt": "x", "stream": True})).text
        assert ("timings" in whole, "timings" in text, "timings" in plain) == (timings,) * 3
        assert bool(whole["usage"]["prompt_tokens_details"]) is timings
        assert ("cached_tokens" in text) is timings
        meta = (await client.post("/generate", json={"text": "x"})).json()["meta_info"]
        assert (meta["cached_tokens"] is not None, "e2e_latency" in meta) == (timings, timings)
        async with grpc.aio.insecure_channel(router.grpc) as channel:
            call = generation_pb2_grpc.GenerationStub(channel).Generate(pb.GenerateRequest(prompt="x"))
            finished = [r async for r in call][-1].finished
        assert finished.HasField("timings") is timings
        assert finished.usage.num_completion_tokens


# ---- web pages ----


async def test_pages_of_other_origins_are_let_in_by_name(nodes):
    asks = {"origin": PAGE, "access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    async with running(nodes, api_key=KEYS, allowed_origins=(PAGE,)) as (_, client):
        answer = await client.options("/v1/chat/completions", headers=asks)  # without a key, as browsers do
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, PAGE)
        assert "authorization" in answer.headers["access-control-allow-headers"].lower()
        other = await client.options("/v1/chat/completions", headers={**asks, "origin": "https://evil.example"})
        assert "access-control-allow-origin" not in other.headers
        for headers, status in ((bearer("sk-one"), 200), ({}, 401)):
            answer = await client.post("/v1/chat/completions", json=CHAT, headers={**headers, "origin": PAGE})
            assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (status, PAGE)
            assert "x-request-id" in answer.headers["access-control-expose-headers"].lower()


async def test_without_origins_no_page_may_read_an_answer(client):
    answer = await client.post("/v1/chat/completions", json=CHAT, headers={"origin": PAGE})
    assert not [name for name in answer.headers if name.startswith("access-control")]


@pytest.mark.parametrize("given", ["https://a,https://b", '["https://a", "https://b"]'])
def test_origins_as_ours_and_as_vllms(given):
    assert parse(RouterSettings, (*NODES, "--allowed-origins", given)).allowed_origins == ("https://a", "https://b")


# ---- bodies ----


async def test_bodies_have_a_limit_alone_and_together(nodes, caplog):
    big = b'{"prompt": "' + b"x" * 5000 + b'"}'
    async with running(nodes, max_body_bytes=4096, max_buffered_body_bytes=6000) as (_, client):

        async def pieces():
            for _ in range(10):
                yield b" " * 1000

        for content in (big, pieces()):
            answer = await client.post("/v1/completions", content=content)
            assert (answer.status_code, error_of(answer)["message"]) == (
                413,
                "The request body is larger than 4096 bytes (--max-body-bytes).",
            )
        sent, more = asyncio.Event(), asyncio.Event()

        async def slowly():
            yield b" " * 3500
            sent.set()
            await more.wait()
            yield b'{"prompt": "x"}'

        first = asyncio.create_task(client.post("/v1/completions", content=slowly()))
        await sent.wait()
        async with asyncio.timeout(20):
            while True:  # until the first has been read
                answer = await client.post("/v1/completions", content=b" " * 3500 + b'{"prompt": "x"}')
                if answer.status_code != 200:
                    break
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
        assert caplog.text.count("--max-buffered-body-bytes=6000") == 1
        metrics = (await client.get("/metrics")).text
        assert 'request_ends_total{model_name="tiny",outcome="failed",reason="overloaded",role="router"} 1.0' in metrics
        more.set()
        assert (await first).status_code == 200
        assert (await client.post("/v1/completions", content=b" " * 3500 + b'{"prompt": "x"}')).status_code == 200


async def test_a_length_of_thousands_of_digits_is_too_long(router):
    async with peer(router.server.http_address.port) as client:
        await client.send(b"POST /tokenize HTTP/1.1\r\nhost: x\r\ncontent-length: " + b"0" * 5000 + b"2\r\n\r\n{}")
        assert (await client.answer())[0] == 413


async def test_a_host_that_is_none_breaks_nothing(client):
    for path in ("/nothing", "/health/", "/v1/chat/completions/"):
        answer = await client.get(path, headers={"host": "["})
        assert answer.status_code == 404
        assert error_of(answer)["type"] == "invalid_request_error"
