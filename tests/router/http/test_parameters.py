"""Parameters that shape the text, over HTTP, and all that gRPC passes on."""

from __future__ import annotations

from collections.abc import AsyncIterator

import grpc.aio
import httpx
import pytest
import pytest_asyncio

from baton.structured_output.constraint import StructuredKind
from baton.v1 import common_pb2, generation_pb2_grpc
from baton.v1 import generation_pb2 as pb
from tests.router.conftest import Shared, on_shared_loop, says, shared_fixtures
from tests.router.fake_node import FakeCluster
from tests.router.http_shapes import CHAT, SAMPLING
from tests.router.tiny_tokenizer import BOS, tiny_tokenizer

pytestmark = on_shared_loop
nodes, router, client = shared_fixtures()


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, "helloworld fox"),
        ({"skip_special_tokens": False}, "hello<|pad|>world fox"),
        ({"stop": "wor"}, "hello"),
        ({"stop": ["wor"], "include_stop_str_in_output": True}, "hellowor"),
        ({"skip_special_tokens": False, "spaces_between_special_tokens": False}, "hello<|pad|>world fox"),
    ],
)
async def test_what_the_text_has(client: httpx.AsyncClient, nodes: FakeCluster, fields: dict, text: str) -> None:
    nodes.script = says("hello<|pad|>world fox")
    body = (await client.post("/v1/completions", json={"prompt": "x", **fields})).json()
    assert body["choices"][0]["text"] == text


async def test_special_tokens_around_prompts(client: httpx.AsyncClient, nodes: FakeCluster) -> None:
    for special, count in ((None, 1), (True, 1), (False, 0)):
        await client.post("/v1/completions", json={"prompt": "hi", "add_special_tokens": special})
        tokens = (await client.post("/tokenize", json={"prompt": "hi", "add_special_tokens": special})).json()["tokens"]
        assert tuple(tokens) == nodes.prefills[-1].prompt_tokens
        assert tokens.count(BOS) == count
    for special, count in ((None, 1), (True, 2), (False, 1)):  # the template writes one itself
        await client.post("/v1/chat/completions", json={**CHAT, "add_special_tokens": special})
        assert nodes.prefills[-1].prompt_tokens.count(BOS) == count


async def test_a_newer_name_of_max_tokens_comes_first(client: httpx.AsyncClient, nodes: FakeCluster) -> None:
    await client.post("/v1/chat/completions", json={**CHAT, "max_tokens": 5, "max_completion_tokens": 7})
    assert nodes.prefills[0].sampling.max_tokens == 7


async def test_guided_fields_reach_the_nodes(client: httpx.AsyncClient, nodes: FakeCluster) -> None:
    for kind, value, text in (
        ("json", {"type": "integer"}, '{"type":"integer"}'),
        ("regex", "a+", "a+"),
        ("choice", ["a", "b"], '["a", "b"]'),
        ("grammar", 'start: "a"', 'start: "a"'),
    ):
        for fields in ({f"guided_{kind}": value}, {"structured_outputs": {kind: value}}):
            response = await client.post("/v1/completions", json={"prompt": "x", **fields})
            assert response.status_code == 200, response.text
            structured = nodes.prefills[-1].sampling.structured_outputs
            assert structured is not None
            assert (structured.kind, structured.text) == (StructuredKind(kind), text)


@pytest_asyncio.fixture(loop_scope="module")
async def stub(shared: Shared, nodes: FakeCluster) -> AsyncIterator[generation_pb2_grpc.GenerationStub]:
    async with grpc.aio.insecure_channel(shared.router.grpc) as channel:
        yield generation_pb2_grpc.GenerationStub(channel)


async def test_grpc_parameters_reach_the_nodes(stub: generation_pb2_grpc.GenerationStub, nodes: FakeCluster) -> None:
    request = pb.GenerateRequest(
        prompt="x",
        request_id="mine",
        model="tiny",
        cache_salt="s",
        timeout_s=9.0,
        stop_token_ids=[9],
        logit_bias={17: 3.0},
        structured_outputs=common_pb2.StructuredOutput(kind="regex", text="a+"),
        **SAMPLING,
    )
    assert [response async for response in stub.Generate(request)]
    (prefill,) = nodes.prefills
    assert {name: getattr(prefill.sampling, name) for name in SAMPLING} == SAMPLING
    assert (set(prefill.sampling.stop_token_ids), prefill.sampling.logit_bias) == ({9}, {17: 3.0})
    assert (prefill.cache_salt, prefill.deadline_s <= 9.0) == ("s", True)
    assert prefill.sampling.structured_outputs is not None
    assert prefill.attempt_id.request_id.startswith("mine.")


async def test_grpc_texts_have_what_is_asked_for(stub: generation_pb2_grpc.GenerationStub, nodes: FakeCluster) -> None:
    nodes.script = says("hello<|pad|>world")
    request = pb.GenerateRequest(prompt="x", stop=["wor"], include_stop_str_in_output=True, skip_special_tokens=False)
    text = "".join([response.delta.text async for response in stub.Generate(request)])
    assert text == "hello<|pad|>wor"


async def test_grpc_tokenizes_chats(stub: generation_pb2_grpc.GenerationStub) -> None:
    messages = [pb.ChatMessage(role="user", content="hi", name="Ann")]
    answer = await stub.Tokenize(pb.TokenizeRequest(model="tiny", chat=pb.Chat(messages=messages)))
    text = "<|bos|><|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert len(answer.token_ids) == 4 * len(tiny_tokenizer().encode(text, False))
