"""The `openai` client against a real cluster: answers that are known to be right, and what it is told about them."""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import Iterator
from random import Random
from typing import Any

import httpx
import openai
import pytest

from tests.e2e.cluster import wait_until
from tests.e2e.conftest import House
from tools import tiny_tasks

pytestmark = pytest.mark.timeout(300)

MODEL = "baton-tiny"
RECALL = tiny_tasks.recall(Random(7), "heldout", num_tokens=700)
PLAIN = tiny_tasks.recall(Random(8), "heldout", num_tokens=300, plain=True)


@pytest.fixture(scope="module")
def client(house: House) -> Iterator[openai.OpenAI]:
    http: Any = httpx.Client(trust_env=False)  # openai's types name a successor of httpx, where that is installed
    with openai.OpenAI(base_url=f"{house.chunk_64.url}/v1", api_key="none", max_retries=0, http_client=http) as client:
        yield client


def chat(client: openai.OpenAI, **fields: Any) -> Any:
    return client.chat.completions.create(**{"model": MODEL, "messages": RECALL.messages, "temperature": 0, **fields})


def test_a_fact_is_recalled_and_the_second_time_the_caches_help(client: openai.OpenAI) -> None:
    salt = {"cache_salt": secrets.token_hex(8)}
    first, second = (chat(client, extra_body=salt) for _ in range(2))
    assert first.object == "chat.completion"
    assert first.model == MODEL
    for answer in (first, second):
        assert RECALL.check(answer.choices[0].message.content)
        assert answer.choices[0].finish_reason == "stop"
        assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    length = second.usage.prompt_tokens
    assert second.usage.prompt_tokens_details.cached_tokens == (length - 1) // 16 * 16
    assert second.timings["decode_cached_tokens"] == length // 16 * 16
    assert second.timings["transfer_bytes"] < first.timings["transfer_bytes"]


def test_the_router_knows_which_blocks_its_nodes_hold(client: openai.OpenAI, house: House) -> None:
    salt = secrets.token_hex(8)
    wait_until(lambda: why_not_indexed(house))
    before = indexed(house)
    answer = chat(client, extra_body={"cache_salt": salt})
    num_blocks = answer.usage.prompt_tokens // 16
    wait_until(lambda: why_not_indexed(house))
    gained = {name: number - before[name] for name, number in indexed(house).items()}
    assert gained["prefill-64"] == num_blocks > 0
    assert gained["decode-large"] == (answer.usage.total_tokens - 1) // 16, "blocks of the answer count too"


def indexed(house: House) -> dict[str, int]:
    """How many blocks of each node the router knows of."""
    return {node["node_id"]: node["num_blocks"] for node in house.chunk_64.page("/debug/prefix_index").json()["nodes"]}


def why_not_indexed(house: House) -> str | None:
    """Why the router does not know of all blocks that its nodes hold, nor of others."""
    known = indexed(house)
    held = {
        node.name: sum(bool(block["hash"]) for block in node.audit()["blocks"])
        for node in house.nodes
        if node.name in known
    }
    return None if known == held and len(known) == 2 else f"the router knows of {known}, while {held} are held"


def test_a_decode_node_without_prefill_nodes_answers_alike(client: openai.OpenAI, house: House) -> None:
    alone = openai.OpenAI(base_url=f"{house.alone.url}/v1", api_key="none", max_retries=0)
    answers = [chat(asked, messages=[{"role": "user", "content": "Hello!"}]) for asked in (client, alone)]
    assert answers[0].choices[0].message.content == answers[1].choices[0].message.content


def test_a_stream_is_the_whole_in_pieces(client: openai.OpenAI) -> None:
    whole = chat(client)
    chunks = list(chat(client, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert len(chunks) > 3
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert len({chunk.id for chunk in chunks}) == 1


def test_a_conversation_is_remembered(client: openai.OpenAI) -> None:
    sample = tiny_tasks.chat_recall(Random(3), "heldout")
    assert sample.check(chat(client, messages=sample.messages).choices[0].message.content)


def test_json_is_filled_in(client: openai.OpenAI) -> None:
    sample = tiny_tasks.fill_json(Random(4), "heldout")
    answer = chat(client, messages=sample.messages)
    assert json.loads(answer.choices[0].message.content) == json.loads(sample.answer)


def test_completions_of_text_and_of_token_ids(client: openai.OpenAI, house: House) -> None:
    fields: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_tokens": 20}
    text = client.completions.create(prompt=PLAIN.prompt, **fields)
    assert text.choices[0].text.startswith(PLAIN.answer)
    url = house.chunk_64.url
    tokens = httpx.post(f"{url}/tokenize", json={"prompt": PLAIN.prompt}, trust_env=False).json()["tokens"]
    assert text.usage.prompt_tokens == len(tokens)
    ids = client.completions.create(prompt=tokens, extra_body={"return_token_ids": True}, **fields)
    assert ids.choices[0].text == text.choices[0].text
    shown = [token for token in ids.choices[0].token_ids if token not in (2, 4)]  # EOS ids have no text
    decoded = httpx.post(f"{url}/detokenize", json={"tokens": shown}, trust_env=False).json()["prompt"]
    assert ids.choices[0].text == decoded
    both = client.completions.create(prompt=[PLAIN.prompt, "Once upon a time"], n=2, **fields)
    assert [choice.index for choice in both.choices] == [0, 1, 2, 3]
    assert both.choices[0].text == both.choices[1].text == text.choices[0].text


def test_samples_seeds_and_limits(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {
        "messages": [{"role": "user", "content": "Tell me a short story about a fox."}],
        "temperature": 1.0,
        "n": 3,
        "seed": 5,
        "max_completion_tokens": 30,
    }
    first, again = (chat(client, **fields) for _ in range(2))
    texts = [choice.message.content for choice in first.choices]
    assert texts == [choice.message.content for choice in again.choices]
    assert len(set(texts)) > 1
    assert {choice.finish_reason for choice in first.choices} == {"length"}
    assert first.usage.completion_tokens == 90
    streamed = ["", "", ""]
    for chunk in chat(client, stream=True, **fields):
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert streamed == texts


def test_a_stop_string_is_cut_out_and_ends_the_answer(client: openai.OpenAI) -> None:
    whole = chat(client).choices[0].message.content
    stop = whole[len(whole) // 2 : len(whole) // 2 + 4]
    answer = chat(client, stop=[stop, "never said"])
    assert answer.choices[0].message.content == whole[: whole.index(stop)]
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].stop_reason == stop


def test_logprobs(client: openai.OpenAI) -> None:
    answer = chat(client, logprobs=True, top_logprobs=3)
    entries = answer.choices[0].logprobs.content
    assert len(entries) == answer.usage.completion_tokens
    for entry in entries:  # greedy: the chosen token is the most likely one
        assert [entry.token, entry.logprob] == [entry.top_logprobs[0].token, entry.top_logprobs[0].logprob]
        assert sum(math.exp(other.logprob) for other in entry.top_logprobs) <= 1.0001
        assert bytes(entry.bytes).decode() == entry.token
    spoken = "".join(entry.token for entry in entries[:-1])  # the last is EOS
    assert spoken == answer.choices[0].message.content
    old = client.completions.create(model=MODEL, prompt=PLAIN.prompt, logprobs=2, max_tokens=3, temperature=0)
    logprobs: Any = old.choices[0].logprobs
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.top_logprobs) == 3
    assert "".join(logprobs.tokens) == old.choices[0].text


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).model_dump()["max_model_len"] == 4096


def test_errors_say_what_is_wrong(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="`other` does not exist"):
        chat(client, model="other")
    with pytest.raises(openai.BadRequestError, match=r"4096 tokens.*5000 input tokens") as too_long:
        client.completions.create(model=MODEL, prompt=[5] * 5000)
    assert too_long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="4000 > 4096 - 100"):
        client.completions.create(model=MODEL, prompt=[5] * 100, max_tokens=4000)
    with pytest.raises(openai.BadRequestError) as wrong:
        chat(client, temperature="hot")
    assert wrong.value.param == "temperature"


def test_a_deadline_ends_the_request(client: openai.OpenAI, house: House) -> None:
    long: dict[str, Any] = {"extra_body": {"timeout": 0.4, "ignore_eos": True}, "max_tokens": 3000}
    with pytest.raises(openai.InternalServerError, match=r"not finished within 0\.4 s") as whole:
        chat(client, **long)
    assert whole.value.status_code == 504
    received = []
    with pytest.raises(openai.APIError, match=r"not finished within 0\.4 s"):
        received += [chunk.choices[0].delta.content for chunk in chat(client, stream=True, **long)]
    house.wait_whole()


def test_the_request_id_goes_in_and_out(client: openai.OpenAI, house: House) -> None:
    name = f"e2e-{secrets.token_hex(4)}"
    messages: Any = RECALL.messages
    raw = client.chat.completions.with_raw_response.create(
        model=MODEL, messages=messages, extra_headers={"x-request-id": name}
    )
    assert raw.headers["x-request-id"] == name
    assert name in raw.parse().id
    assert f"request_id={name}" in house.chunk_64.log_tail()
