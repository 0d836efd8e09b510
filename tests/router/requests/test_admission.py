"""What is in flight at once: refused before anything is done for it, given back once however it ends."""

import asyncio

import httpx
import pytest

from baton import wire
from baton.errors import BatonError, InvalidRequest, Overloaded
from baton.v1 import generation_pb2 as pb
from baton.v1 import generation_pb2_grpc
from router.requests.admission import LONGEST_RETRY_AFTER_S, Admission, Full
from tests.router.conftest import Router, says
from tests.router.fake_node import Answer
from tests.router.http_shapes import CHAT, error_of


def test_requests_and_tokens_have_limits():
    told: list[BatonError] = []
    admission = Admission(3, 100, on_refused=told.append)
    first = admission.admit(2, 60)
    with pytest.raises(Overloaded, match="max-num-requests"):
        admission.admit(2, 1)
    with pytest.raises(Overloaded, match="max-num-prompt-tokens"):
        admission.admit(1, 50)
    with pytest.raises(InvalidRequest, match="at most 3") as error:
        admission.admit(4, 1)
    assert (error.value.param, len(told)) == ("prompt", 2)
    first.resize(40)
    admission.admit(1, 50)
    assert (admission.num_requests, admission.num_tokens) == (3, 90)


def test_a_share_is_given_back_once():
    admission = Admission()
    with admission.admit(1, 10) as share:
        share.release()
        assert (admission.num_requests, admission.num_tokens) == (0, 0)
    with admission.admit(1, 10) as kept:
        kept.keep()
    assert (admission.num_requests, admission.num_tokens) == (1, 10)
    kept.release()
    kept.release()
    assert (admission.num_requests, admission.num_tokens) == (0, 0)


def test_one_request_alone_has_its_tokens():
    admission = Admission(0, 100)
    with admission.admit(1, 1000), pytest.raises(Overloaded):
        admission.admit(1, 1)


def refused(admission: Admission, num_requests: int, num_tokens: int) -> int:
    with pytest.raises(Full) as error:
        admission.admit(num_requests, num_tokens)
    return error.value.retry_after_s


def test_who_is_refused_learns_when_there_may_be_room():
    now = [0.0]
    admission = Admission(10, 1000, clock=lambda: now[0])
    held = [admission.admit(1, 100) for _ in range(10)]
    assert refused(admission, 1, 1) == 1, "nothing is known"
    now[0] = 20.0
    for share in held[:4]:
        share.keep()
        share.release()
    held[4].release()  # no generation
    assert [admission.admit(1, 100) for _ in range(5)]
    assert refused(admission, 1, 1) == 2, "a tenth of what ends in 20 s"
    assert refused(admission, 5, 1) == 10
    tokens = Admission(0, 1000, clock=lambda: now[0])
    share = tokens.admit(1, 800)
    share.keep()
    now[0] = 100.0
    share.release()
    tokens.admit(1, 800)
    assert refused(tokens, 1, 400) == 20, "a quarter of what ends in 80 s"
    assert refused(tokens, 1, 10**9) == LONGEST_RETRY_AFTER_S


def in_flight(router: Router) -> tuple[int, int]:
    admission = router.server.admission
    return admission.num_requests, admission.num_tokens


async def test_more_prompts_than_can_ever_be_in_flight_are_a_mistake(nodes):
    router = Router(nodes, max_num_requests=2)
    await router.start()
    await router.ready()
    async with httpx.AsyncClient(base_url=router.http, timeout=20) as client:
        response = await client.post("/v1/completions", json={"prompt": ["a", "b", "c"]})
        assert (response.status_code, error_of(response)["param"]) == (400, "prompt")
        assert "--max-num-requests" in error_of(response)["message"]
        assert (await client.post("/v1/completions", json={"prompt": ["a", "b"]})).status_code == 200
    await router.stop()


@pytest.mark.parametrize(
    ("body", "param"),
    [({"prompt": ["a"] * 9, "n": 2}, "prompt"), ({"prompt": "a", "n": 17}, "n"), ({"prompt": ["a"] * 17}, "prompt")],
)
async def test_prompts_times_n_have_one_limit(nodes, body, param):
    router = Router(nodes, max_num_samples=16)
    await router.start()
    await router.ready()
    async with httpx.AsyncClient(base_url=router.http, timeout=20) as client:
        response = await client.post("/v1/completions", json=body)
        assert (response.status_code, error_of(response)["param"]) == (400, param)
        assert "--max-num-samples" in error_of(response)["message"]
        assert (await client.post("/v1/completions", json={"prompt": ["a"] * 8, "n": 2})).status_code == 200
    assert in_flight(router) == (0, 0)
    await router.stop()


async def test_what_is_full_refuses_everything_that_costs(nodes):
    hold = asyncio.Event()
    nodes.script = says("hello", hold=hold)
    router = Router(nodes, max_num_requests=1)
    await router.start()
    await router.ready()
    async with httpx.AsyncClient(base_url=router.http, timeout=20) as client:
        first = asyncio.create_task(client.post("/v1/completions", json={"prompt": [5, 6]}))
        await nodes.until(lambda: nodes.prefills)
        assert in_flight(router) == (1, 2)
        for path, body in (("/tokenize", {"prompt": "x"}), ("/detokenize", {"tokens": [5]}), ("/v1/completions", CHAT)):
            response = await client.post(path, json={"prompt": "x", **body})
            assert (response.status_code, response.headers["retry-after"]) == (429, "1")
        hold.set()
        assert (await first).status_code == 200
        assert (await client.post("/tokenize", json={"prompt": "x"})).status_code == 200
        router.server._service.offload.size = 10**9  # as if so much text were being worked on
        response = await client.post("/v1/completions", json={"prompt": "x" * 2000})
        assert (response.status_code, "being worked on" in response.text) == (429, True)
        metrics = (await client.get("/metrics")).text
        assert 'request_ends_total{model_name="tiny",outcome="failed",reason="overloaded",role="router"} 4.0' in metrics
    assert in_flight(router) == (0, 0)
    await router.stop()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("more", "status"),
    [
        ({}, 200),
        ({"stop": "lo"}, 200),
        ({"timeout": 0.2, "cache_salt": "hold"}, 504),
        ({"cache_salt": "fail"}, 400),
        ({"top_p": 7}, 400),
        ({"max_tokens": 4000}, 400),
        ({"prompt": "x" * 500}, 400),
        ({"prompt": ["x", [400_000]]}, 400),
    ],
)
async def test_it_is_given_back_however_it_ends(client, nodes, router, stream, more, status):
    hold = asyncio.Event()

    def script(prefill):
        if prefill.cache_salt == "fail":
            return Answer(error=InvalidRequest("no"))
        return says("hello world", hold=hold if prefill.cache_salt else None)(prefill)

    nodes.script = script
    body = {"prompt": ["hi", "you"], "n": 2, "stream": stream, **more}
    assert (await client.post("/v1/completions", json=body)).status_code == status
    await router.idle()
    assert in_flight(router) == (0, 0)


async def test_it_is_given_back_when_the_client_leaves(client, nodes, router):
    nodes.script = says("hello world", hold=asyncio.Event())
    request = asyncio.create_task(client.post("/v1/chat/completions", json=CHAT))
    await nodes.until(lambda: nodes.prefills)
    assert in_flight(router)[0] == 1
    request.cancel()
    await router.idle()
    assert in_flight(router) == (0, 0)


async def test_grpc_counts_too(nodes):
    import grpc

    hold = asyncio.Event()
    nodes.script = says("hello", hold=hold)
    router = Router(nodes, max_num_requests=1)
    await router.start()
    await router.ready()
    async with grpc.aio.insecure_channel(router.grpc) as channel:
        stub = generation_pb2_grpc.GenerationStub(channel)
        first = stub.Generate(pb.GenerateRequest(prompt="x"))
        await nodes.until(lambda: nodes.prefills)
        ids = wire.pack_tokens((5,))
        for call in (
            stub.Tokenize(pb.TokenizeRequest(prompt="x")),
            stub.Detokenize(pb.DetokenizeRequest(token_ids=ids)),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await call
            assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        hold.set()
        async for _ in first:
            pass
        await stub.Tokenize(pb.TokenizeRequest(prompt="x"))
    await router.idle()
    assert in_flight(router) == (0, 0)
    await router.stop()
