"""Anthropic's Messages API: whole and streamed messages, prefill, counts, and failures in its form."""

import asyncio
import json
from typing import Any

import httpx
import pytest
from pydantic import SecretStr

from baton.errors import CacheExhausted, InternalError, Overloaded
from router.http.anthropic.events import ContentBlocks
from tests.router.conftest import Router, on_shared_loop, says, shared_fixtures
from tests.router.fake_node import Answer
from tests.router.http.test_access import running
from tests.router.http_wire import peer
from tests.router.tiny_tokenizer import tiny_tokenizer

USER = {"role": "user", "content": "hi"}
MESSAGE: dict[str, Any] = {"model": "tiny", "max_tokens": 50, "messages": [USER]}
PROMPT = "<|bos|><|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def blocks(*texts: str) -> list[dict[str, Any]]:
    return [{"type": "text", "text": text, "cache_control": {"type": "ephemeral"}} for text in texts]


def prompt_of(prefill: Any) -> str:
    return tiny_tokenizer().decode(prefill.prompt_tokens, False)


def events(text: str) -> list[dict[str, Any]]:
    """Each event's data, whose type is the event's name."""
    found = []
    for lines in filter(None, text.split("\n\n")):
        name, data = lines.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        found.append(event)
    return found


def error_of(response: httpx.Response) -> dict[str, Any]:
    body = response.json()
    assert set(body) == {"type", "error", "request_id"}
    assert body["type"] == "error"
    assert body["request_id"] == response.headers["request-id"] == response.headers["x-request-id"]
    assert set(body["error"]) == {"type", "message"}
    return dict(body["error"])


pytestmark = on_shared_loop
nodes, router, client = shared_fixtures()


async def test_a_message(client, nodes):
    nodes.script = says("hello world", num_cached_tokens=16)
    sampling = {"temperature": 0.25, "top_p": 0.5, "top_k": 7, "seed": 11, "cache_salt": "s", "timeout": 9.0}
    response = await client.post("/v1/messages", json={**MESSAGE, **sampling, "metadata": {"user_id": "u"}})
    assert response.status_code == 200, response.text
    body = response.json()
    assert body["id"] == f"msg_{response.headers['request-id']}"
    assert (body["type"], body["role"], body["model"]) == ("message", "assistant", "tiny")
    assert body["content"] == [{"type": "text", "text": "hello world"}]
    assert (body["stop_reason"], body["stop_sequence"]) == ("end_turn", None)
    [prefill] = nodes.prefills
    assert prompt_of(prefill) == PROMPT
    assert body["usage"] == {
        "input_tokens": len(prefill.prompt_tokens) - 16,
        "output_tokens": len(tiny_tokenizer().encode("hello world", False)) + 1,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 16,
    }
    assert body["timings"]["decode_node"] == "decode-1"
    taken = prefill.sampling
    assert (taken.temperature, taken.top_p, taken.top_k, taken.seed, taken.max_tokens) == (0.25, 0.5, 7, 11, 50)
    assert (prefill.cache_salt, prefill.deadline_s <= 9.0) == ("s", True)


async def test_a_streamed_message(client, nodes):
    nodes.script = says("hello there 你好 🙂", num_cached_tokens=16)
    response = await client.post("/v1/messages", json={**MESSAGE, "stream": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    start, begin, *deltas, stop, end, last = events(response.text)
    assert (start["type"], last) == ("message_start", {"type": "message_stop"})
    message = start["message"]
    assert message["id"] == f"msg_{response.headers['request-id']}"
    assert (message["content"], message["stop_reason"], message["role"]) == ([], None, "assistant")
    num_prompt_tokens = len(nodes.prefills[0].prompt_tokens)
    assert message["usage"] == {"input_tokens": num_prompt_tokens, "output_tokens": 0}
    assert begin == {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
    assert {(delta["type"], delta["index"], delta["delta"]["type"]) for delta in deltas} == {
        ("content_block_delta", 0, "text_delta")
    }
    assert "".join(delta["delta"]["text"] for delta in deltas) == "hello there 你好 🙂"
    assert stop == {"type": "content_block_stop", "index": 0}
    assert (end["type"], end["delta"]) == ("message_delta", {"stop_reason": "end_turn", "stop_sequence": None})
    assert (end["usage"]["input_tokens"], end["usage"]["cache_read_input_tokens"]) == (num_prompt_tokens - 16, 16)
    assert end["usage"]["output_tokens"] > 0
    assert end["timings"]["attempts"] == 1


async def test_why_a_message_stopped(client, nodes):
    nodes.script = says("the lazy dog")
    for fields, text, reason, sequence in (
        ({"stop_sequences": ["lazy", "zebra"]}, "the ", "stop_sequence", "lazy"),
        ({"max_tokens": 1}, "the", "max_tokens", None),
        ({"stop_sequences": ["the"]}, "", "stop_sequence", "the"),
    ):
        body = (await client.post("/v1/messages", json={**MESSAGE, **fields})).json()
        assert body["content"] == ([{"type": "text", "text": text}] if text else [])
        assert (body["stop_reason"], body["stop_sequence"]) == (reason, sequence)
        streamed = events((await client.post("/v1/messages", json={**MESSAGE, **fields, "stream": True})).text)
        assert "".join(e["delta"]["text"] for e in streamed if e["type"] == "content_block_delta") == text
        assert [e["type"] for e in streamed].count("content_block_start") == bool(text)
        [ended] = [e["delta"] for e in streamed if e["type"] == "message_delta"]
        assert ended == {"stop_reason": reason, "stop_sequence": sequence}


CONVERSATIONS: list[tuple[dict[str, Any], str]] = [
    ({"system": "Be terse."}, PROMPT.replace("<|bos|>", "<|bos|><|im_start|>system\nBe terse.<|im_end|>\n")),
    ({"system": blocks("a", "b")}, PROMPT.replace("<|bos|>", "<|bos|><|im_start|>system\na\nb<|im_end|>\n")),
    ({"system": ""}, PROMPT),
    ({"system": blocks("x-anthropic-billing-header: cch=1;")}, PROMPT),
    (
        {"system": blocks("x-anthropic-billing-header: cch=2;", "a", "b")},
        PROMPT.replace("<|bos|>", "<|bos|><|im_start|>system\na\nb<|im_end|>\n"),
    ),
    ({"messages": [{"role": "user", "content": blocks("a", "b")}]}, PROMPT.replace("hi", "a\nb")),
    ({"messages": [USER, USER]}, PROMPT.replace("hi", "hi\nhi")),
    ({"messages": [USER, {"role": "assistant", "content": "The best is ("}]}, PROMPT + "The best is ("),
    ({"messages": [USER, {"role": "assistant", "content": blocks("so ")}]}, PROMPT + "so "),
    ({"messages": [USER, {"role": "assistant", "content": ""}]}, PROMPT),
]


async def test_conversations_become_prompts_and_are_counted(client, nodes):
    for fields, prompt in CONVERSATIONS:
        response = await client.post("/v1/messages", json={**MESSAGE, **fields})
        assert response.status_code == 200, response.text
        assert prompt_of(nodes.prefills[-1]) == prompt
        asked = {name: value for name, value in {**MESSAGE, **fields}.items() if name != "max_tokens"}
        counted = await client.post("/v1/messages/count_tokens", json=asked)
        assert counted.json() == {"input_tokens": len(nodes.prefills[-1].prompt_tokens)}


async def test_prompts_beyond_the_context_are_counted(client):
    response = await client.post("/v1/messages/count_tokens", json={"messages": [{**USER, "content": "x" * 2000}]})
    assert response.status_code == 200, response.text
    assert response.json()["input_tokens"] > 128


async def test_a_block_of_another_kind_begins_after_the_open_one():
    blocks = ContentBlocks()
    thinking, call = {"type": "thinking", "thinking": ""}, {"type": "tool_use", "id": "a", "name": "f", "input": {}}
    text = blocks.write(thinking, {}) + blocks.write(thinking, {}) + blocks.write(call, {})
    text += blocks.write({**call, "id": "b"}, {}) + blocks.close() + blocks.close()
    assert [(event["type"].removeprefix("content_block_"), event["index"]) for event in events(text.decode())] == [
        *(("start", 0), ("delta", 0), ("delta", 0), ("stop", 0)),
        *(("start", 1), ("delta", 1), ("stop", 1)),
        *(("start", 2), ("delta", 2), ("stop", 2)),
    ]


async def test_an_idle_stream_sends_pings(nodes):
    hold = asyncio.Event()
    nodes.script = says("hello world", hold=hold)
    router = Router(nodes, keep_alive_interval=0.1)
    await router.start()
    await router.ready()
    text = ""
    async with (
        httpx.AsyncClient(base_url=router.http, timeout=20) as client,
        client.stream("POST", "/v1/messages", json={**MESSAGE, "stream": True}) as response,
    ):
        async for piece in response.aiter_text():
            text += piece
            if "ping" in text:
                hold.set()
    await router.stop()
    kinds = [event["type"] for event in events(text)]
    assert kinds[:2] == ["message_start", "ping"]
    assert kinds[-1] == "message_stop"


# ---- failures ----


MISTAKES: list[tuple[dict[str, Any], int, str]] = [
    ({"max_tokens": None}, 400, "max_tokens"),
    ({"max_tokens": 0}, 400, "max_tokens"),
    ({"max_tokens": 4000}, 400, "maximum context length is 128"),
    ({"model": "gpt"}, 404, "`gpt` does not exist"),
    ({"messages": []}, 400, "`messages` must not be empty"),
    ({"messages": [], "system": "x"}, 400, "`messages` must not be empty"),
    ({"messages": [{"role": "tool", "content": "x"}]}, 400, "messages.0.role"),
    ({"messages": [{"role": "user", "content": None}]}, 400, "messages.0.content: must be a string or a list"),
    ({"messages": [USER, {"role": "user", "content": [{"type": "image"}]}]}, 400, "messages.1.content: a content"),
    ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, 400, "type 'image' is not supported"),
    ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, 400, "type 'document'"),
    ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, 400, "string in `tool_use_id`"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": 1}]}]}, 400, "string in `text`"),
    ({"tools": [{"name": "x"}]}, 400, "tools.0.input_schema"),
    ({"tool_choice": {"type": "any"}}, 400, "`tool_choice`"),
    ({"thinking": {"type": "enabled", "budget_tokens": 1024}, "max_tokens": 2000}, 400, "--reasoning-parser"),
    ({"output_format": {"type": "json_schema"}}, 400, "`output_format`"),
    ({"n": 2}, 400, "`n` is not supported"),
    ({"stop": ["x"]}, 400, "`stop` is not supported"),
    ({"temperature": -1}, 400, "temperature"),
    ({"stop_sequences": [""]}, 400, "`stop_sequences` must not contain an empty string"),
    ({"stop_sequences": ["x" * 2049]}, 400, "`stop_sequences` must have at most 2048"),
    ({"tools": [], "tool_choice": {"type": "auto"}, "thinking": {"type": "disabled"}, "top_k": None}, 200, ""),
]


async def test_edits_of_the_context_that_clear_nothing_are_taken(client):
    """Claude Code sends one with each request that may think."""
    keep, every = {"type": "clear_thinking_20251015", "keep": "all"}, {"type": "all"}
    turns = {"type": "thinking_turns", "value": 1}
    for edits, status in (
        ([keep], 200),
        ([{**keep, "keep": every}, keep], 200),
        ([], 200),
        ([{**keep, "keep": turns}], 400),
        ([{"type": "clear_thinking_20251015"}], 400),
        ([keep, {"type": "clear_tool_uses_20250919"}], 400),
        (keep, 400),
        ("x", 400),
    ):
        for path in ("/v1/messages", "/v1/messages/count_tokens"):
            body = {**MESSAGE, "context_management": {"edits": edits}}
            response = await client.post(path, json=body)
            assert response.status_code == status, (edits, response.text)
            if status == 400:
                assert "`context_management` is not supported" in error_of(response)["message"]
    other = {**MESSAGE, "context_management": {"edits": [keep], "other": True}}
    assert (await client.post("/v1/messages", json=other)).status_code == 400


async def test_mistakes_are_named(client):
    for fields, status, text in MISTAKES:
        response = await client.post("/v1/messages", json={**MESSAGE, **fields})
        assert response.status_code == status, f"{fields}: {response.text}"
        if status != 200:
            assert text in error_of(response)["message"]
            assert error_of(response)["type"] == ("not_found_error" if status == 404 else "invalid_request_error")
        if "tools" in fields or "thinking" in fields:
            counted = await client.post("/v1/messages/count_tokens", json={**MESSAGE, **fields})
            assert counted.status_code == status, fields


async def test_failures_of_nodes_have_anthropics_types(nodes):
    async with running(nodes, request_timeout=5) as (_, client):
        for error, status, kind in (
            (Overloaded("full"), 429, "rate_limit_error"),
            (CacheExhausted("it can never fit"), 503, "overloaded_error"),
            (InternalError("a mistake"), 500, "api_error"),
        ):
            nodes.script = lambda prefill, error=error: Answer(error=error)
            for stream in (False, True):
                response = await client.post("/v1/messages", json={**MESSAGE, "stream": stream})
                assert response.status_code == status, response.text
                assert error_of(response)["type"] == kind


async def test_a_failure_in_mid_stream_is_the_last_event(client, nodes, router):
    nodes.script = says("hello world, hello there", hold=asyncio.Event(), hold_at=2)
    response = await client.post("/v1/messages", json={**MESSAGE, "stream": True, "timeout": 1})
    last = events(response.text)[-1]
    assert last["error"] == {"type": "timeout_error", "message": "not finished within 1 s"}
    assert last["request_id"] == response.headers["request-id"]
    await router.idle()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_cancels_its_message(client, nodes, router, stream):
    nodes.script = says("hello world, hello there", hold=asyncio.Event(), hold_at=2)
    request = asyncio.create_task(client.post("/v1/messages", json={**MESSAGE, "stream": stream}))
    await nodes.until(lambda: nodes.prefills)
    request.cancel()
    await nodes.until(lambda: nodes.aborts)
    await router.idle()


async def test_failures_before_the_route_have_the_form_of_their_path(nodes):
    async with running(nodes, api_key=(SecretStr("sk-one"),), max_body_bytes=1024) as (router, client):
        known = {"x-api-key": "sk-one", "anthropic-version": "2023-06-01"}
        assert (await client.post("/v1/messages", json=MESSAGE, headers=known)).status_code == 200
        for path, content, headers, status, kind in (
            ("/v1/messages", b"{}", {}, 401, "authentication_error"),
            ("/v1/messages", b"{}", {"x-api-key": "sk-on"}, 401, "authentication_error"),
            ("/v1/messages", b" " * 2000, known, 413, "request_too_large"),
            ("/v1/messages", b"{", known, 400, "invalid_request_error"),
            ("/v1/messages/batches", b"{}", known, 404, "not_found_error"),
        ):
            response = await client.post(path, content=content, headers=headers)
            assert (response.status_code, error_of(response)["type"]) == (status, kind)
        response = await client.get("/v1/messages", headers=known)
        assert (response.status_code, error_of(response)["type"]) == (405, "invalid_request_error")
        for path in ("/v1/messagesx", "/v1/chat/completions"):
            response = await client.post(path, headers={})
            assert set(response.json()["error"]) == {"message", "type", "param", "code"}
            assert "request-id" not in response.headers
        async with peer(router.server.http_address.port) as broken:
            await broken.send(b"POST /v1/messages?a HTTP/1.1\r\nx: " + b"x" * 2**16)
            status, _, body = await broken.answer()
            assert (status, json.loads(body)["error"]["type"]) == (431, "invalid_request_error")
            assert json.loads(body)["type"] == "error"
