"""What the HTTP API refuses, and how failures look to its clients."""

import asyncio
import json

import pytest
from starlette.requests import Request

from baton.errors import (
    CacheExhausted,
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    NodeUnavailable,
    Overloaded,
)
from router.http.errors import on_exception, response_to
from tests.router.conftest import on_shared_loop, says
from tests.router.fake_node import Answer
from tests.router.http_shapes import CHAT, error_of
from tests.router.tiny_tokenizer import IM_END

IMAGE = [{"type": "image_url", "image_url": {"url": "x"}}]
LONG = [{"role": "user", "content": "x" * 20_000}]
DEEP = {"a": {"a": {"a": {"a": {"a": {"a": {"a": {"a": 1}}}}}}}}
TOOL = {"type": "function", "function": {"name": "f"}}
NAMED = {"prompt": "x", "logprobs": 1, "logprob_token_ids": [5]}


@on_shared_loop
@pytest.mark.parametrize(
    ("path", "body", "status", "param", "says"),
    [
        ("chat/completions", b"{", 400, None, "not valid JSON"),
        ("chat/completions", b"\xff", 400, None, "not valid JSON"),
        ("chat/completions", b"[]", 400, None, "object"),
        ("chat/completions", {"model": "tiny"}, 400, "messages", "required"),
        ("chat/completions", {**CHAT, "messages": []}, 400, "messages", "empty"),
        ("chat/completions", {**CHAT, "messages": [{"role": "user", "content": 3}]}, 400, "messages", "text parts"),
        ("chat/completions", {**CHAT, "messages": [{"role": "user", "content": IMAGE}]}, 400, "messages", "image_url"),
        ("chat/completions", {**CHAT, "messages": [{"role": "x", "content": ""}]}, 400, "messages", "Unknown role: x"),
        ("chat/completions", {**CHAT, "messages": [{"role": "tool", "content": ""}]}, 400, "messages", "role: tool"),
        ("chat/completions", {**CHAT, "model": "gpt"}, 404, "model", "`gpt` does not exist"),
        ("chat/completions", {**CHAT, "max_tokens": "5"}, 400, "max_tokens", "integer"),
        ("chat/completions", {**CHAT, "max_tokens": 0}, 400, "max_tokens", "1 or more"),
        ("chat/completions", {**CHAT, "max_tokens": 128}, 400, "max_tokens", "128 > 128 - "),
        ("chat/completions", {**CHAT, "max_completion_tokens": 999}, 400, "max_completion_tokens", "too large"),
        ("chat/completions", {**CHAT, "temperature": -1}, 400, "temperature", "not -1"),
        ("chat/completions", {**CHAT, "top_p": 0}, 400, "top_p", "(0, 1]"),
        ("chat/completions", {**CHAT, "n": 0}, 400, "n", "[1, 128]"),
        ("chat/completions", {**CHAT, "stop": [1]}, 400, "stop", "list of strings"),
        ("chat/completions", {**CHAT, "stop": ""}, 400, "stop", "empty string"),
        ("chat/completions", {**CHAT, "top_logprobs": 2}, 400, "top_logprobs", "logprobs"),
        ("chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 21}, 400, "top_logprobs", "20"),
        ("chat/completions", {**CHAT, "logit_bias": {"x": 1, "2": 1, "y": 1}}, 400, "logit_bias", "more, not 'x', 'y'"),
        ("chat/completions", {**CHAT, "logprob_token_ids": [5]}, 400, "logprob_token_ids", "needs `logprobs`"),
        ("completions", {"prompt": "x", "logprob_token_ids": [5]}, 400, "logprob_token_ids", "needs `logprobs`"),
        ("completions", {**NAMED, "logprob_token_ids": []}, 400, "logprob_token_ids", "at least 1"),
        ("completions", {**NAMED, "logprob_token_ids": [5] * 21}, 400, "logprob_token_ids", "at most 20"),
        ("completions", {**NAMED, "logprob_token_ids": [400]}, 400, "logprob_token_ids", "Token id 400"),
        ("completions", {**NAMED, "use_beam_search": True}, 400, "logprob_token_ids", "exclude each other"),
        ("chat/completions", {**CHAT, "logit_bias": {"4000": 1}}, 400, "logit_bias", "outside [0, 335): 4000"),
        ("chat/completions", {**CHAT, "stop_token_ids": [4000]}, 400, "stop_token_ids", "outside"),
        ("chat/completions", {**CHAT, "allowed_token_ids": []}, 400, "allowed_token_ids", "at least 1"),
        ("chat/completions", {**CHAT, "allowed_token_ids": [4000]}, 400, "allowed_token_ids", "outside"),
        ("chat/completions", {**CHAT, "allowed_token_ids": [5] * 16_385}, 400, "allowed_token_ids", "at most 16384"),
        (
            "chat/completions",
            {**CHAT, "allowed_token_ids": [IM_END], "min_tokens": 1},
            400,
            "min_tokens",
            "forbids all",
        ),
        ("chat/completions", {**CHAT, "bad_words": "x"}, 400, "bad_words", "list of strings"),
        ("chat/completions", {**CHAT, "bad_words": ["x", " "]}, 400, "bad_words", "blank"),
        ("chat/completions", {**CHAT, "bad_words": ["x" * 8193]}, 400, "bad_words", "at most 8192 characters"),
        ("chat/completions", {**CHAT, "bad_words": [*map(str, range(257))]}, 400, "bad_words", "at most 256 strings"),
        ("chat/completions", {**CHAT, "truncate_prompt_tokens": 0}, 400, "truncate_prompt_tokens", "-1, or 1 or more"),
        ("chat/completions", {**CHAT, "truncate_prompt_tokens": 129}, 400, "truncate_prompt_tokens", "at most 128"),
        ("chat/completions", {**CHAT, "request_id": "a b"}, 400, "request_id", "pattern"),
        ("chat/completions", {**CHAT, "request_id": "x" * 129}, 400, "request_id", "pattern"),
        ("chat/completions", {**CHAT, "length_penalty": 0.5}, 400, "length_penalty", "needs use_beam_search"),
        ("chat/completions", {**CHAT, "best_of": "1"}, 400, "best_of", "integer"),
        ("completions", {"prompt": "x", "n": 2, "best_of": 1}, 400, "best_of", "at least `n`, 2"),
        ("chat/completions", {**CHAT, "min_tokens": 9, "max_tokens": 8}, 400, "min_tokens", "max_tokens"),
        ("chat/completions", {**CHAT, "stream_options": {}}, 400, "stream_options", "stream"),
        ("chat/completions", {**CHAT, "tools": [TOOL]}, 400, "tools", "--tool-call-parser"),
        ("completions", {"prompt": "x", "tools": [TOOL]}, 400, "tools", "not supported"),
        ("chat/completions", {**CHAT, "response_format": {"type": "xml"}}, 400, "response_format", "supported"),
        ("chat/completions", {**CHAT, "modalities": ["audio"]}, 400, "modalities", "not supported"),
        ("chat/completions", {**CHAT, "timeout": 0}, 400, "timeout", "above 0"),
        ("chat/completions", {**CHAT, "seed": 1.5}, 400, "seed", "integer"),
        ("chat/completions", {**CHAT, "seed": True}, 400, "seed", "integer"),
        ("chat/completions", {**CHAT, "n": True}, 400, "n", "integer"),
        ("chat/completions", {**CHAT, "temperature": True}, 400, "temperature", "number"),
        ("chat/completions", {**CHAT, "stop": 0}, 400, "stop", "list of strings"),
        ("chat/completions", {**CHAT, "stop": False}, 400, "stop", "list of strings"),
        ("chat/completions", {**CHAT, "stop": {}}, 400, "stop", "list of strings"),
        ("chat/completions", {**CHAT, "stop": [*map(str, range(65))]}, 400, "stop", "at most 64 strings, not 65"),
        ("chat/completions", {**CHAT, "stop": ["x" * 2049]}, 400, "stop", "at most 2048 characters together"),
        ("chat/completions", {**CHAT, "stop_token_ids": [5] * 1025}, 400, "stop_token_ids", "at most 1024"),
        ("chat/completions", {**CHAT, "logit_bias": {str(i): 1 for i in range(1025)}}, 400, "logit_bias", "1024"),
        ("chat/completions", {**CHAT, "logit_bias": {"-1": 1}}, 400, "logit_bias", "integers of 0 or more"),
        ("chat/completions", {**CHAT, "priority": 2**31}, 400, "priority", "must be in [-2^31, 2^31)"),
        ("completions", {"prompt": "x", "use_beam_search": True, "n": 11}, 400, "n", "at most 10 in a beam search"),
        ("completions", {"prompt": "x", "use_beam_search": True, "best_of": 11}, 400, "best_of", "at most 10"),
        ("completions", {"prompt": "x", "use_beam_search": True, "presence_penalty": 1}, 400, "presence_penalty", ""),
        ("completions", {"prompt": "x", "use_beam_search": True, "n": 3, "best_of": 2}, 400, "n", "at most the width"),
        ("completions", {"prompt": "x", "use_beam_search": True, "stop": "a"}, 400, "stop", "in a beam search"),
        ("completions", {"prompt": "x", "use_beam_search": True, "temperature": 1}, 400, "temperature", "must be 0"),
        ("completions", {"prompt": "x", "length_penalty": 2}, 400, "length_penalty", "needs use_beam_search"),
        ("completions", {"prompt": "x", "use_beam_search": True, "early_stopping": True}, 400, "early_stopping", "not"),
        ("chat/completions", {**CHAT, "logits_processors": "x"}, 400, "logits_processors", "list"),
        ("chat/completions", {**CHAT, "logits_processors": [7]}, 400, "logits_processors", ""),
        ("chat/completions", {**CHAT, "logits_processors": ["x"] * 17}, 400, "logits_processors", "at most 16"),
        ("chat/completions", {**CHAT, "logits_processors": [{"name": 7}]}, 400, "logits_processors", ".0.name: Input"),
        ("chat/completions", {**CHAT, "logits_processors": [{}]}, 400, "logits_processors", "must have `name`"),
        ("chat/completions", {**CHAT, "priority": "high"}, 400, "priority", "integer"),
        ("chat/completions", {**CHAT, "cache_salt": "x" * 257}, 400, "cache_salt", "at most 256"),
        ("chat/completions", {**CHAT, "cache_salt": ""}, 400, "cache_salt", "at least 1"),
        ("chat/completions", {**CHAT, "model": "x" * 257}, 400, "model", "at most 256"),
        ("chat/completions", {**CHAT, "messages": CHAT["messages"] * 10_001}, 400, "messages", "at most 10000"),
        ("chat/completions", {**CHAT, "messages": [{"role": "x" * 65, "content": ""}]}, 400, "messages", "at most 64"),
        ("chat/completions", {**CHAT, "chat_template_kwargs": {"a": ["b"] * 256}}, 400, "chat_template_kwargs", "256"),
        ("chat/completions", {**CHAT, "chat_template_kwargs": {"a": "x" * 20_000}}, 400, "chat_template_kwargs", "16"),
        ("chat/completions", {**CHAT, "chat_template_kwargs": DEEP}, 400, "chat_template_kwargs", "nested"),
        ("chat/completions", {**CHAT, **{f"f{i}": 1 for i in range(65)}}, 400, None, "65 unknown fields"),
        ("chat/completions", {**CHAT, "regex": "a+"}, 400, "regex", "not supported"),
        ("chat/completions", {**CHAT, "ebnf": "a"}, 400, "ebnf", "not supported"),
        ("chat/completions", {**CHAT, "json_schema": "{}"}, 400, "json_schema", "not supported"),
        ("chat/completions", {**CHAT, "grammar": "a"}, 400, "grammar", "not supported"),
        ("chat/completions", {**CHAT, "lora_path": "a"}, 400, "lora_path", "not supported"),
        ("chat/completions", {**CHAT, "system": "Be terse."}, 400, "system", "not supported"),
        ("chat/completions", {**CHAT, "stop_sequences": ["a"]}, 400, "stop_sequences", "not supported"),
        ("chat/completions", b"[" * 100_000, 400, None, "not valid JSON"),
        ("chat/completions", b"[" * 300_000, 400, None, "300000 brackets"),
        ("chat/completions", {**CHAT, "tool_choice": 7}, 400, "tool_choice", "e: must be a string or an object"),
        ("chat/completions", {**CHAT, "guided_json": 7}, 400, "guided_json", "n: must be a string or an object"),
        ("chat/completions", {**CHAT, "messages": LONG}, 400, "messages", "maximum context length is 128 tokens"),
        ("completions", {"prompt": "x" * 20_000}, 400, "prompt", "maximum context length is 128 tokens"),
        ("completions", {"prompt": "x" * 99, "n": 128, "echo": True}, 200, None, ""),
        ("completions", {"prompt": ""}, 200, None, ""),
        ("completions", {"prompt": "", "add_special_tokens": False}, 400, "prompt", "empty"),
        ("completions", {"prompt": []}, 400, "prompt", "list of token ids"),
        ("completions", {"prompt": [1, "a"]}, 400, "prompt", "list of token ids"),
        ("completions", {"prompt": [[1], []]}, 400, "prompt", "list of token ids"),
        ("completions", {"prompt": [400_000]}, 400, "prompt", "out of vocabulary"),
        ("completions", {"prompt": [-1]}, 400, "prompt", "out of vocabulary"),
        ("completions", {"prompt": [-1], "echo": True}, 400, "prompt", "out of vocabulary"),
        ("completions", {"prompt": ["x", [2**32]], "echo": True}, 400, "prompt", "out of vocabulary"),
        ("completions", {"prompt": [7] * 128}, 400, "prompt", "maximum context length is 128 tokens"),
        ("completions", {"prompt": "x", "suffix": "y"}, 400, "suffix", "not supported"),
        ("completions", {"prompt": "x", "prompt_logprobs": -1}, 400, "prompt_logprobs", "in [0, 20]"),
        ("completions", {"prompt": "x", "logprobs": True}, 400, "logprobs", "integer"),
    ],
)
async def test_mistakes_are_named(shared_client, path, body, status, param, says):
    bodies = [body]
    if isinstance(body, dict):
        streams = [False] if "stream_options" in body else [False, True]
        bodies = [json.dumps({**body, "stream": stream}).encode() for stream in streams]
    for content in bodies:
        response = await shared_client.post(f"/v1/{path}", content=content)
        assert response.status_code == status, response.text
        if status != 200:
            error = error_of(response)
            assert (error["type"], error["param"]) == ("invalid_request_error", param)
            assert says in error["message"]


async def test_codes_that_clients_look_for(client):
    response = await client.post("/v1/completions", json={"prompt": [7] * 200})
    assert error_of(response)["code"] == "context_length_exceeded"
    assert "200 input tokens" in error_of(response)["message"]
    response = await client.post("/v1/completions", json={"prompt": "x", "model": "other"})
    assert error_of(response)["code"] == "model_not_found"


async def test_a_client_that_leaves_while_it_sends_is_no_mistake_of_ours(router, caplog):
    heard = [{"type": "http.request", "body": b'{"prompt": "x', "more_body": True}, {"type": "http.disconnect"}]
    said = []

    async def receive():
        return heard.pop(0)

    async def send(message):
        said.append(message)

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/completions",
        "query_string": b"",
        "headers": [],
        "client": None,
    }
    await router.server.app(scope, receive, send)
    assert said[0]["status"] == 499
    assert "internal error" not in caplog.text


async def test_unknown_paths_and_methods(client):
    response = await client.get("/v1/nothing")
    assert (response.status_code, error_of(response)["type"]) == (404, "invalid_request_error")
    response = await client.get("/v1/chat/completions")
    assert response.status_code == 405
    assert response.headers["allow"] == "POST"
    assert "GET" in error_of(response)["message"]
    response = await client.put("/admin/nodes")
    assert (response.status_code, response.headers["allow"]) == (405, "GET, HEAD, POST")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status", "retry"),
    [
        (Overloaded("the queue is full"), 429, "1"),
        (CacheExhausted("it can never fit"), 503, "1"),
        (InvalidRequest("the node refuses"), 400, None),
    ],
)
async def test_what_nodes_refuse_has_its_status_also_for_streams(client, nodes, stream, error, status, retry):
    nodes.script = lambda prefill: Answer(error=error)
    response = await client.post("/v1/chat/completions", json={**CHAT, "stream": stream})
    assert response.status_code == status
    assert error.message in error_of(response)["message"]
    assert response.headers.get("retry-after") == retry


async def test_an_error_in_mid_stream_is_its_last_event(client, nodes, router):
    nodes.script = says("hello world, hello there", hold=asyncio.Event(), hold_at=2)

    async def asked(path, body):
        response = await client.post(f"/v1/{path}", json={**body, "stream": True, "timeout": 1.0})
        assert response.status_code == 200
        *chunks, last, done = [line for line in response.text.split("\n\n") if line]
        assert (len(chunks) > 0, done) == (True, "data: [DONE]")
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "deadline_exceeded"

    await asyncio.gather(asked("chat/completions", CHAT), asked("completions", {"model": "tiny", "prompt": "hi"}))


@pytest.mark.parametrize("stream", [False, True])
async def test_deadlines(client, nodes, router, stream):
    nodes.script = says("x", hold=asyncio.Event())
    response = await client.post("/v1/chat/completions", json={**CHAT, "timeout": 0.2, "stream": stream})
    assert response.status_code == 504
    assert error_of(response)["code"] == "deadline_exceeded"
    await router.idle()


@pytest.mark.parametrize(
    ("error", "header"),
    [
        (NodeUnavailable("later"), ("retry-after", "1")),
        (InternalError("nodes were lost that ran it"), ("x-should-retry", "false")),
        (DeadlineExceeded("too late"), ("x-should-retry", "false")),
    ],
)
def test_clients_are_told_whether_to_come_again(error, header):
    assert header in response_to(error, {}).headers.items()


async def test_internal_errors_have_the_form_of_other_errors_and_are_not_tried_again():
    response = await on_exception(Request({"type": "http", "path": "/v1/completions"}), ValueError("secret"))
    assert (response.status_code, response.headers["x-should-retry"]) == (500, "false")
    assert json.loads(bytes(response.body))["error"] == {
        "message": "internal error: ValueError",
        "type": "server_error",
        "param": None,
        "code": "internal",
    }
