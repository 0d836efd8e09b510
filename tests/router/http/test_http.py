"""The HTTP API over a real socket: answers, streams, errors."""

import asyncio
import json
from codecs import BOM_UTF8
from datetime import datetime

import httpx
import pytest

from baton.node_info import NodeRole
from router.http.parse import parse_json
from tests.router.conftest import Router, on_shared_loop, running_router, says, shared_fixtures
from tests.router.fake_node import Answer, FakeCluster
from tests.router.http.test_access import running
from tests.router.http_shapes import CHAT, error_of, events
from tests.router.tiny_tokenizer import IM_END, tiny_tokenizer

pytestmark = on_shared_loop
nodes, router, client = shared_fixtures()


async def test_a_chat_answer(client, nodes):
    for _ in range(50):
        response = await client.post("/v1/chat/completions", json={**CHAT, "max_tokens": 50})
        body = response.json()
        if body["timings"]["prefill_ms"]:  # the answer may end before the prefill node's report has come
            break
    assert response.status_code == 200
    choice = body["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": "hello world", "refusal": None}
    assert (choice["finish_reason"], choice["stop_reason"], choice["logprobs"]) == ("stop", None, None)
    prompt = tiny_tokenizer().encode("<|bos|><|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n", False)
    assert nodes.prefills[0].prompt_tokens == prompt
    completion = len(tiny_tokenizer().encode("hello world", False)) + 1
    assert body["usage"]["prompt_tokens"] == len(prompt)
    assert body["usage"]["completion_tokens"] == completion
    assert body["usage"]["total_tokens"] == len(prompt) + completion
    assert body["timings"]["attempts"] == 1
    assert body["timings"]["transfer_bytes"] == 4096
    parts = ("prefill", "gather", "wire", "commit", "transfer", "scatter", "step_wait", "handoff")
    assert [body["timings"][f"{part}_ms"] for part in parts] == [2, 5, 6, 1, 3, 2, 4, 8]
    assert (body["timings"]["prefill_node"], body["timings"]["decode_node"]) == ("prefill-0", "decode-1")


async def test_cached_tokens_are_in_the_usage(client, nodes):
    nodes.script = says("ok", num_cached_tokens=16)
    body = (await client.post("/v1/chat/completions", json=CHAT)).json()
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 16}


async def test_a_streamed_chat(client, nodes):
    nodes.script = says("hello there 你好 🙂")
    request = {**CHAT, "stream": True, "stream_options": {"include_usage": True}}
    response = await client.post("/v1/chat/completions", json=request)
    assert response.headers["content-type"].startswith("text/event-stream")
    chunks = events(response.text)
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert "".join(c["choices"][0]["delta"]["content"] for c in chunks[:-1]) == "hello there 你好 🙂"
    assert [c["choices"][0]["finish_reason"] for c in chunks[:-1]][-1] == "stop"
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] > 0
    assert chunks[-1]["timings"]["decode_node"] == "decode-1"
    assert len({c["id"] for c in chunks}) == 1


async def test_usage_may_be_in_every_chunk(client):
    options = {"include_usage": True, "continuous_usage_stats": True}
    request = {"prompt": [5, 6], "stream": True, "stream_options": options}
    chunks = events((await client.post("/v1/completions", json=request)).text)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == len(tiny_tokenizer().encode("hello world", False)) + 1


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_an_operator_may_have_usage_in_every_stream(nodes, path):
    async with running(nodes, enable_force_include_usage=True) as (_, client):
        for options in ({}, {"stream_options": {"include_usage": False}}):
            chunks = events((await client.post(path, json={**CHAT, "prompt": "x", "stream": True, **options})).text)
            assert [chunk["usage"]["completion_tokens"] > 0 for chunk in chunks] == [True] * len(chunks)
            assert chunks[-1]["choices"] == []


async def test_without_usage_the_last_chunk_carries_the_timings(client):
    response = await client.post("/v1/chat/completions", json={**CHAT, "stream": True})
    chunks = events(response.text)
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    assert chunks[-1]["timings"]["attempts"] == 1
    assert not any("usage" in chunk for chunk in chunks)


async def test_tokens_may_be_named_by_their_ids(client):
    named = {"return_tokens_as_token_ids": True, "return_token_ids": True}
    body = {**CHAT, "logprobs": True, "top_logprobs": 1, **named}
    (choice,) = (await client.post("/v1/chat/completions", json=body)).json()["choices"]
    content = choice["logprobs"]["content"]
    assert [token["token"] for token in content] == [f"token_id:{i}" for i in choice["token_ids"]]
    assert bytes(content[0]["bytes"]) == tiny_tokenizer().token_bytes(choice["token_ids"][0])
    assert content[0]["top_logprobs"][0]["token"].startswith("token_id:")
    plain = {"prompt": "x", "logprobs": 1}
    (choice,) = (await client.post("/v1/completions", json={**plain, **named})).json()["choices"]
    (other,) = (await client.post("/v1/completions", json=plain)).json()["choices"]
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == [f"token_id:{i}" for i in choice["token_ids"]]
    assert all(name in top for name, top in zip(logprobs["tokens"], logprobs["top_logprobs"], strict=True))
    assert logprobs["text_offset"] == other["logprobs"]["text_offset"]


async def test_a_body_may_name_the_request_and_a_header_does_so_first(client, nodes):
    response = await client.post("/v1/chat/completions", json={**CHAT, "request_id": "from-body"})
    assert response.headers["x-request-id"] == "from-body"
    assert response.json()["id"] == "chatcmpl-from-body"
    headers = {"x-request-id": "from-header"}
    response = await client.post("/v1/completions", json={"prompt": "x", "request_id": "from-body"}, headers=headers)
    assert response.headers["x-request-id"] == "from-header"
    assert response.json()["id"] == "cmpl-from-header"
    assert [p.attempt_id.request_id.partition(".")[0] for p in nodes.prefills] == ["from-body", "from-header"]


async def test_a_body_may_begin_with_a_mark_of_its_byte_order(client):
    """As files of some programs do, which curl sends as they are. Long bodies have a parser of their own."""
    assert (await client.post("/v1/completions", content=BOM_UTF8 + b'{"prompt": "x"}')).status_code == 200
    for number in (1, 70_000):
        assert parse_json(BOM_UTF8 + json.dumps([1] * number).encode()) == [1] * number


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string_ends_the_answer_and_frees_the_nodes(client, nodes, router, stream):
    hold = asyncio.Event()  # never set: only an abort ends the nodes' work
    nodes.script = says("the quick brown fox jumps over", hold=hold, hold_at=6)
    stop_at = len(tiny_tokenizer().encode("the quick", False))
    assert stop_at < 6
    request = {**CHAT, "stop": ["quick"], "stream": stream}
    response = await client.post("/v1/chat/completions", json=request)
    if stream:
        text = "".join(c["choices"][0]["delta"]["content"] for c in events(response.text))
        choice = events(response.text)[-1]["choices"][0]
    else:
        choice = response.json()["choices"][0]
        text = choice["message"]["content"]
    assert (text, choice["finish_reason"], choice["stop_reason"]) == ("the ", "stop", "quick")
    await nodes.until(lambda: nodes.aborts)
    await router.idle()


async def test_one_of_two_samples_may_be_stopped(client, nodes):
    words = ("the lazy dog jumps", "hello there fox")
    tokens = [(*tiny_tokenizer().encode(word, False), IM_END) for word in words]
    nodes.script = lambda prefill: Answer(tokens=tokens)
    body = (await client.post("/v1/completions", json={"prompt": "x", "n": 2, "stop": "lazy"})).json()
    assert [c["text"] for c in body["choices"]] == ["the ", "hello there fox"]
    assert [c["stop_reason"] for c in body["choices"]] == ["lazy", None]


async def test_length(client):
    body = (await client.post("/v1/completions", json={"prompt": "x", "max_tokens": 1})).json()
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"]["completion_tokens"] == 1


async def test_length_of_answers_to_those_who_do_not_say(client, nodes):
    """Of completions as at OpenAI and with vLLM, 16 tokens; else what the context leaves."""
    for prompt, asked, most in (("hi", {}, 16), ([5] * 120, {}, 8), ("hi", {"max_tokens": None}, 125)):
        await client.post("/v1/completions", json={"prompt": prompt, **asked})
        assert nodes.prefills[-1].sampling.max_tokens == most
    await client.post("/v1/completions", json={"prompt": [5] * 200, "truncate_prompt_tokens": -1})
    assert len(nodes.prefills[-1].prompt_tokens) == 128 - 16
    await client.post("/v1/chat/completions", json=CHAT)
    last = nodes.prefills[-1]
    assert last.sampling.max_tokens == 128 - len(last.prompt_tokens)


async def test_chat_logprobs(client):
    body = (await client.post("/v1/chat/completions", json={**CHAT, "logprobs": True, "top_logprobs": 2})).json()
    logprobs = body["choices"][0]["logprobs"]
    content = logprobs["content"]
    assert logprobs == {"content": content, "refusal": None}
    assert len(content) == body["usage"]["completion_tokens"]
    assert "".join(entry["token"] for entry in content) == "hello world<|im_end|>"
    assert content[0]["bytes"] == list(content[0]["token"].encode())
    assert [top["logprob"] for top in content[0]["top_logprobs"]] == [-0.5, -1.5]


async def test_completion_logprobs(client):
    body = (await client.post("/v1/completions", json={"prompt": "x", "logprobs": 2})).json()
    logprobs = body["choices"][0]["logprobs"]
    assert logprobs["token_logprobs"][0] == -0.5
    assert logprobs["text_offset"][1] == len(logprobs["tokens"][0])
    assert len(logprobs["top_logprobs"][0]) == 2


@pytest.mark.parametrize("stream", [False, True])
async def test_offsets_of_completion_logprobs_count_characters(client, nodes, stream):
    """Also where a character is several tokens, of which none is text by itself."""
    nodes.script = says("a🤖b")
    response = await client.post("/v1/completions", json={"prompt": "x", "logprobs": 0, "stream": stream})
    chunks = events(response.text) if stream else [response.json()]
    shown = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    tokens = [name for logprobs in shown for name in logprobs["tokens"]]
    offsets = [offset for logprobs in shown for offset in logprobs["text_offset"]]
    assert (tokens[0], tokens[-2:]) == ("a", ["b", "<|im_end|>"])
    assert all(name.startswith("bytes:") for name in tokens[1:-2])
    assert offsets == [0, *[1] * len(tokens[1:-2]), 2, 3]


async def test_offsets_count_a_character_that_stays_incomplete(client, nodes):
    """It is in the text as U+FFFD, before the token that does not go on with it."""
    first, *_ = tiny_tokenizer().encode("🤖", False)
    (b,) = tiny_tokenizer().encode("b", False)
    nodes.script = lambda prefill: Answer(tokens=((b, first, b, first, first, b, IM_END),))
    body = (await client.post("/v1/completions", json={"prompt": "x", "logprobs": 0})).json()
    (choice,) = body["choices"]
    assert choice["text"] == "b\ufffdb\ufffd\ufffdb"
    assert choice["logprobs"]["text_offset"] == [0, 1, 2, 3, 4, 5, 6]


async def test_token_ids_on_request(client, nodes):
    body = (await client.post("/v1/completions", json={"prompt": [5, 6], "return_token_ids": True})).json()
    assert body["choices"][0]["token_ids"] == [*tiny_tokenizer().encode("hello world", False), IM_END]
    assert body["choices"][0]["prompt_token_ids"] == [5, 6]
    chat = (await client.post("/v1/chat/completions", json={**CHAT, "return_token_ids": True})).json()
    assert chat["prompt_token_ids"] == list(nodes.prefills[-1].prompt_tokens)


async def test_each_prompts_token_ids_come_once_with_its_first_answer(client, nodes):
    several = {"prompt": [[5, 6], [7]], "n": 2, "return_token_ids": True}
    body = (await client.post("/v1/completions", json=several)).json()
    assert [choice.get("prompt_token_ids") for choice in body["choices"]] == [[5, 6], None, [7], None]
    chunks = events((await client.post("/v1/completions", json={**several, "stream": True})).text)
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    told = [(choice["index"], choice["prompt_token_ids"]) for choice in choices if "prompt_token_ids" in choice]
    assert sorted(told) == [(0, [5, 6]), (2, [7])]
    chat = {**CHAT, "n": 2, "stream": True, "return_token_ids": True}
    chunks = events((await client.post("/v1/chat/completions", json=chat)).text)
    of_chunks = [chunk.get("prompt_token_ids") for chunk in chunks]
    assert of_chunks == [list(nodes.prefills[-1].prompt_tokens), *[None] * (len(chunks) - 1)]


async def test_request_ids_in_and_out(client, nodes):
    response = await client.post("/v1/chat/completions", json=CHAT, headers={"x-request-id": "mine-1"})
    assert response.headers["x-request-id"] == "mine-1"
    assert response.json()["id"] == "chatcmpl-mine-1"
    assert nodes.prefills[0].attempt_id.request_id.startswith("mine-1.")
    response = await client.get("/nowhere", headers={"x-request-id": "bad id"})
    assert response.headers["x-request-id"] not in ("", "bad id")


async def test_equal_request_ids_do_not_collide(client, nodes):
    requests = (client.post("/v1/chat/completions", json=CHAT, headers={"x-request-id": "same"}) for _ in range(4))
    responses = await asyncio.gather(*requests)
    assert [r.json()["choices"][0]["message"]["content"] for r in responses] == ["hello world"] * 4
    assert len({p.attempt_id.request_id for p in nodes.prefills}) == 4


async def test_tokens_and_back(client):
    tokens = list(tiny_tokenizer().encode("hello 你好", True))
    body = (await client.post("/tokenize", json={"prompt": "hello 你好", "return_token_strs": True})).json()
    assert (body["tokens"], body["count"], body["max_model_len"]) == (tokens, len(tokens), 128)
    assert body["token_strs"][0] == "<|bos|>"
    chat = (await client.post("/tokenize", json={"messages": CHAT["messages"]})).json()
    assert tiny_tokenizer().decode(chat["tokens"], False).endswith("<|im_start|>assistant\n")
    body = (await client.post("/detokenize", json={"tokens": tokens})).json()
    assert body == {"prompt": "<|bos|>hello 你好"}


async def test_what_is_no_text_of_the_model_cannot_be_detokenized(client):
    for tokens, words in (([5, 400], "400 is out of"), ([-1], "-1 is out of"), ([5] * 129, "128 tokens")):
        response = await client.post("/detokenize", json={"tokens": tokens})
        assert (response.status_code, error_of(response)["param"]) == (400, "tokens")
        assert words in error_of(response)["message"]


async def test_a_text_above_the_context_can_be_counted_and_one_far_above_is_refused(client):
    tokens = tiny_tokenizer().encode("fox " * 200, True)
    assert len(tokens) > 128
    assert (await client.post("/tokenize", json={"prompt": "fox " * 200})).json()["count"] == len(tokens)
    far_above = "fox " * 2**20
    for body in ({"prompt": far_above}, {"messages": [{"role": "user", "content": far_above}]}):
        response = await client.post("/tokenize", json=body)
        assert response.status_code == 400
        assert (error_of(response)["code"], error_of(response)["param"]) == ("context_length_exceeded", *body)


async def test_long_bodies_say_the_same(client, nodes):
    """They are parsed by another parser, on another thread."""
    padding = [{"role": "user", "content": "", "x": [[]] * 70_000}]
    body = {**CHAT, "max_tokens": 16.0, "seed": 5.0, "logit_bias": {"17": 3}, "metadata": {"a": [1.5, None, True]}}
    for messages in (CHAT["messages"], CHAT["messages"] + padding):
        response = await client.post("/v1/chat/completions", json={**body, "messages": messages})
        assert response.status_code == 200
    first, second = (prefill.sampling for prefill in nodes.prefills)
    assert first == second
    assert (first.max_tokens, first.seed, first.logit_bias) == (16, 5, {17: 3.0})
    bad = json.dumps({**CHAT, "user": "\ud800", "messages": CHAT["messages"] + padding})
    response = await client.post("/v1/chat/completions", content=bad)
    assert (response.status_code, "not valid JSON" in response.text) == (400, True)


async def test_heads(client):
    models = ("/v1/models", "/v1/models/", "/v1/models/tiny")
    for path in ("/health", "/ready", "/version", "/metrics", *models, "/openapi.json"):
        response = await client.head(path)
        assert (response.status_code, response.content) == (200, b"")


async def test_models(client):
    body = (await client.get("/v1/models")).json()
    assert [(m["id"], m["max_model_len"]) for m in body["data"]] == [("tiny", 128)]
    assert (await client.get("/v1/models/")).json() == body
    assert (await client.get("/v1/models/tiny")).json() == body["data"][0]
    assert (await client.get("/v1/models/other")).status_code == 404
    (model,) = body["data"]  # Anthropic's clients want these
    assert (model["type"], model["display_name"]) == ("model", "tiny")
    assert datetime.fromisoformat(model["created_at"]).timestamp() == model["created"]
    assert (body["has_more"], body["first_id"], body["last_id"]) == (False, "tiny", "tiny")


async def test_a_model_answers_to_all_of_its_names():
    nodes = FakeCluster(says("hello world"))
    for role in NodeRole:
        await nodes.add(role, model_aliases=("gpt-4",))
    async with running_router(nodes) as router, httpx.AsyncClient(base_url=router.http) as client:
        for name in ("tiny", "gpt-4"):
            answer = await client.post("/v1/chat/completions", json={**CHAT, "model": name})
            assert (answer.status_code, answer.json()["model"]) == (200, name)
            assert (await client.get(f"/v1/models/{name}")).json()["id"] == name
        assert [model["id"] for model in (await client.get("/v1/models")).json()["data"]] == ["tiny", "gpt-4"]
        text = (await client.get("/metrics")).text
    await nodes.close()
    assert 'baton:request_ends_total{model_name="tiny",outcome="finished",reason="stop",role="router"} 2.0' in text


async def test_metrics(nodes):
    async with running_router(nodes) as router, httpx.AsyncClient(base_url=router.http) as client:
        await client.post("/v1/chat/completions", json=CHAT)
        await client.post("/v1/chat/completions", json={**CHAT, "max_tokens": 1})
        text = (await client.get("/metrics")).text
    assert 'baton:request_ends_total{model_name="tiny",outcome="finished",reason="stop",role="router"} 1.0' in text
    assert 'baton:request_ends_total{model_name="tiny",outcome="finished",reason="length",role="router"} 1.0' in text
    assert 'baton:time_to_first_token_seconds_count{model_name="tiny",role="router"} 2.0' in text
    assert 'baton:num_requests{role="router",state="decoding"} 0.0' in text
    assert 'baton:nodes{node_role="prefill",role="router",state="up"} 1.0' in text


async def test_connections_beyond_the_limit_are_counted(nodes):
    router = Router(nodes, max_connections=1)
    await router.start()
    async with httpx.AsyncClient(base_url=router.http) as client, httpx.AsyncClient(base_url=router.http) as other:
        await client.get("/health")  # and keeps its connection
        assert (await other.get("/health")).status_code == 503
        assert 'baton:refused_connections_total{role="router"} 1.0' in (await client.get("/metrics")).text
    await router.stop()


async def test_health(client, router, nodes):
    assert (await client.get("/health")).status_code == 200
    assert (await client.get("/ready")).json() == {"status": "ready"}
    assert "version" in (await client.get("/version")).json()
