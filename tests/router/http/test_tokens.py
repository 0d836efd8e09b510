"""vLLM's API of tokens: token ids in, token ids out; and what chats and completions become as such requests."""

from __future__ import annotations

from typing import Any, cast

import pytest

from baton.messages import TokenLogprobs
from router.http.body import validate_fields
from router.http.tokens.schemas import TokensRequest
from router.http.tokens.shape import TokensShape
from router.text.answer import Delta
from router.text.models import ServedModel
from tests.router.conftest import on_shared_loop, says, shared_fixtures
from tests.router.fake_node import Answer
from tests.router.http.tool_chats import CALL, TOOLS, shared_with_tools
from tests.router.http_shapes import CHAT, SAMPLING, error_of, events
from tests.router.tiny_tokenizer import IM_END, tiny_tokenizer

PATH = "/inference/v1/generate"
TOKENS: dict[str, Any] = {"model": "tiny", "token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 9}}

pytestmark = on_shared_loop
shared = shared_with_tools(CALL)
nodes, router, client = shared_fixtures()


@pytest.fixture(autouse=True)
def answers(nodes: Any) -> None:
    nodes.script = lambda prefill: Answer(((8, 9, IM_END),))


def sampled(**fields: Any) -> dict[str, Any]:
    return {**TOKENS, "sampling_params": {**TOKENS["sampling_params"], **fields}}


async def test_tokens_are_continued_with_tokens(client, nodes):
    response = await client.post(PATH, json={**TOKENS, "request_id": "mine", "cache_salt": "s", "priority": 3})
    body = response.json()
    assert response.status_code == 200, response.text
    assert (body["request_id"], response.headers["x-request-id"], body["model"]) == ("mine", "mine", "tiny")
    assert body["choices"] == [{"index": 0, "logprobs": None, "finish_reason": "stop", "token_ids": [8, 9, IM_END]}]
    assert (body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"]) == (3, 3)
    assert (body["prompt_logprobs"], body["kv_transfer_params"]) == (None, None)
    assert body["timings"]["decode_node"] == "decode-1"
    (prefill,) = nodes.prefills
    assert (prefill.prompt_tokens, prefill.cache_salt, prefill.priority) == ((5, 6, 7), "s", 3)


async def test_streamed_tokens(client, nodes):
    body = {**sampled(logprobs=1, n=2), "stream": True, "stream_options": {"include_usage": True}}
    *chunks, last = events((await client.post(PATH, json={**body, "request_id": "mine"})).text)
    assert {chunk["request_id"] for chunk in chunks} == {"mine"}
    for index in range(2):
        choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
        assert [token for choice in choices for token in choice["token_ids"]] == [8, 9, IM_END]
        scored = [entry["token"] for choice in choices for entry in choice["logprobs"]["content"]]
        assert scored == ["token_id:8", "token_id:9", f"token_id:{IM_END}"]
        assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["stop"]
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 6)


async def test_sampling_parameters_have_vllms_names(client, nodes):
    lists = {"stop_token_ids": [9], "allowed_token_ids": [IM_END, 8, 9]}
    fields = {**SAMPLING, **lists, "bad_words": ["hello"], "structured_outputs": {"regex": "a+"}, "n": 2}
    body = (await client.post(PATH, json=sampled(**fields, logit_bias={"17": 3}, logits_processors=["own"]))).json()
    assert len(body["choices"]) == 2
    sampling = nodes.prefills[-1].sampling
    assert {name: getattr(sampling, name) for name in SAMPLING} == SAMPLING
    assert {name: sorted(getattr(sampling, name)) for name in lists} == lists
    assert (sampling.logit_bias, sampling.logits_processors[0].name) == ({17: 3.0}, "own")
    assert (sampling.structured_outputs.text, bool(sampling.bad_words_token_ids)) == ("a+", True)


async def test_without_sampling_parameters_the_context_bounds_the_answer(client, nodes):
    assert (await client.post(PATH, json={"token_ids": [5, 6, 7]})).status_code == 200
    sampling = nodes.prefills[-1].sampling
    assert (sampling.temperature, sampling.max_tokens) == (0.7, 4096 - 3)


async def test_a_text_ends_tokens_too(client, nodes):
    nodes.script = says("the lazy dog")
    for detokenize in (True, False):
        (choice,) = (await client.post(PATH, json=sampled(stop=["lazy"], detokenize=detokenize))).json()["choices"]
        assert choice["finish_reason"] == "stop"
        assert tiny_tokenizer().decode(choice["token_ids"]) == "the lazy"


@pytest.mark.parametrize(("logprobs", "num_top"), [(None, None), (0, 1), (1, 1), (2, 2)])
async def test_logprobs_name_tokens_by_their_ids_and_the_chosen_one_first(client, logprobs, num_top):
    (choice,) = (await client.post(PATH, json=sampled(logprobs=logprobs))).json()["choices"]
    if num_top is None:
        assert choice["logprobs"] is None
        return
    first, *_ = content = choice["logprobs"]["content"]
    assert len(content) == len(choice["token_ids"])
    assert (first["token"], first["logprob"], len(first["top_logprobs"])) == ("token_id:8", -0.5, num_top)
    assert first["top_logprobs"][0] == {"token": "token_id:8", "logprob": -0.5, "bytes": None}


@pytest.mark.parametrize(("num_top", "named"), [(1, [8]), (2, [8, 12]), (3, [8, 12, 11])])
async def test_the_chosen_token_comes_before_the_most_likely_ones(num_top: int, named: list[int]) -> None:
    entry = TokenLogprobs(-3.0, ((12, -0.1), (11, -2.0)))
    shape = TokensShape("r", cast(ServedModel, None), num_top, None)
    (choice,) = shape.chunk(Delta(0, "", (8,), (entry,)))["choices"]
    (scored,) = choice["logprobs"]["content"]
    assert [top["token"] for top in scored["top_logprobs"]] == [f"token_id:{token}" for token in named]


async def test_logprobs_of_named_tokens_and_of_the_prompt(client, nodes):
    fields = {"logprobs": 0, "logprob_token_ids": [12, 11], "prompt_logprobs": 1}
    body = (await client.post(PATH, json=sampled(**fields))).json()
    assert nodes.prefills[-1].sampling.logprob_token_ids == (12, 11)
    assert validate_fields(sampled(**fields), TokensRequest).sampling.num_top == 3
    assert [entry and next(iter(entry)) for entry in body["prompt_logprobs"]] == [None, "6", "7"]


MISTAKES: list[tuple[dict[str, Any], str, str]] = [
    ({"token_ids": []}, "token_ids", "at least 1"),
    ({"token_ids": "x"}, "token_ids", "list"),
    ({"token_ids": [5, 10_000]}, "token_ids", "out of vocabulary"),
    ({"token_ids": [5] * 5000}, "token_ids", "maximum context length"),
    ({"sampling_params": 3}, "sampling_params", "dictionary"),
    ({"sampling_params": {"temperature": -1}}, "temperature", "not -1"),
    ({"sampling_params": {"logprobs": 21}}, "logprobs", "not 21"),
    ({"sampling_params": {"logprobs": 0, "logprob_token_ids": [5] * 21}}, "sampling_params", "ids: List should"),
    ({"sampling_params": {"prompt_logprobs": -1}}, "prompt_logprobs", "not -1"),
    ({"sampling_params": {"logprob_token_ids": [5]}}, "logprob_token_ids", "needs `logprobs`"),
    ({"sampling_params": {"structured_outputs": {"regex": "("}}}, "structured_outputs", "regex"),
    ({"sampling_params": {"guided_json": {}}}, "guided_json", "not supported"),
    ({"sampling_params": {"thinking_token_budget": 5}}, "thinking_token_budget", "not supported"),
    ({"sampling_params": {"extra_args": {"a": 1}}}, "extra_args", "not supported"),
    ({"temperature": 0}, "temperature", "not supported"),
    ({"kv_transfer_params": {"do_remote_decode": True}}, "kv_transfer_params", "not supported"),
    ({"features": {"mm_hashes": {}}}, "features", "not supported"),
    ({"output_mode": "text"}, "output_mode", "not supported"),
    ({"stream_options": {}, "stream": True, "request_id": "a b"}, "request_id", "pattern"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "needs `stream`"),
]


async def test_mistakes_are_named(client, nodes):
    for fields, param, text in MISTAKES:
        response = await client.post(PATH, json={**TOKENS, **fields})
        assert response.status_code == 400, fields
        assert error_of(response)["param"] == param, response.text
        assert text in error_of(response)["message"]
    assert not nodes.prefills


# ---- chats and completions as requests of tokens ----

EVERYTHING: dict[str, Any] = {
    **SAMPLING,
    "max_tokens": 9,
    "n": 2,
    "logit_bias": {"17": 3},
    "stop": ["zebra"],
    "stop_token_ids": [9],
    "allowed_token_ids": [8, 9, IM_END],
    "bad_words": ["hello"],
    "logits_processors": [{"qualname": "own", "args": [1], "kwargs": {"by": 2}}],
    "prompt_logprobs": 1,
    "include_stop_str_in_output": True,
    "skip_special_tokens": False,
    "cache_salt": "s",
    "priority": 3,
    "timeout": 9.0,
}


async def asked_twice(client: Any, nodes: Any, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """The rendered request, after its nodes have got the same from it as from what was rendered."""
    rendered = (await client.post(f"{path}/render", json=body)).json()
    rendered = rendered[0] if isinstance(rendered, list) else rendered
    assert not nodes.prefills
    answer = (await client.post(path, json={**body, "return_token_ids": True})).json()
    tokens = (await client.post(PATH, json=rendered)).json()
    for choice, plain in zip(tokens["choices"], answer["choices"], strict=True):
        assert (choice["token_ids"], choice["finish_reason"]) == (plain["token_ids"], "stop")
    direct, again = nodes.prefills
    assert (again.prompt_tokens, again.sampling) == (direct.prompt_tokens, direct.sampling)
    assert (again.cache_salt, again.priority) == (direct.cache_salt, direct.priority)
    return dict(rendered)


async def test_a_chat_becomes_tokens_that_get_the_same_answers(client, nodes):
    rendered = await asked_twice(client, nodes, "/v1/chat/completions", {**CHAT, **EVERYTHING, "logprobs": True})
    assert rendered["request_id"].startswith("chatcmpl-")
    assert rendered["sampling_params"]["stop"] == ["zebra"]
    assert validate_fields(rendered, TokensRequest).wanted("x").include_stop_str_in_output


@pytest.mark.parametrize(
    "wanted",
    [
        {"response_format": {"type": "json_object"}},
        {"guided_json": {"type": "object"}},
        {"guided_choice": ["a", "b"]},
        {"guided_grammar": 'start: "a"'},
    ],
)
async def test_a_completion_becomes_tokens_that_get_the_same_answers(client, nodes, wanted):
    body = {"prompt": "hi", "logprobs": 2, "seed": 1, **wanted}
    rendered = await asked_twice(client, nodes, "/v1/completions", body)
    assert rendered["sampling_params"]["max_tokens"] == 16


async def test_a_chat_that_must_call_a_tool_is_constrained_as_tokens_too(client, nodes):
    await asked_twice(client, nodes, "/v1/chat/completions", {**TOOLS, "tool_choice": "required", "seed": 1})


async def test_each_prompt_becomes_a_request(client, nodes):
    body = {"prompt": ["hi", [5, 7]], "stream": True, "stream_options": {"include_usage": True}}
    first, second = (await client.post("/v1/completions/render", json=body)).json()
    assert (first["token_ids"], second["token_ids"]) == (list(tiny_tokenizer().encode("hi", True)), [5, 7])
    assert first["request_id"] != second["request_id"]
    assert (first["stream"], first["stream_options"]) == (True, {"include_usage": True})
    assert first["sampling_params"]["seed"] is None, "each draws its own"
    assert not nodes.prefills


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/chat/completions/render", {"messages": []}, "messages"),
        ("/v1/chat/completions/render", {**CHAT, "use_beam_search": True, "n": 2}, "use_beam_search"),
        ("/v1/chat/completions/render", {**CHAT, "best_of": 3}, "best_of"),
        ("/v1/chat/completions/render", {**CHAT, "max_completion_tokens": 9000}, "max_completion_tokens"),
        ("/v1/completions/render", {"prompt": "x", "max_tokens": 0, "echo": True}, "max_tokens"),
        ("/v1/completions/render", {"prompt": "x", "temperature": -1}, "temperature"),
        ("/v1/completions/render", {"prompt": [5] * 5000}, "prompt"),
    ],
)
async def test_what_cannot_be_rendered_is_named(client, path, fields, param):
    response = await client.post(path, json=fields)
    assert (response.status_code, error_of(response)["param"]) == (400, param), response.text
