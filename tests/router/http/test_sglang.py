"""SGLang's own API: texts or token ids are continued, whole and as events that have all up to then."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from baton.errors import InvalidRequest
from baton.messages import TokenLogprobs
from baton.sampling import FinishReason
from router.generation import Generation
from router.http.body import validate_fields
from router.http.sglang.events import SglangEvents
from router.http.sglang.schemas import SglangRequest
from router.http.sglang.shape import SglangShape
from router.requests.request_state import RequestTimings
from router.text.answer import Delta
from router.text.models import ServedModel
from tests.router.conftest import on_shared_loop, shared_fixtures
from tests.router.fake_node import Answer
from tests.router.http_shapes import SAMPLING, error_of, events
from tests.router.tiny_tokenizer import IM_END, tiny_tokenizer

PATH = "/generate"
HELLO, WORLD = tiny_tokenizer().encode("hello world", False)
IDS = [HELLO, WORLD, IM_END]
NO_MODEL = cast(ServedModel, SimpleNamespace(version=None, max_logprobs=0))
NAMES = {"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens", "seed": "sampling_seed"}

pytestmark = on_shared_loop
nodes, router, client = shared_fixtures()


async def asked(client: Any, **body: Any) -> Any:
    response = await client.post(PATH, json=body)
    assert response.status_code == 200, response.text
    return response.json()


async def test_a_text_is_continued(client, nodes):
    fields = {"rid": "mine", "priority": 3, "extra_key": "s", "return_prompt_token_ids": True}
    response = await client.post(PATH, json={"text": "hi", "model": "tiny", **fields})
    body = response.json()
    (prefill,) = nodes.prefills
    assert (prefill.prompt_tokens, prefill.cache_salt, prefill.priority) == (
        tiny_tokenizer().encode("hi", True),
        "s",
        -3,
    )
    assert (body["text"], body["output_ids"]) == ("hello world", IDS)
    assert body["prompt_token_ids"] == list(prefill.prompt_tokens)
    meta = body["meta_info"]
    assert meta.pop("e2e_latency") > 0
    assert meta.pop("weight_version").startswith("tiny@")
    assert meta == {
        "id": "mine",
        "finish_reason": {"type": "stop", "matched": IM_END},
        "prompt_tokens": 3,
        "completion_tokens": 3,
        "cached_tokens": 0,
    }
    assert response.headers["x-request-id"] == "mine"


async def test_it_is_a_completion_in_another_form(client, nodes):
    said = {**SAMPLING, "n": 2, "stop": ["zebra"], "stop_token_ids": [9], "logit_bias": {"17": 3}}
    constraint = {"structured_outputs": {"regex": "h.*"}, "include_stop_str_in_output": True}
    body = {"prompt": [[5, 6], [7]], **said, **constraint, "logprobs": 2, "prompt_logprobs": 2}
    choices = (await client.post("/v1/completions", json=body | {"return_token_ids": True})).json()["choices"]
    params = {NAMES.get(name, name): value for name, value in said.items()}
    params |= {"regex": "h.*", "no_stop_trim": True, "skip_special_tokens": None}
    scores = {"return_logprob": True, "top_logprobs_num": 2, "logprob_start_len": 0}
    answers = await asked(client, input_ids=[[5, 6], [7]], sampling_params=[params, params], **scores)
    for choice, answer in zip(choices, answers, strict=True):
        assert (answer["text"], answer["output_ids"]) == (choice["text"], choice["token_ids"])
    first, second, *same = nodes.prefills
    assert [(again.prompt_tokens, again.sampling) for again in same] == [
        (prefill.prompt_tokens, prefill.sampling) for prefill in (first, second)
    ]


TAG = {"type": "structural_tag", "format": {"type": "const_string", "value": "a"}}


async def test_each_way_to_say_what_an_answer_must_match(client, nodes):
    ways = {"json_schema": {"type": "object"}, "regex": "a+", "ebnf": 'start: "a"', "structural_tag": json.dumps(TAG)}
    kinds = []
    for name, value in ways.items():
        await asked(client, text="hi", sampling_params={name: value})
        kinds.append(nodes.prefills[-1].sampling.structured_outputs.kind.value)
    assert kinds == ["json", "regex", "grammar", "structural_tag"]


@pytest.mark.parametrize(
    ("params", "max_tokens"), [(None, 125), ({"max_new_tokens": None}, 125), ({"max_new_tokens": 7}, 7)]
)
async def test_how_long_an_answer_may_be(client, nodes, params, max_tokens):
    await asked(client, input_ids=[5, 6, 7], sampling_params=params)
    assert nodes.prefills[-1].sampling.max_tokens == max_tokens
    assert nodes.prefills[-1].sampling.temperature == 0.7, "the model's"
    (wanted,) = validate_fields({"text": "x", "sampling_params": params}, SglangRequest).wanted("r", NO_MODEL)
    assert wanted.default_max_tokens == (None if params else 128)


@pytest.mark.parametrize(
    ("fields", "ids"),
    [
        ({"text": ["hi"]}, ["r_0"]),
        ({"text": ["hi", "the"], "rid": ["a", "b"]}, ["a", "b"]),
        ({"input_ids": [[5], [6]], "sampling_params": {"n": 2}, "rid": ["a", "b"]}, ["r_0", "r_1", "r_2", "r_3"]),
        ({"text": "hi", "sampling_params": {"n": 2}}, ["r_0", "r_1"]),
    ],
)
async def test_several_answers_are_a_list(client, fields, ids):
    for stream in (False, True):
        response = await client.post(PATH, json={**fields, "stream": stream}, headers={"x-request-id": "r"})
        said = events(response.text) if stream else response.json()
        last = {one["index"]: one for one in said} if stream else dict(enumerate(said))
        assert [last[index]["meta_info"]["id"] for index in range(len(ids))] == ids
        assert {one["text"] for one in last.values()} == {"hello world"}


async def test_each_event_has_all_up_to_then(client, nodes):
    hold = asyncio.Event()
    nodes.script = lambda prefill: Answer((tuple(IDS),), hold=hold, hold_at=1, num_cached_tokens=2)
    fields = {"return_logprob": True, "token_ids_logprob": [7], "rid": ["mine"], "stream_options": {}}
    body = {"input_ids": [5, 6, 7], "stream": True, **fields}
    async with client.stream("POST", PATH, json=body) as response:
        lines = response.aiter_lines()
        first = json.loads((await anext(lines)).removeprefix("data: "))
        hold.set()
        *more, done = [line async for line in lines if line]
    last = json.loads(more[-1].removeprefix("data: "))
    assert done == "data: [DONE]"
    assert (first["text"], first["output_ids"], first["meta_info"]["finish_reason"]) == ("hello", [HELLO], None)
    assert (last["text"], last["output_ids"]) == ("hello world", IDS)
    assert [said["meta_info"]["completion_tokens"] for said in (first, last)] == [1, 3]
    assert [said["meta_info"]["cached_tokens"] for said in (first, last)] == [None, 2]
    assert first["meta_info"]["output_token_ids_logprobs"] == last["meta_info"]["output_token_ids_logprobs"][:1]
    assert last["meta_info"]["output_token_logprobs"] == [[-0.5, token, None] for token in IDS]
    assert (last["meta_info"]["id"], last["meta_info"]["input_token_logprobs"]) == ("mine", [])
    assert "index" not in last


async def test_logprobs(client):
    fields = {"return_logprob": True, "top_logprobs_num": 1, "logprob_start_len": [0, 1, -1]}
    body = {"input_ids": [[5, 6, 7]] * 3, **fields, "return_text_in_logprobs": True}
    text = {token: tiny_tokenizer().decode([token], False) for token in (5, 6, 7, *IDS)}
    expected: list[list[Any]] = [[None, 5, text[5]], [-1.0, 6, text[6]], [-2.0, 7, text[7]]]
    for start, answer in zip((0, 1, 3), await asked(client, **body), strict=True):
        meta = answer["meta_info"]
        assert (
            meta["input_token_logprobs"]
            == [[None, *entry[1:]] for entry in expected[start:][:1]] + (expected[start + 1 :])
        )
        assert meta["input_top_logprobs"] == [None, *[[[-0.25, 7, text[7]]]] * 2][: 3 - start]
        assert meta["output_token_logprobs"] == [[-0.5, token, text[token]] for token in IDS]
        assert meta["output_top_logprobs"] == [[[-0.5, token, text[token]]] for token in IDS]
    assert "output_token_logprobs" not in (await asked(client, text="hi", top_logprobs_num=1))["meta_info"]


async def test_the_prompt_alone_is_scored(client):
    scores = {"return_logprob": True, "logprob_start_len": 1}
    answer = await asked(client, input_ids=[5, 6, 7], sampling_params={"max_new_tokens": 0}, **scores)
    assert (answer["text"], answer["output_ids"], answer["meta_info"]["completion_tokens"]) == ("", [], 0)
    assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 0}
    assert answer["meta_info"]["input_token_logprobs"] == [[None, 6, None], [-2.0, 7, None]]


@pytest.mark.parametrize(
    ("params", "text", "reason"),
    [
        ({"max_new_tokens": 1}, "hello", {"type": "length", "length": 1}),
        ({"stop": "wor"}, "hello ", {"type": "stop", "matched": "wor"}),
        ({"stop": ["wor"], "no_stop_trim": True}, "hello wor", {"type": "stop", "matched": "wor"}),
        ({"skip_special_tokens": False}, "hello world", {"type": "stop", "matched": IM_END}),
    ],
)
async def test_why_it_ended(client, params, text, reason):
    answer = await asked(client, text="hi", sampling_params=params)
    assert (answer["text"], answer["meta_info"]["finish_reason"]) == (text, reason)


async def test_a_token_that_ended_it_is_told(client, nodes):
    nodes.script = lambda prefill: Answer(((HELLO, WORLD),), stop_token_id=WORLD)
    answer = await asked(client, text="hi", sampling_params={"stop_token_ids": [WORLD]})
    assert (answer["text"], answer["meta_info"]["finish_reason"]) == ("hello", {"type": "stop", "matched": WORLD})


async def test_a_client_that_leaves_frees_the_nodes(client, nodes, router):
    nodes.script = lambda prefill: Answer((tuple(IDS),), hold=asyncio.Event(), hold_at=1)
    async with client.stream("POST", PATH, json={"text": "hi", "stream": True}) as response:
        assert "hello" in await anext(response.aiter_lines())
    await nodes.until(lambda: nodes.aborts)
    await router.idle()


OWN = {
    "input_ids": [[5, 6], [7]],
    "sampling_params": [
        {"temperature": 0.5, "regex": "h.*"},
        {"temperature": 0.25, "stop": "wor", "max_new_tokens": 9},
    ],
    "return_logprob": [True, False],
    "logprob_start_len": [0, -1],
    "top_logprobs_num": [1, 0],
    "extra_key": ["a", "b"],
}


async def test_each_prompt_may_have_parameters_of_its_own(client, nodes):
    first, second = await asked(client, **OWN, timeout=5)
    assert (first["text"], second["text"]) == ("hello world", "hello ")
    assert (len(first["meta_info"]["input_top_logprobs"]), len(first["meta_info"]["output_top_logprobs"])) == (2, 3)
    assert "output_token_logprobs" not in second["meta_info"]
    one, other = nodes.prefills
    assert [(prefill.prompt_tokens, prefill.cache_salt) for prefill in (one, other)] == [((5, 6), "a"), ((7,), "b")]
    assert [(sent.temperature, sent.num_logprobs, sent.max_tokens) for sent in (one.sampling, other.sampling)] == [
        (0.5, 1, 126),
        (0.25, -1, 9),
    ]
    assert (one.sampling.structured_outputs is None, other.sampling.structured_outputs is None) == (False, True)
    assert all(4 < prefill.deadline_s <= 5 for prefill in (one, other))


async def test_a_client_that_leaves_frees_all_of_them(client, nodes, router):
    nodes.script = lambda prefill: Answer((tuple(IDS),), hold=asyncio.Event(), hold_at=1)
    async with client.stream("POST", PATH, json={**OWN, "stream": True}) as response:
        lines = (line async for line in response.aiter_lines() if line)
        said = [json.loads((await anext(lines)).removeprefix("data: ")) for _ in range(2)]
        assert (router.server.admission.num_requests, router.server.admission.num_tokens) == (2, 3)
    assert {one["index"] for one in said} == {0, 1}
    attempts = {prefill.attempt_id for prefill in nodes.prefills}
    await nodes.until(lambda: attempts <= {abort.attempt_id for abort in nodes.aborts})
    assert len(attempts) == 2
    await router.idle()
    assert router.server.admission.num_requests == 0


async def test_if_one_fails_all_do(client, nodes, router):
    def script(prefill: Any) -> Answer:
        fails = prefill.prompt_tokens == (7,)
        return Answer(error=InvalidRequest("no")) if fails else Answer((tuple(IDS),), hold=asyncio.Event(), hold_at=1)

    nodes.script = script
    response = await client.post(PATH, json=OWN)
    assert (response.status_code, error_of(response)["message"]) == (400, "no")
    (held,) = [prefill.attempt_id for prefill in nodes.prefills if prefill.prompt_tokens == (5, 6)]
    await nodes.until(lambda: held in [abort.attempt_id for abort in nodes.aborts])
    await router.idle()


async def test_what_they_ask_for_counts_together(client):
    ids = [[5] * 100] * 2
    scores = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 20}
    body = {"input_ids": ids, "sampling_params": [{"n": 128}] * 2, "stream": True, **scores}
    response = await client.post(PATH, json=body)
    assert "not 537600" in error_of(response)["message"]


async def test_what_clients_ask_before(client):
    for path in ("/get_model_info", "/model_info"):
        info = (await client.get(path)).json()
        assert (info["model_path"], info["is_generation"]) == ("tiny", True)
        assert info["preferred_sampling_params"] == {"temperature": 0.7, "top_p": 0.9}
    for path in ("/get_server_info", "/server_info"):
        info = (await client.get(path)).json()
        assert (info["served_model_name"], info["context_length"], info["internal_states"]) == ("tiny", 128, [])
    assert (await client.get("/model_info?model=nope")).status_code == 404
    assert (await client.get("/health_generate")).json() == {"status": "ready"}


MISTAKES: list[tuple[dict[str, Any], str, str]] = [
    ({"text": None}, "text", "Either `text` or `input_ids`"),
    ({"input_ids": [5]}, "text", "Either `text` or `input_ids`"),
    ({"text": ["x", 3]}, "text", "list of strings"),
    ({"text": None, "input_ids": [[5], 3]}, "input_ids", "list of token ids"),
    ({"text": None, "input_ids": [5, 10_000]}, "input_ids", "out of vocabulary"),
    ({"text": None, "input_ids": []}, "input_ids", "list of token ids"),
    ({"rid": "a b"}, "rid", "must be a string"),
    ({"rid": ["a", "b"]}, "rid", "2 values for 1 prompts"),
    ({"text": ["x", "y"], "rid": ["a", "a"]}, "rid", "twice"),
    ({"text": ["x", "y"], "sampling_params": [{"n": 1}, {"n": 2}]}, "n", "the same for all prompts"),
    ({"text": ["x", "y"], "sampling_params": [{}] * 3}, "sampling_params", "3 values for 2 prompts"),
    ({"text": ["x", "y"], "sampling_params": []}, "sampling_params", "at least 1"),
    ({"text": ["x"] * 10_001, "sampling_params": [{}] * 10_001}, "sampling_params", "at most 10000"),
    ({"text": ["x", "y"], "token_ids_logprob": [[1], [2], [3]]}, "token_ids_logprob", "3 values for 2 prompts"),
    ({"logprob_start_len": [0, 0]}, "logprob_start_len", "2 values for 1 prompts"),
    ({"return_logprob": True, "token_ids_logprob": [5], "top_logprobs_num": 1}, "token_ids_logprob", "excludes"),
    ({"return_logprob": True, "token_ids_logprob": [5], "logprob_start_len": 0}, "token_ids_logprob", "excludes"),
    ({"return_logprob": True, "token_ids_logprob": [10_000]}, "token_ids_logprob", "out of vocabulary"),
    ({"cache_salt": "a", "extra_key": "b"}, "extra_key", "exclude each other"),
    ({"sampling_params": {"max_new_tokens": 5000}}, "max_new_tokens", "too large"),
    ({"sampling_params": {"max_new_tokens": 0, "min_new_tokens": 1}}, "min_new_tokens", "not 1"),
    ({"sampling_params": {"min_new_tokens": 129}}, "min_new_tokens", "not 129"),
    ({"sampling_params": {"max_new_tokens": -1}}, "max_new_tokens", "max_new_tokens must be 1 or more"),
    ({"sampling_params": {"regex": "a", "json_schema": "{}"}}, "json_schema", "exclude each other"),
    ({"sampling_params": {"regex": "("}}, "regex", "regex"),
    ({"text": ["x", "y"], "sampling_params": [{"ebnf": ""}, {"regex": "a"}]}, "sampling_params", "not empty"),
    ({"sampling_params": {"ebnf": ""}}, "ebnf", "not empty"),
    ({"sampling_params": {"max_tokens": 5}}, "max_tokens", "not supported"),
    ({"sampling_params": {"stop_regex": "a"}}, "stop_regex", "not supported"),
    ({"sampling_params": {"custom_params": {"a": 1}}}, "custom_params", "not supported"),
    ({"sampling_params": {"n": 500}}, "n", "not 500"),
    ({"max_new_tokens": 5}, "max_new_tokens", "not supported"),
    ({"temperature": 0}, "temperature", "not supported"),
    ({"return_hidden_states": True}, "return_hidden_states", "not supported"),
    ({"lora_path": "a"}, "lora_path", "not supported"),
    ({"inputs": "x"}, "inputs", "not supported"),
]


async def test_mistakes_are_named(client, nodes):
    for fields, param, text in MISTAKES:
        response = await client.post(PATH, json={"text": "x", **fields})
        assert response.status_code == 400, fields
        assert error_of(response)["param"] == param, response.text
        assert text in error_of(response)["message"]
    assert not nodes.prefills


# ---- events of long answers ----


def told(num_tokens: int, prompt: Sequence[int] = (5,), **fields: Any) -> tuple[list[bytes], SglangEvents, Any]:
    """What is sent of an answer of so many tokens, each of them a letter with a logprob."""
    part = SimpleNamespace(timings=None, request=SimpleNamespace(prompt_tokens=prompt))
    generation = cast(Generation, SimpleNamespace(parts=[part], tells_timings=True))
    body = validate_fields({"text": "x", "return_logprob": not fields, **fields}, SglangRequest)
    shape = SglangShape(NO_MODEL, body, ["r"])
    writer = SglangEvents(generation, shape)
    return [writer.delta(Delta(0, "a", (8,), (TokenLogprobs(-0.5, ()),))) for _ in range(num_tokens)], writer, part


async def test_events_of_a_long_answer_come_less_often() -> None:
    sent, writer, part = told(2000)
    assert all(sent[:400])
    assert len([event for event in sent if event]) < 1300
    assert writer.delta(Delta(0, "", finish_reason=FinishReason.LENGTH)) == b"", "its timings are to come"
    part.timings = RequestTimings()
    (last,) = events(writer.end().decode())
    assert (last["text"], len(last["output_ids"])) == ("a" * 2000, 2000)
    assert len(last["meta_info"]["output_token_logprobs"]) == 2000
    assert last["meta_info"]["finish_reason"] == {"type": "length", "length": 2000}
    assert writer.end() == b"data: [DONE]\n\n"


async def test_a_prompt_that_events_repeat_counts_as_well() -> None:
    sent, *_ = told(200, prompt=range(2000), return_prompt_token_ids=True)
    assert len([event for event in sent if event]) < 40
    assert len(sent[0]) > 2000


async def test_an_error_comes_after_all_that_has_come() -> None:
    sent, writer, _ = told(999)
    assert not sent[-1]
    last, error = events(writer.error({"error": {"message": "gone"}}).decode())
    assert (len(last["text"]), error["error"]["message"]) == (999, "gone")


async def test_signs_of_life_are_no_events_to_its_clients() -> None:
    assert not SglangEvents.keep_alive.strip()
