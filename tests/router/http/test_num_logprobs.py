"""How many logprobs requests may ask for over HTTP, where the nodes tell those of the whole vocabulary."""

from typing import Any

import pytest
import pytest_asyncio

from baton.node_info import NodeRole
from tests.router.conftest import on_shared_loop, says, shared_by_all, shared_fixtures
from tests.router.fake_node import FakeCluster
from tests.router.http_shapes import error_of
from tests.router.tiny_tokenizer import vocab_size

CHAT, COMPLETIONS, TOKENS = "/v1/chat/completions", "/v1/completions", "/inference/v1/generate"
RESPONSES, SGLANG = "/v1/responses", "/generate"
USER = {"messages": [{"role": "user", "content": "hi"}]}
INPUT = {"input": "hi", "include": ["message.output_text.logprobs"]}
SIZE = vocab_size()
nodes, router, client = shared_fixtures()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared():
    cluster = FakeCluster(says("hello world"))
    await cluster.add(NodeRole.PREFILL, max_logprobs=SIZE, max_model_len=4096)
    await cluster.add(NodeRole.DECODE, max_logprobs=SIZE + 9, max_model_len=4096)
    async with shared_by_all(cluster) as shared:
        yield shared
    await cluster.close()


@on_shared_loop
@pytest.mark.parametrize(
    ("path", "fields", "expected"),
    [
        (CHAT, {**USER, "logprobs": True, "top_logprobs": -1, "prompt_logprobs": 30}, (SIZE, 30)),
        (COMPLETIONS, {"prompt": "x", "logprobs": 30, "prompt_logprobs": -1}, (30, SIZE)),
        (COMPLETIONS, {"prompt": "x", "logprobs": -1, "prompt_logprobs": 3, "echo": True}, (SIZE, SIZE)),
        (COMPLETIONS, {"prompt": "x", "logprobs": 0, "logprob_token_ids": [*range(30)]}, (30, None)),
        (COMPLETIONS, {"prompt": "x", "logprobs": -1, "n": 2, "best_of": 3}, (SIZE, None)),
        (COMPLETIONS, {"prompt": "x", "logprobs": 20, "n": 128, "max_tokens": 2000}, (20, None)),  # as ever
        (TOKENS, {"token_ids": [5, 6], "sampling_params": {"logprobs": -1, "prompt_logprobs": -1}}, (SIZE, SIZE)),
        (RESPONSES, {**INPUT, "top_logprobs": SIZE}, (SIZE, None)),
        (SGLANG, {"text": "x", "return_logprob": True, "top_logprobs_num": SIZE}, (SIZE, None)),
    ],
)
async def test_as_many_as_the_nodes_tell(client, nodes, path: str, fields: dict[str, Any], expected: Any) -> None:
    response = await client.post(path, json=fields)
    assert response.status_code == 200, response.text
    asked = nodes.prefills[-1].sampling
    assert (asked.num_logprobs, asked.num_prompt_logprobs) == expected


@on_shared_loop
async def test_a_request_of_tokens_is_rendered_with_the_number(client) -> None:
    completion = {"prompt": "x", "logprobs": -1, "prompt_logprobs": 7}
    [rendered] = (await client.post(f"{COMPLETIONS}/render", json=completion)).json()
    assert (rendered["sampling_params"]["logprobs"], rendered["sampling_params"]["prompt_logprobs"]) == (SIZE, 7)
    chat = {**USER, "logprobs": True, "top_logprobs": 30, "prompt_logprobs": -1}
    rendered = (await client.post(f"{CHAT}/render", json=chat)).json()
    assert (rendered["sampling_params"]["logprobs"], rendered["sampling_params"]["prompt_logprobs"]) == (30, SIZE)


@on_shared_loop
@pytest.mark.parametrize(
    ("path", "fields", "param", "says_"),
    [
        (CHAT, {**USER, "logprobs": True, "top_logprobs": SIZE + 1}, "top_logprobs", f"[-1, {SIZE}], not {SIZE + 1}"),
        (f"{CHAT}/render", {**USER, "prompt_logprobs": -2}, "prompt_logprobs", f"[-1, {SIZE}], not -2"),
        (COMPLETIONS, {"prompt": "x", "logprobs": -2}, "logprobs", f"[-1, {SIZE}], not -2"),
        (f"{COMPLETIONS}/render", {"prompt": "x", "logprobs": 999}, "logprobs", f"[-1, {SIZE}], not 999"),
        (TOKENS, {"token_ids": [5], "sampling_params": {"logprobs": 999}}, "logprobs", "not 999"),
        (RESPONSES, {**INPUT, "top_logprobs": 999}, "top_logprobs", f"[-1, {SIZE}], not 999"),
        (SGLANG, {"text": "x", "return_logprob": True, "top_logprobs_num": -1}, "top_logprobs_num", f"[0, {SIZE}]"),
        (
            COMPLETIONS,
            {"prompt": "x", "logprobs": -1, "n": 128, "max_tokens": 120},
            "logprobs",
            f"at most 4194304 in all answers here, not {128 * 120 * (1 + SIZE)}: n, max_tokens or logprobs must be",
        ),
        (COMPLETIONS, {"prompt": [5] * 100, "n": 40, "prompt_logprobs": -1}, "prompt_logprobs", "at most 1048576"),
    ],
)
async def test_more_are_refused_by_name(client, path: str, fields: dict[str, Any], param: str, says_: str) -> None:
    response = await client.post(path, json=fields)
    assert response.status_code == 400, response.text
    error = error_of(response)
    assert error["param"] == param
    assert says_ in error["message"]
