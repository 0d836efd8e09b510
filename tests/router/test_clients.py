"""Real clients: openai's over HTTP, a generated one over gRPC; and clients that leave."""

import asyncio
import json
from typing import Any

import grpc
import grpc.aio
import httpx
import openai
import pytest
import pytest_asyncio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from baton import wire
from baton.errors import Overloaded
from baton.logits_processors import LogitsProcessor
from baton.v1 import common_pb2, generation_pb2_grpc, node_pb2
from baton.v1 import generation_pb2 as pb
from tests.router.conftest import Router, on_shared_loop, running_router, says, shared_fixtures, two_nodes
from tests.router.fake_node import PATIENCE_S, Answer
from tests.router.tiny_tokenizer import IM_END, tiny_tokenizer

MESSAGES = [{"role": "user", "content": "hi"}]
INVALID = grpc.StatusCode.INVALID_ARGUMENT


pytestmark = on_shared_loop
nodes, router, _ = shared_fixtures()


@pytest_asyncio.fixture(loop_scope="module")
async def client(router):
    async with openai.AsyncOpenAI(base_url=f"{router.http}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest_asyncio.fixture(loop_scope="module")
async def channel(router):
    async with grpc.aio.insecure_channel(router.grpc) as channel:
        yield channel


@pytest.fixture
def stub(channel):
    return generation_pb2_grpc.GenerationStub(channel)


# ---- openai ----


async def test_openai_chat(client):
    answer = await client.chat.completions.create(model="tiny", messages=MESSAGES, logprobs=True, top_logprobs=1)
    assert answer.choices[0].message.content == "hello world"
    assert answer.choices[0].logprobs.content[0].top_logprobs[0].logprob == -0.5
    assert answer.usage.prompt_tokens_details.cached_tokens == 0
    assert [model.id async for model in client.models.list()] == ["tiny"]


async def test_openai_stream(client):
    options = {"include_usage": True}
    stream = await client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True, stream_options=options)
    chunks = [chunk async for chunk in stream]
    assert "".join(c.choices[0].delta.content for c in chunks if c.choices) == "hello world"
    assert chunks[-1].usage.completion_tokens > 0
    stream = await client.completions.create(model="tiny", prompt="x", stream=True, n=2)
    texts = ["", ""]
    async for chunk in stream:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == ["hello world"] * 2


async def test_openai_errors(client, nodes):
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        await client.chat.completions.create(model="other", messages=MESSAGES)
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        await client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=1000)
    nodes.script = lambda prefill: Answer(error=Overloaded("full"))
    with pytest.raises(openai.RateLimitError):
        await client.chat.completions.create(model="tiny", messages=MESSAGES)


async def test_openai_sees_an_error_in_mid_stream(client, nodes):
    nodes.script = says("hello world, hello there", hold=asyncio.Event(), hold_at=2)
    stream = await client.chat.completions.create(
        model="tiny", messages=MESSAGES, stream=True, extra_body={"timeout": 1}
    )
    with pytest.raises(openai.APIError, match="not finished within"):
        async for _ in stream:
            pass


# ---- clients that leave ----


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("hold_at", [0, 2])
async def test_a_client_that_leaves_cancels_its_request(nodes, stream, hold_at):
    nodes.script = says("hello world, hello there", hold=asyncio.Event(), hold_at=hold_at)
    async with running_router(nodes) as router, httpx.AsyncClient(base_url=router.http, timeout=20) as http:
        body = {"messages": MESSAGES, "stream": stream, "n": 2}
        request = asyncio.create_task(http.post("/v1/chat/completions", json=body))
        await nodes.until(lambda: nodes.prefills)
        request.cancel()
        await nodes.until(lambda: nodes.aborts)
        await router.idle()
        metrics = (await http.get("/metrics")).text
    assert 'request_ends_total{model_name="tiny",outcome="cancelled",reason="",role="router"} 1.0' in metrics


async def test_a_grpc_client_that_leaves_cancels_its_request(router, nodes, stub, caplog):
    caplog.set_level("INFO", logger="router.grpc.service")
    nodes.script = says("hello world, hello there", hold=asyncio.Event(), hold_at=2)
    call = stub.Generate(pb.GenerateRequest(prompt="x"))
    assert (await call.read()).WhichOneof("event") == "started"
    assert (await call.read()).delta.token_ids
    call.cancel()
    await nodes.until(lambda: nodes.aborts)
    await router.idle()
    await nodes.until(lambda: caplog.records)
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("grpc Generate status=CANCELLED took_ms=")


# ---- gRPC ----


async def collect(call) -> tuple[pb.GenerationStarted, list[pb.GenerationDelta], pb.GenerationFinished]:
    responses = [response async for response in call]
    kinds = [response.WhichOneof("event") for response in responses]
    assert kinds == ["started", *["delta"] * (len(kinds) - 2), "finished"]
    return responses[0].started, [r.delta for r in responses[1:-1]], responses[-1].finished


async def test_grpc_generate(stub, nodes):
    for _ in range(50):
        call = stub.Generate(pb.GenerateRequest(prompt="hello", logprobs=2), metadata=(("x-request-id", "mine"),))
        assert dict(await call.initial_metadata())["x-request-id"] == "mine"
        started, deltas, finished = await collect(call)
        if finished.timings.prefill_s:  # the answer may end before the prefill node's report has come
            break
    ids = tuple(token for delta in deltas for token in wire.unpack_tokens(delta.token_ids))
    assert ids == (*tiny_tokenizer().encode("hello world", False), IM_END)
    assert "".join(delta.text for delta in deltas) == "hello world"
    assert sum(len(delta.logprobs) for delta in deltas) == len(ids)
    assert deltas[-1].finish_reason == node_pb2.FINISH_REASON_STOP
    assert started.num_prompt_tokens == finished.usage.num_prompt_tokens == len(nodes.prefills[0].prompt_tokens)
    assert (finished.usage.num_completion_tokens, finished.timings.decode_node) == (len(ids), "decode-1")
    told = finished.timings
    assert (told.prefill_s, told.gather_s, told.wire_s, told.commit_s) == (0.002, 0.005, 0.006, 0.001)
    assert (told.transfer_s, told.scatter_s, told.step_wait_s) == (0.003, 0.002, 0.004)
    assert told.handoff_s == pytest.approx(0.008)
    assert nodes.prefills[0].attempt_id.request_id.startswith("mine.")


async def test_grpc_inputs(stub, nodes):
    ids = pb.TokenIds(ids=wire.pack_tokens((5, 6, 7)))
    await collect(stub.Generate(pb.GenerateRequest(prompt_tokens=ids, temperature=0, seed=-3, max_tokens=1)))
    assert nodes.prefills[0].prompt_tokens == (5, 6, 7)
    assert (nodes.prefills[0].sampling.temperature, nodes.prefills[0].sampling.seed) == (0.0, 2**64 - 3)
    chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="hi")])
    await collect(stub.Generate(pb.GenerateRequest(chat=chat)))
    text = tiny_tokenizer().decode(nodes.prefills[1].prompt_tokens, False)
    assert text == "<|bos|><|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


async def test_a_grpc_chat_may_be_json(stub, nodes):
    """As a client of the HTTP API says it."""
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "he"}]
    chat = pb.Chat(json=json.dumps({"messages": messages, "continue_final_message": True}))
    await collect(stub.Generate(pb.GenerateRequest(chat=chat)))
    text = tiny_tokenizer().decode(nodes.prefills[0].prompt_tokens, False)
    assert text == "<|bos|><|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nhe"
    tokens = (await stub.Tokenize(pb.TokenizeRequest(chat=chat))).token_ids
    assert wire.unpack_tokens(tokens) == nodes.prefills[0].prompt_tokens


@pytest.mark.parametrize(
    ("chat", "said"),
    [
        (pb.Chat(json="{"), "The chat is invalid: .* not valid JSON"),
        (pb.Chat(json="[]"), "must be a JSON object"),
        (pb.Chat(json='{"messages": []}'), "messages must not be empty"),
        (pb.Chat(json='{"messages": [{"content": "hi"}]}'), "messages.*role"),
        (pb.Chat(json='{"messages": [{"role": "user"}], "chat_template": "x"}'), "--trust-request-chat-template"),
        (pb.Chat(json="{}", messages=[pb.ChatMessage(role="user")]), "either messages or json"),
    ],
)
async def test_a_grpc_chat_that_is_no_chat_is_refused(stub, nodes, chat, said):
    with pytest.raises(grpc.aio.AioRpcError, match=said) as error:
        await collect(stub.Generate(pb.GenerateRequest(chat=chat)))
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert not nodes.prefills


async def test_grpc_allowed_tokens_bad_words_and_truncation(stub, nodes):
    request = pb.GenerateRequest(
        prompt="abc " * 100,
        allowed_token_ids=[5, 7],
        bad_words=["x", "x"],
        logprob_token_ids=[9, 7],
        truncate_prompt_tokens=9,
        skip_special_tokens=False,
        spaces_between_special_tokens=False,
        priority=-3,
        logits_processors=[common_pb2.LogitsProcessor(name="forced", arguments='{"args":[1]}')],
    )
    await collect(stub.Generate(request))
    (prefill,) = nodes.prefills
    assert prefill.priority == -3
    assert prefill.sampling.logits_processors == (LogitsProcessor("forced", '{"args":[1]}'),)
    assert prefill.prompt_tokens == tiny_tokenizer().encode("abc " * 100, True, 9)
    assert (len(prefill.prompt_tokens), prefill.sampling.allowed_token_ids) == (9, {5, 7})
    assert tiny_tokenizer().encode("x", False) in prefill.sampling.bad_words_token_ids
    assert (prefill.sampling.logprob_token_ids, prefill.sampling.num_logprobs) == ((9, 7), 2)


async def test_grpc_beam_search(stub, nodes):
    request = pb.GenerateRequest(prompt="abc", beam_width=3, length_penalty=0.0, temperature=0.0, max_tokens=4)
    _, deltas, _ = await collect(stub.Generate(request))
    assert {delta.index for delta in deltas} == {0, 1, 2}
    sampling = nodes.prefills[0].sampling
    assert (sampling.beam_width, sampling.length_penalty) == (3, 0.0)


async def test_grpc_stops_and_samples(stub, nodes):
    nodes.script = says("the lazy dog")
    _, deltas, finished = await collect(stub.Generate(pb.GenerateRequest(prompt="x", n=2, stop=["lazy"])))
    ends = [delta for delta in deltas if delta.finish_reason]
    assert {delta.index: delta.stop_string for delta in ends} == {0: "lazy", 1: "lazy"}
    assert "".join(delta.text for delta in deltas if delta.index == 1) == "the "
    assert finished.usage.num_completion_tokens % 2 == 0


@pytest.mark.parametrize(
    ("request_", "status", "says_", "param"),
    [
        (pb.GenerateRequest(), INVALID, "no input", "input"),
        (pb.GenerateRequest(prompt="x", model="other"), grpc.StatusCode.NOT_FOUND, "does not exist", "model"),
        (pb.GenerateRequest(prompt="x", top_p=2), INVALID, "top_p", "top_p"),
        (pb.GenerateRequest(prompt="x", logprobs=-1), INVALID, "logprobs", "logprobs"),
        (pb.GenerateRequest(prompt_tokens=pb.TokenIds(ids=b"abc")), INVALID, "multiple", "prompt_tokens"),
        (pb.GenerateRequest(prompt="x" * 4000), INVALID, "maximum context length", "prompt"),
        (pb.GenerateRequest(prompt="x", timeout_s=0.1), grpc.StatusCode.DEADLINE_EXCEEDED, "not finished", None),
    ],
)
async def test_grpc_errors(stub, nodes, request_, status, says_, param):
    nodes.script = says("x", hold=asyncio.Event())
    with pytest.raises(grpc.aio.AioRpcError) as error:
        async for _ in stub.Generate(request_):
            pass
    assert error.value.code() is status
    assert says_ in str(error.value.details())
    metadata: Any = error.value.trailing_metadata()
    assert dict(metadata).get("error-param") == param


async def test_grpc_deadline_of_the_call(stub, nodes, router):
    nodes.script = says("x", hold=asyncio.Event())
    with pytest.raises(grpc.aio.AioRpcError) as error:
        async for _ in stub.Generate(pb.GenerateRequest(prompt="x"), timeout=0.3):
            pass
    assert error.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await router.idle()
    assert nodes.prefills[0].deadline_s < 1


@pytest.mark.parametrize("timeout_s", [float("nan"), 0.0, -1.0])
async def test_grpc_refuses_such_a_timeout_also_of_a_call_with_a_deadline(stub, nodes, timeout_s):
    with pytest.raises(grpc.aio.AioRpcError) as error:
        async for _ in stub.Generate(pb.GenerateRequest(prompt="x", timeout_s=timeout_s), timeout=20):
            pass
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "above 0 seconds" in str(error.value.details())


async def test_grpc_overload_tells_when_to_retry(stub, nodes):
    nodes.script = lambda prefill: Answer(error=Overloaded("full"))
    with pytest.raises(grpc.aio.AioRpcError) as error:
        async for _ in stub.Generate(pb.GenerateRequest(prompt="x")):
            pass
    assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    metadata: Any = error.value.trailing_metadata()
    assert dict(metadata)["retry-after"] == "1"


async def test_grpc_tokens_and_models(stub):
    [model] = (await stub.ListModels(pb.ListModelsRequest())).models
    assert (model.id, model.generation_defaults.top_p, model.generation_defaults.HasField("top_k")) == (
        "tiny",
        0.9,
        False,
    )
    assert (model.max_model_len, model.max_logprobs) == (128, 20)
    tokens = await stub.Tokenize(pb.TokenizeRequest(prompt="hello"))
    assert wire.unpack_tokens(tokens.token_ids) == tiny_tokenizer().encode("hello", True)
    tokens = await stub.Tokenize(pb.TokenizeRequest(prompt="hello", add_special_tokens=False))
    text = await stub.Detokenize(pb.DetokenizeRequest(token_ids=tokens.token_ids))
    assert text.text == "hello"
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await stub.Detokenize(pb.DetokenizeRequest(token_ids=b"abc"))
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_grpc_health_follows_readiness():
    states = health_pb2.HealthCheckResponse
    async with (
        two_nodes() as nodes,
        running_router(nodes) as router,
        grpc.aio.insecure_channel(router.grpc) as channel,
        asyncio.timeout(10),
    ):
        stub = health_pb2_grpc.HealthStub(channel)
        watch = stub.Watch(health_pb2.HealthCheckRequest(service="baton.v1.Generation"))
        while (await watch.read()).status != states.SERVING:
            pass
        await nodes.nodes[1].stop()
        while (await watch.read()).status != states.NOT_SERVING:
            pass
        watch.cancel()


async def test_who_watches_grpc_health_does_not_keep_a_router_from_its_end(nodes):
    """It had all of --drain-timeout to wait for, as for a running request."""
    router = Router(nodes, drain_timeout=600.0)
    await router.start()
    await router.ready()
    async with grpc.aio.insecure_channel(router.grpc) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        states = health_pb2.HealthCheckResponse
        async with asyncio.timeout(PATIENCE_S):
            assert (await watch.read()).status == states.SERVING
            await router.server.stop(asyncio.Event())
            assert (await watch.read()).status == states.NOT_SERVING
            assert await watch.read() is grpc.aio.EOF  # type: ignore[attr-defined]


async def test_open_reflection_does_not_keep_a_router_from_its_end(nodes):
    """As grpcui and other tools keep it. The router waited for all of --drain-timeout."""
    router = Router(nodes, drain_timeout=600.0)
    await router.start()
    async with grpc.aio.insecure_channel(router.grpc) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        ended, call = stub.ServerReflectionInfo(), stub.ServerReflectionInfo()
        async with asyncio.timeout(PATIENCE_S):
            for one in (ended, call, call):
                await one.write(reflection_pb2.ServerReflectionRequest(list_services=""))
                assert (await one.read()).list_services_response.service
            await ended.done_writing()
            assert await ended.read() is grpc.aio.EOF  # type: ignore[attr-defined]
            await router.server.stop(asyncio.Event())
            assert await call.read() is grpc.aio.EOF  # type: ignore[attr-defined]


async def test_grpc_health_knows_its_services_by_name(router, channel):
    await router.ready()
    stub, states = health_pb2_grpc.HealthStub(channel), health_pb2.HealthCheckResponse
    for name in ("", "baton.v1.Generation", "baton.v1.Cluster"):
        assert (await stub.Check(health_pb2.HealthCheckRequest(service=name))).status == states.SERVING
    unknown = health_pb2.HealthCheckRequest(service="nothing")
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await stub.Check(unknown)
    assert error.value.code() is grpc.StatusCode.NOT_FOUND
    watch = stub.Watch(unknown)
    assert (await watch.read()).status == states.SERVICE_UNKNOWN
    watch.cancel()


async def test_grpc_reflection(router):
    def services() -> list[str]:
        with grpc.insecure_channel(router.grpc) as channel:
            return list(ProtoReflectionDescriptorDatabase(channel).get_services())

    assert {"baton.v1.Generation", "grpc.health.v1.Health"} <= set(await asyncio.to_thread(services))
