"""Tools in chats over HTTP: what reaches the template, and what answers look like, whole and streamed."""

import json
from typing import Any

import httpx
import openai
import pytest

from router.server import RouterServer
from router.settings import RouterSettings
from router.startup import StartError
from tests.router.conftest import ANY_PORT, on_shared_loop, running_router, says, shared_fixtures
from tests.router.fake_node import Answer
from tests.router.http.tool_chats import (
    ANSWER,
    ARGUMENTS,
    CALL,
    CHATS,
    PARSERS,
    TOOLS,
    WEATHER,
    choice_of,
    chunks_of,
    official_client,
    prompt_of,
    shared_with_tools,
)
from tests.router.http_shapes import CHAT, allowed
from tests.router.matching import matches
from tests.router.tiny_tokenizer import IM_END, tiny_tokenizer

pytestmark = on_shared_loop
shared = shared_with_tools(ANSWER)
nodes, router, client = shared_fixtures()
official = official_client()


# ---- answers ----


async def test_a_whole_answer_has_reasoning_content_and_calls(client):
    choice = await choice_of(client)
    message = choice["message"]
    ids = [call.pop("id") for call in message["tool_calls"]]
    call = {"type": "function", "function": {"name": "get_weather", "arguments": ARGUMENTS}}
    assert message == {
        "role": "assistant",
        "content": "\n\nI will look.\n",
        "refusal": None,
        "reasoning": "\nThe weather.\n",
        "reasoning_content": "\nThe weather.\n",
        "tool_calls": [call, call],
    }
    assert len(set(ids)) == 2
    assert all(call_id.startswith("chatcmpl-tool-") for call_id in ids)
    assert choice["finish_reason"] == "tool_calls"


async def test_content_is_null_where_there_is_none(client, nodes):
    nodes.script = says(CALL)
    assert (await choice_of(client))["message"]["content"] is None
    nodes.script = says("<think>Only this")
    choice = await choice_of(client)
    assert (choice["message"]["content"], choice["message"]["reasoning"]) == (None, "Only this")
    assert choice["finish_reason"] == "stop"
    nodes.script = says("")
    assert (await choice_of(client))["message"] == {"role": "assistant", "content": "", "refusal": None}


async def test_the_streamed_answer_is_the_whole_one(client):
    whole = (await choice_of(client, n=2))["message"]
    response = await client.post("/v1/chat/completions", json={**TOOLS, "stream": True, "n": 2})
    chunks = chunks_of(response.text)
    for index in range(2):
        choices = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        deltas = [choice["delta"] for choice in choices]
        assert deltas[0]["role"] == "assistant"
        assert all(deltas[1:-1])  # a chunk without news is not sent
        assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["tool_calls"]
        assert "".join(delta.get("content") or "" for delta in deltas) == whole["content"]
        for name in ("reasoning", "reasoning_content"):
            assert "".join(delta.get(name, "") for delta in deltas) == whole[name]
        parts = [part for delta in deltas for part in delta.get("tool_calls", ())]
        for call in range(2):
            own = [part for part in parts if part["index"] == call]
            assert [part["function"].get("name") for part in own] == ["get_weather", *[None] * (len(own) - 1)]
            assert "".join(part["function"]["arguments"] for part in own) == ARGUMENTS
            assert len(own) > 2


async def test_openais_client_reads_it_whole_and_streamed(official):
    whole = await official.chat.completions.create(**TOOLS)
    calls = whole.choices[0].message.tool_calls
    assert [(call.function.name, call.function.arguments) for call in calls] == [("get_weather", ARGUMENTS)] * 2
    async with official.chat.completions.stream(**TOOLS) as stream:
        events = [event async for event in stream]
        final = await stream.get_final_completion()
    choice = final.choices[0]
    assert [call.function.parsed_arguments for call in choice.message.tool_calls] == [{"city": "Köln 🙂"}] * 2
    assert (choice.message.content, choice.finish_reason) == (whole.choices[0].message.content, "tool_calls")
    kinds = {event.type for event in events}
    assert {"tool_calls.function.arguments.delta", "tool_calls.function.arguments.done", "content.delta"} <= kinds


async def test_the_model_may_be_held_to_one_call(client):
    response = await client.post("/v1/chat/completions", json={**TOOLS, "stream": True, "parallel_tool_calls": False})
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks_of(response.text)]
    assert {part["index"] for delta in deltas for part in delta.get("tool_calls", ())} == {0}
    assert len((await choice_of(client, parallel_tool_calls=False))["message"]["tool_calls"]) == 1


async def test_calls_that_are_cut_off_keep_their_reason(client, nodes):
    nodes.script = says(CALL)
    num_tokens = len(tiny_tokenizer().encode('<tool_call>\n{"name": "get_weather", "arguments": {"city": "K', False))
    choice = await choice_of(client, max_tokens=num_tokens)
    assert choice["finish_reason"] == "length"
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"city": "K'


async def test_every_sample_has_its_own_parsers(client, nodes):
    texts = [CALL, "Just text <tool_", "<think>a</think>b"]
    tokens = [(*tiny_tokenizer().encode(text, False), IM_END) for text in texts]
    nodes.script = lambda _: Answer(tokens=tokens)
    response = await client.post("/v1/chat/completions", json={**TOOLS, "n": 3})
    first, second, third = response.json()["choices"]
    assert [first["finish_reason"], second["finish_reason"]] == ["tool_calls", "stop"]
    assert second["message"] == {"role": "assistant", "content": "Just text <tool_", "refusal": None}
    assert (third["message"]["reasoning"], third["message"]["content"]) == ("a", "b")


async def test_logprobs_come_for_tokens_that_show_nothing_yet(client, nodes):
    nodes.script = says(CALL)
    response = await client.post("/v1/chat/completions", json={**TOOLS, "stream": True, "logprobs": True})
    entries = [chunk["choices"][0]["logprobs"]["content"] for chunk in chunks_of(response.text)]
    assert sum(map(len, entries)) == len(tiny_tokenizer().encode(CALL, False)) + 1


async def test_text_is_content_without_tools_or_with_a_choice_of_none(client, nodes):
    nodes.script = says(CALL + "<|im_start|>")
    for fields in ({"tools": []}, {"tools": None}, {"tool_choice": "none"}):
        choice = await choice_of(client, **fields)
        assert choice["message"] == {"role": "assistant", "content": CALL, "refusal": None}
        assert choice["finish_reason"] == "stop"
        assert ("get_weather" in prompt_of(nodes)) is ("tool_choice" in fields)


async def test_special_tokens_are_kept_for_parsers_that_look_for_them(client, nodes):
    nodes.script = says("a<|im_start|>b")
    assert (await choice_of(client))["message"]["content"] == "a<|im_start|>b"
    assert (await choice_of(client, tools=None))["message"]["content"] == "ab"


# ---- calls that are required ----

LIST = '[{"name": "get_weather", "parameters": {"city": "Köln"}}, {"name": "get_weather", "parameters": {}}]'
NAMED: dict[str, Any] = {"type": "function", "function": {"name": "get_weather"}}


async def test_a_required_call_is_enforced_and_read(client, nodes):
    nodes.script = says(f"<think>\nHm.</think>\n{CALL}\n{CALL}")
    choice = await choice_of(client, tool_choice="required")
    structured = nodes.prefills[-1].sampling.structured_outputs
    assert matches(structured, f"<think>\nHm.</think>\n{CALL}\n{CALL}")
    assert not matches(structured, "I will look.")
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    assert choice["message"]["reasoning"] == "\nHm."
    assert [call["function"]["arguments"] for call in choice["message"]["tool_calls"]] == [ARGUMENTS] * 2


@pytest.mark.parametrize("parameters", [None, {}])
async def test_a_function_without_parameters_is_called_with_none(client, nodes, parameters):
    await choice_of(
        client,
        tools=[{"type": "function", "function": {"name": "f", "parameters": parameters}}],
        tool_choice="required",
    )
    structured = nodes.prefills[-1].sampling.structured_outputs
    call = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    assert matches(structured, call)
    assert not matches(structured, call.replace("{}", '{"city": "Oslo"}'))


@pytest.mark.parametrize("mode", ["auto", "required"])
async def test_of_the_tools_only_those_that_are_allowed_may_be_called(client, nodes, mode):
    other = {"type": "function", "function": {"name": "other"}}
    nodes.script = says(CALL)
    choice = await choice_of(client, tools=[other, WEATHER], tool_choice=allowed(mode, NAMED))
    assert choice["finish_reason"] == "tool_calls"
    structured = nodes.prefills[-1].sampling.structured_outputs
    assert matches(structured, CALL)
    assert matches(structured, "I will look.") is (mode == "auto")
    assert not matches(structured, CALL.replace("get_weather", "other"))
    assert '"other"' not in prompt_of(nodes)


async def test_the_format_of_content_does_not_matter_to_calls_that_are_required(client, nodes):
    nodes.script = says(CALL)
    as_json = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object", "properties": {}}}}
    for choice in ("required", NAMED):
        chat = {"tool_choice": choice, "response_format": as_json}
        assert (await choice_of(client, **chat))["message"]["tool_calls"][0]["function"]["arguments"] == ARGUMENTS
        structured = nodes.prefills[-1].sampling.structured_outputs
        assert matches(structured, CALL)
        assert not matches(structured, "{}")
    tool = {"type": "function", **WEATHER["function"]}
    flat = {"input": "hi", "tools": [tool], "tool_choice": "required", "text": {"format": {"type": "json_object"}}}
    response = await client.post("/v1/responses", json=flat)
    assert [item["type"] for item in response.json()["output"]] == ["function_call"]
    for fields, param in (
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"structured_outputs": {"json_object": True}}, "tool_choice"),
    ):
        refusal = await client.post(CHATS, json={**TOOLS, "tool_choice": "required", **fields})
        assert (refusal.status_code, refusal.json()["error"]["param"]) == (400, param)


async def test_a_constraint_that_cannot_be_compiled_is_named_after_its_field(client):
    bad, forms = {"type": "frob"}, {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "frob"}}}
    for path, fields, param in (
        (CHATS, {**TOOLS, "response_format": forms}, "response_format"),
        (CHATS, {**CHAT, "guided_json": bad}, "guided_json"),
        (CHATS, {**CHAT, "structured_outputs": {"json": bad}}, "structured_outputs"),
        ("/v1/completions", {"prompt": "x", "response_format": forms}, "response_format"),
        ("/v1/responses", {"input": "x", "text": {"format": {"type": "json_schema", "schema": bad}}}, "text"),
    ):
        response = await client.post(path, json=fields)
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, param)
        assert "frob" in error["message"]
        assert error["message"].startswith(f"{param}: ")


async def test_a_named_call_stops_as_openai_says(client, nodes):
    other = {"type": "function", "function": {"name": "other"}}
    nodes.script = says(CALL)
    choice = await choice_of(client, tools=[other, WEATHER], tool_choice=NAMED)
    assert (choice["finish_reason"], len(choice["message"]["tool_calls"])) == ("stop", 1)
    structured = nodes.prefills[-1].sampling.structured_outputs
    assert matches(structured, CALL)
    assert not matches(structured, CALL.replace("get_weather", "other"))
    assert not matches(structured, f"{CALL}\n{CALL}")
    assert '"other"' in prompt_of(nodes)  # the template sees all tools


async def test_required_calls_need_no_flags(nodes):
    nodes.script = says(LIST)
    async with (
        running_router(nodes) as router,
        openai.AsyncOpenAI(base_url=f"{router.http}/v1", api_key="none", max_retries=0) as official,
    ):
        whole = await official.chat.completions.create(**TOOLS, tool_choice="required")
        async with official.chat.completions.stream(**TOOLS, tool_choice="required") as stream:
            streamed = await stream.get_final_completion()
        with pytest.raises(openai.BadRequestError, match="--enable-auto-tool-choice"):
            await official.chat.completions.create(**TOOLS)
    for choice in (whole.choices[0], streamed.choices[0]):
        calls = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls]
        assert calls == [("get_weather", '{"city": "Köln"}'), ("get_weather", "{}")]
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)


async def test_schemas_that_cannot_constrain_are_named(client, nodes):
    function = {"name": "f", "parameters": {"properties": {"a": {"type": "frob"}}}}
    bad = {"type": "function", "function": function}
    strict = [{**bad, "function": {**function, "strict": True}}]
    for fields in ({"tool_choice": "required"}, {"tools": strict}):
        response = await client.post("/v1/chat/completions", json={**CHAT, "tools": [bad], **fields})
        assert response.status_code == 400, response.text
        error = response.json()["error"]
        assert error["param"] == "tools"
        assert error["message"].startswith("The schemas of `tools` cannot constrain calls: ")
        assert "frob" in error["message"]
    assert not nodes.prefills


# ---- prompts ----


async def test_the_template_gets_tools_calls_and_results(client, nodes):
    call = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Köln"}'}}
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "Hm."},
        {"role": "tool", "tool_call_id": "c1", "name": "get_weather", "content": [{"type": "text", "text": "Rain"}]},
    ]
    await choice_of(client, messages=messages)
    tools, *rendered = prompt_of(nodes).split("|{")
    assert json.loads(tools) == [
        {"type": "function", "function": {k: v for k, v in WEATHER["function"].items() if k != "strict"}}
    ]
    assert [json.loads("{" + message) for message in rendered] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{**call, "function": {"name": "get_weather", "arguments": {"city": "Köln"}}}],
            "reasoning": "Hm.",
            "reasoning_content": "Hm.",
        },
        {"role": "tool", "content": "Rain", "name": "get_weather", "tool_call_id": "c1"},
    ]


async def test_arguments_may_be_empty_or_an_object(client, nodes):
    calls = [{"function": {"name": "f", "arguments": given}} for given in (None, "", {"a": 1})]
    await choice_of(client, messages=[{"role": "assistant", "tool_calls": calls}])
    message = json.loads(prompt_of(nodes).split("|", 1)[1])
    assert [call["function"]["arguments"] for call in message["tool_calls"]] == [{}, {}, {"a": 1}]


async def test_tokenize_counts_the_tools(client, nodes):
    body = (await client.post("/tokenize", json={**TOOLS, "add_special_tokens": False})).json()
    await choice_of(client)
    assert tuple(body["tokens"]) == nodes.prefills[-1].prompt_tokens


# ---- flags ----


@pytest.mark.parametrize("hides", [True, False])
async def test_tools_that_must_not_be_called_may_be_hidden(nodes, hides):
    forbidden = {**TOOLS, "tool_choice": "none"}
    tools = [{"name": "f", "input_schema": {"type": "object"}}]
    message = {"messages": CHAT["messages"], "tools": tools, "tool_choice": {"type": "none"}}
    responses = {"input": "hi", "tools": [{"type": "function", **WEATHER["function"]}], "tool_choice": "none"}
    async with (
        running_router(nodes, **PARSERS, exclude_tools_when_tool_choice_none=hides) as router,
        httpx.AsyncClient(base_url=router.http, timeout=20) as client,
    ):
        for path, body, count in (
            (CHATS, forbidden, None),
            ("/v1/messages", {**message, "max_tokens": 9}, "/v1/messages/count_tokens"),
            ("/v1/responses", responses, "/v1/responses/input_tokens"),
        ):
            assert (await client.post(path, json=body)).status_code == 200
            assert prompt_of(nodes).startswith("no tools") is hides, path
            if count is not None:
                counted = (await client.post(count, json=body)).json()["input_tokens"]
                assert counted == len(nodes.prefills[-1].prompt_tokens)
        assert (await client.post(CHATS, json=TOOLS)).status_code == 200
        assert not prompt_of(nodes).startswith("no tools")


async def test_parsers_that_are_not_there_are_named():
    for flag in ("tool_call_parser", "reasoning_parser"):
        fields: dict[str, Any] = {"decode": (ANY_PORT,), "http": ANY_PORT, "grpc": ANY_PORT, flag: "nonesuch"}
        settings = RouterSettings(**fields)
        with pytest.raises(StartError, match=f"--{flag.replace('_', '-')}: there is none called 'nonesuch'"):
            RouterServer(settings)
