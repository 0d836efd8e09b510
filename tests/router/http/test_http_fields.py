"""What fields and prompts of the HTTP API come to at the nodes, and in answers."""

import json

import pytest

from tests.router.conftest import on_shared_loop, shared_fixtures
from tests.router.fake_node import Answer
from tests.router.http_shapes import CHAT, SAMPLING, events
from tests.router.tiny_tokenizer import IM_END, tiny_tokenizer

pytestmark = on_shared_loop
nodes, router, client = shared_fixtures()


async def test_defaults_come_from_the_model_and_the_context(client, nodes):
    await client.post("/v1/completions", json={"prompt": [5, 6, 7], "top_p": 0.5})
    sampling = nodes.prefills[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.max_tokens) == (0.7, 0.5, 16)
    await client.post("/v1/completions", json={"prompt": [5, 6, 7], "seed": -2})
    assert nodes.prefills[1].sampling.seed == 2**64 - 2
    assert nodes.prefills[0].sampling.seed != nodes.prefills[1].sampling.seed


async def test_a_seed_of_minus_one_draws_one(client, nodes):
    """As in vLLM. 2**64 - 1 is the same number to gRPC."""
    for seed in (-1, -1, 2**64 - 1):
        await client.post("/v1/completions", json={"prompt": [5, 6, 7], "seed": seed})
    assert len({taken.sampling.seed for taken in nodes.prefills} - {2**64 - 1}) == 3


async def test_sampling_reaches_the_nodes(client, nodes):
    fields = {**SAMPLING, "stop_token_ids": [9]}
    await client.post("/v1/completions", json={"prompt": [5], "logit_bias": {"17": 3}, **fields})
    sampling = nodes.prefills[0].sampling
    assert {name: getattr(sampling, name) for name in fields} == {**fields, "stop_token_ids": {9}}
    assert sampling.logit_bias == {17: 3.0}


async def test_names_that_parameters_have_between_processes_are_no_fields(client, nodes):
    internal = {"num_logprobs": 3, "num_prompt_logprobs": 2, "beam_width": 2}
    await client.post("/v1/completions", json={"prompt": [5], **internal})
    sampling = nodes.prefills[0].sampling
    assert {name: getattr(sampling, name) for name in internal} == {
        "num_logprobs": -1,
        "num_prompt_logprobs": None,
        "beam_width": 0,
    }


async def test_tokens_whose_logprobs_are_wanted_reach_the_nodes(client, nodes):
    wanted = {"logprob_token_ids": [9, 7.0, 9], "max_tokens": 1}
    for path, body in (
        ("/v1/chat/completions", {**CHAT, "logprobs": True}),
        ("/v1/chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 5}),
        ("/v1/completions", {"prompt": [5], "logprobs": 0}),
    ):
        choice = (await client.post(path, json={**body, **wanted})).json()["choices"][0]
        sampling = nodes.prefills[-1].sampling
        assert (sampling.logprob_token_ids, sampling.num_logprobs) == ((9, 7), 2)
        entry = choice["logprobs"].get("content", [choice["logprobs"]])[0]
        assert len(entry["top_logprobs"]) == (2 if "chat" in path else 1)


async def test_allowed_tokens_and_bad_words_reach_the_nodes_as_ids(client, nodes):
    body = {"prompt": [5], "allowed_token_ids": [7, 9.0, 7], "bad_words": ["hello", " world", "hello"]}
    assert (await client.post("/v1/completions", json=body)).status_code == 200
    sampling, tokenizer = nodes.prefills[0].sampling, tiny_tokenizer()
    assert sampling.allowed_token_ids == {7, 9}
    ids = {text: tokenizer.encode(text, False) for text in ("hello", " hello", "world", " world")}
    expected = [ids[text] for text in ("hello", "world")]
    expected += [ids[" " + word] for word in ("hello", "world") if len(ids[" " + word]) == len(ids[word])]
    assert sorted(sampling.bad_words_token_ids) == sorted(expected)


@pytest.mark.parametrize(("kept", "max_tokens", "length"), [(5, 8, 5), (-1, 100, 28), (-1, None, 127), (100, 8, 100)])
async def test_long_prompts_are_truncated_from_the_left(client, nodes, kept, max_tokens, length):
    """Special tokens around a text stay, as in vLLM."""
    whole = tiny_tokenizer().encode("abcdefghi " * 40, True)
    limits = {"truncate_prompt_tokens": kept, "max_tokens": max_tokens}
    for prompt in ("abcdefghi " * 40, list(whole)):
        body = (await client.post("/v1/completions", json={"prompt": prompt, **limits})).json()
        assert body["usage"]["prompt_tokens"] == length
    from_text, from_ids = (prefill.prompt_tokens for prefill in nodes.prefills)
    assert from_text == whole[:1] + whole[1 - length :]
    assert from_ids == whole[-length:]
    await client.post("/v1/completions", json={"prompt": "hi", **limits, "max_tokens": 1})
    assert nodes.prefills[2].prompt_tokens == tiny_tokenizer().encode("hi", True)


async def test_long_prompts_are_truncated_from_the_right_on_request(client, nodes):
    whole = tiny_tokenizer().encode("abcdefghi " * 40, True)
    limits = {"truncate_prompt_tokens": 5, "truncation_side": "right", "max_tokens": 8}
    for prompt in ("abcdefghi " * 40, list(whole)):
        await client.post("/v1/completions", json={"prompt": prompt, **limits})
        assert nodes.prefills[-1].prompt_tokens == whole[:5]
    for path, body in (("/v1/chat/completions", CHAT), ("/v1/responses", {"input": "hi"})):
        for more in ({}, {"truncate_prompt_tokens": 5, "truncation_side": "right"}):
            await client.post(path, json={**body, **more})
        assert nodes.prefills[-1].prompt_tokens == nodes.prefills[-2].prompt_tokens[:5]


async def test_logits_processors_go_to_the_nodes_by_name(client, nodes):
    wanted = ["plain", {"qualname": "vllm", "args": [1]}, {"name": "both", "args": [], "kwargs": {"a": {"b": 2}}}]
    for path, body in (("chat/completions", CHAT), ("completions", {"prompt": "x"})):
        assert (await client.post(f"/v1/{path}", json={**body, "logits_processors": wanted})).is_success
    expected = [("plain", ""), ("vllm", '{"args":[1]}'), ("both", '{"kwargs":{"a":{"b":2}}}')]
    for prefill in nodes.prefills:
        assert [(one.name, one.arguments) for one in prefill.sampling.logits_processors] == expected


async def test_beam_search_takes_its_width_from_n_or_best_of(client, nodes):
    asked = {"use_beam_search": True, "length_penalty": 0.5, "max_tokens": 4}
    for path, body in (("chat/completions", CHAT), ("completions", {"prompt": "x"})):
        for given in ({"n": 2}, {"n": 2, "best_of": 3}, {}):
            response = await client.post(f"/v1/{path}", json={**body, "temperature": 0, **asked, **given})
            assert len(response.json()["choices"]) == given.get("n", 1)
    sampling = [prefill.sampling for prefill in nodes.prefills]
    assert [one.beam_width for one in sampling] == [2, 3, 1] * 2
    assert {(one.length_penalty, one.temperature) for one in sampling} == {(0.5, 0.0)}


async def test_beam_search_leaves_out_the_models_defaults_and_sends_single_tokens_to_the_decode_node(client, nodes):
    asked = {"use_beam_search": True, "max_tokens": 4}
    for prompt in ([5], [5, 6]):
        assert (await client.post("/v1/completions", json={"prompt": prompt, **asked})).is_success
    alone, handed = nodes.prefills
    assert (alone.decode is None, handed.decode is None) == (True, False)
    assert alone.sampling.temperature == 0.0


async def test_a_priority_goes_to_the_nodes(client, nodes):
    for path, body in (("chat/completions", CHAT), ("completions", {"prompt": "x"})):
        for priority in ({"priority": -(2**31)}, {"priority": 5}, {"priority": None}, {}):
            assert (await client.post(f"/v1/{path}", json={**body, **priority})).is_success
    assert [prefill.priority for prefill in nodes.prefills] == [-(2**31), 5, 0, 0] * 2


async def test_prompts_in_every_form(client, nodes):
    text = (await client.post("/v1/completions", json={"prompt": "hello"})).json()
    assert nodes.prefills[0].prompt_tokens == tiny_tokenizer().encode("hello", True)
    assert text["choices"][0]["text"] == "hello world"
    body = (await client.post("/v1/completions", json={"prompt": ["a", "b"], "n": 2})).json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    assert body["usage"]["prompt_tokens"] == 4
    await client.post("/v1/completions", json={"prompt": [[5, 6], [7]]})
    assert {p.prompt_tokens for p in nodes.prefills[3:]} == {(5, 6), (7,)}


async def test_answers_to_several_prompts_keep_their_places(client, nodes):
    def by_prompt(prefill):
        word = "fox" if prefill.prompt_tokens == (5,) else "dog"
        return Answer(tokens=[(*tiny_tokenizer().encode(f"{word}{i}", False), IM_END) for i in range(2)])

    nodes.script = by_prompt
    body = (await client.post("/v1/completions", json={"prompt": [[5], [6]], "n": 2})).json()
    assert [c["text"] for c in body["choices"]] == ["fox0", "fox1", "dog0", "dog1"]
    response = await client.post("/v1/completions", json={"prompt": [[5], [6]], "n": 2, "stream": True})
    texts = dict.fromkeys(range(4), "")
    for chunk in events(response.text):
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert list(texts.values()) == ["fox0", "fox1", "dog0", "dog1"]


async def test_echo(client, nodes):
    body = (await client.post("/v1/completions", json={"prompt": "the fox: ", "echo": True})).json()
    assert body["choices"][0]["text"] == "the fox: hello world"
    response = await client.post("/v1/completions", json={"prompt": "the fox: ", "echo": True, "stream": True})
    assert "".join(c["choices"][0]["text"] for c in events(response.text)) == "the fox: hello world"


@pytest.mark.parametrize("side", ["left", "right"])
async def test_what_is_echoed_of_a_truncated_prompt_is_what_is_kept(client, side):
    text = "the quick brown fox"
    ids = tiny_tokenizer().encode(text, False)
    asked = {"echo": True, "logprobs": 0, "max_tokens": 0, "truncation_side": side}
    for kept in (3, len(ids) + 1, len(ids) + 2):
        for prompt, num_special in ((text, 1), (list(ids), 0)):
            wanted = {"prompt": prompt, "truncate_prompt_tokens": kept, **asked}
            choice = (await client.post("/v1/completions", json=wanted)).json()["choices"][0]
            assert choice["text"] == "".join(choice["logprobs"]["tokens"][num_special:])
            assert choice["text"].endswith("fox") if side == "left" else choice["text"].startswith("th")
            assert (choice["text"] == text) == (kept > len(ids))


async def test_an_unknown_field_is_told_of_once(client, caplog):
    for _ in range(3):
        assert (await client.post("/v1/chat/completions", json={**CHAT, "never_heard_of": 1})).status_code == 200
    told = [record for record in caplog.records if "never_heard_of" in record.getMessage()]
    assert [record.levelname for record in told] == ["WARNING"]


async def test_harmless_fields_are_taken(client):
    harmless = {
        "user": "u",
        "metadata": {"a": "b"},
        "store": False,
        "service_tier": "auto",
        "tools": [],
        "tool_choice": "none",
        "response_format": {"type": "text"},
        "parallel_tool_calls": True,
        "best_of": 1,
        "stop": None,
        "temperature": None,
        "logit_bias": None,
        "brand_new_field": 1,
    }
    assert (await client.post("/v1/chat/completions", json={**CHAT, **harmless})).status_code == 200


async def test_content_in_parts_and_any_content_type(client, nodes):
    parts = [{"type": "text", "text": "a"}, {"type": "refusal", "refusal": "b"}]
    body = json.dumps({"messages": [{"role": "user", "content": parts}]})
    headers = {"content-type": "application/x-www-form-urlencoded"}
    response = await client.post("/v1/chat/completions", content=body, headers=headers)
    assert response.status_code == 200
    assert "user\na\nb<|im_end|>" in tiny_tokenizer().decode(nodes.prefills[0].prompt_tokens, False)
