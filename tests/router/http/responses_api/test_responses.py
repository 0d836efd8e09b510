"""OpenAI's Responses API: requests become chats, and answers become output items, whole and streamed."""

import asyncio
import json

import pydantic
import pytest

from baton.errors import Overloaded
from router.http.body import validate
from router.http.responses_api.items import InputMessage
from router.http.responses_api.schemas import ResponsesRequest
from tests.router.conftest import on_shared_loop, says
from tests.router.fake_node import Answer
from tests.router.http.responses_api.shapes import (
    HI,
    LOGPROBS,
    PATH,
    TOOL,
    events_of,
    message,
    messages_of,
    output_of,
    post,
)
from tests.router.http.tool_chats import ANSWER, ARGUMENTS, CALL, WEATHER, prompt_of
from tests.router.http_shapes import error_of
from tests.router.matching import matches
from tests.router.tiny_tokenizer import tiny_tokenizer

pytestmark = on_shared_loop


# ---- answers ----


async def test_a_response(client, nodes):
    nodes.script = says("hello world", num_cached_tokens=16)
    sampling = {"temperature": 0.25, "top_p": 0.5, "top_k": 7, "seed": 11, "max_output_tokens": 50, "timeout": 9.0}
    body = await post(client, **sampling, metadata={"a": "b"}, user="u", instructions="Be brief.")
    assert body["id"].startswith("resp_")
    assert (body["object"], body["status"], body["model"], body["store"]) == ("response", "completed", "tiny", True)
    assert output_of(body) == [message("hello world")]
    assert (body["error"], body["incomplete_details"], body["previous_response_id"]) == (None, None, None)
    assert (body["temperature"], body["top_p"], body["max_output_tokens"]) == (0.25, 0.5, 50)
    assert (body["metadata"], body["user"], body["instructions"]) == ({"a": "b"}, "u", "Be brief.")
    assert (body["tools"], body["tool_choice"], body["parallel_tool_calls"]) == ([], "auto", True)
    assert body["text"] == {"format": {"type": "text"}}
    [prefill] = nodes.prefills
    num_output_tokens = len(tiny_tokenizer().encode("hello world", False)) + 1
    assert body["usage"] == {
        "input_tokens": len(prefill.prompt_tokens),
        "input_tokens_details": {"cached_tokens": 16, "cache_write_tokens": 0},
        "output_tokens": num_output_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": len(prefill.prompt_tokens) + num_output_tokens,
    }
    taken = prefill.sampling
    assert (taken.temperature, taken.top_p, taken.top_k, taken.seed, taken.max_tokens) == (0.25, 0.5, 7, 11, 50)
    assert messages_of(nodes) == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    defaults = await post(client)
    assert (defaults["temperature"], defaults["top_p"], defaults["max_output_tokens"]) == (0.7, 0.9, None)


async def test_reasoning_text_and_calls_are_items(client, nodes):
    nodes.script = says(ANSWER)
    body = await post(client, tools=[TOOL])
    call = {"type": "function_call", "status": "completed", "name": "get_weather", "arguments": ARGUMENTS}
    thought = [{"type": "reasoning_text", "text": "\nThe weather.\n"}]
    assert output_of(body) == [
        {"type": "reasoning", "status": "completed", "summary": [], "content": thought},
        message("\n\nI will look.\n"),
        call,
        call,
    ]
    assert body["tools"] == [TOOL]
    num_reasoning = body["usage"]["output_tokens_details"]["reasoning_tokens"]
    text = "<think>\nThe weather.\n"
    assert num_reasoning == len(tiny_tokenizer().encode(text, False))
    assert len(output_of(await post(client, tools=[TOOL], parallel_tool_calls=False))) == 3


async def test_functions_may_be_in_namespaces(official, client, nodes):
    other = {"type": "function", "name": "get_weather", "parameters": {"type": "object"}, "defer_loading": True}
    namespace = {"type": "namespace", "name": "mcp", "description": "Of a server.", "tools": [other]}
    nodes.script = says(CALL.replace("get_weather", "mcp__get_weather"))
    body = await post(client, tools=[TOOL, namespace])
    call = {"type": "function_call", "status": "completed", "name": "get_weather", "arguments": ARGUMENTS}
    assert output_of(body) == [{**call, "namespace": "mcp"}]
    prompt = tiny_tokenizer().decode(nodes.prefills[-1].prompt_tokens)
    assert [tool["function"]["name"] for tool in json.loads(prompt.partition("|")[0])] == [
        "get_weather",
        "mcp__get_weather",
    ]
    async with official.responses.stream(model="tiny", input="hi", tools=[TOOL, namespace]) as stream:
        names = [(event.item.name, event.item.namespace) async for event in stream if "item.done" in event.type]
    assert names == [("get_weather", "mcp")]
    nodes.script = says("Rain.")
    result = {"type": "function_call_output", "call_id": body["output"][0]["call_id"], "output": "Rain"}
    await post(client, input=[result], previous_response_id=body["id"], tools=[TOOL, namespace])
    _, assistant, tool = messages_of(nodes)
    assert (assistant["tool_calls"][0]["function"]["name"], tool["name"]) == ("mcp__get_weather",) * 2


async def test_tools_that_agents_list_beside_functions_are_not_shown_to_the_model(client, nodes):
    """As Codex does with every request."""
    hosted = [{"type": "web_search"}, {"type": "image_generation"}, {"type": "tool_search", "execution": "client"}]
    namespace = {"type": "namespace", "name": "n", "tools": [hosted[0], {**TOOL, "name": "f"}]}
    body = await post(client, tools=[*hosted, TOOL, namespace])
    assert [tool["name"] for tool in body["tools"]] == ["get_weather", "f"]
    prompt = tiny_tokenizer().decode(nodes.prefills[-1].prompt_tokens)
    assert [tool["function"]["name"] for tool in json.loads(prompt.partition("|")[0])] == ["get_weather", "n__f"]


async def test_an_answer_that_is_cut_off_is_incomplete(client, nodes):
    nodes.script = says("the lazy dog")
    body = await post(client, max_output_tokens=1)
    assert (body["status"], body["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert (output_of(body), body["completed_at"]) == ([message("the", "incomplete")], None)
    text = (await client.post(PATH, json={**HI, "max_output_tokens": 1, "stream": True})).text
    last = events_of(text)[-1]
    assert (last["type"], output_of(last["response"])) == ("response.incomplete", output_of(body))
    nodes.script = says(CALL)
    begun = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "K'
    num_tokens = len(tiny_tokenizer().encode(begun, False))
    [call] = output_of(await post(client, tools=[TOOL], max_output_tokens=num_tokens))
    assert (call["type"], call["status"], call["arguments"]) == ("function_call", "incomplete", '{"city": "K')


async def test_an_answer_without_text_has_an_empty_message(client, nodes):
    nodes.script = says("")
    assert output_of(await post(client)) == [message("")]
    assert [e["type"] for e in events_of((await client.post(PATH, json={**HI, "stream": True})).text)].count(
        "response.output_item.done"
    ) == 1


async def test_logprobs_are_of_the_tokens_of_the_text(client, nodes):
    nodes.script = says("<think>a b c</think>hello world")
    body = await post(client, **LOGPROBS)
    thought, answer = body["output"]
    assert "logprobs" not in thought["content"][0]
    [part] = answer["content"]
    tokens = [entry["token"] for entry in part["logprobs"]]
    assert "hello world" in "".join(tokens)
    assert "b" not in "".join(tokens).split("hello")[0].replace("</think>", "")
    assert [entry["logprob"] for entry in part["logprobs"][0]["top_logprobs"]] == [-0.5]
    events = events_of((await client.post(PATH, json={**HI, **LOGPROBS, "stream": True})).text)
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    [done] = [event for event in events if event["type"] == "response.output_text.done"]
    assert all(delta["logprobs"] for delta in deltas)
    assert [entry["token"] for entry in done["logprobs"]] == tokens
    assert body["top_logprobs"] == 1


# ---- streams ----


async def test_a_stream_tells_how_the_response_grows(client, nodes):
    nodes.script = says(ANSWER)
    whole = await post(client, tools=[TOOL])
    response = await client.post(PATH, json={**HI, "tools": [TOOL], "stream": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    created, in_progress, *events, completed = events_of(response.text)
    assert [created["type"], in_progress["type"]] == ["response.created", "response.in_progress"]
    begun = created["response"]
    assert (begun["status"], begun["output"], begun["usage"]) == ("in_progress", [], None)
    assert completed["type"] == "response.completed"
    final = completed["response"]
    assert (final["id"], output_of(final), final["usage"]) == (begun["id"], output_of(whole), whole["usage"])
    part = ["content_part.added", "delta", "done", "content_part.done"]
    call = ["delta", "done"]
    for index, (item, kinds) in enumerate(zip(final["output"], [part, part, call, call], strict=True)):
        own = [event for event in events if event["output_index"] == index]
        assert own[0]["type"] == "response.output_item.added"
        assert own[0]["item"]["id"] == item["id"]
        assert own[0]["item"]["status"] == "in_progress"
        assert (own[-1]["type"], own[-1]["item"]) == ("response.output_item.done", item)
        inner = own[1:-1]
        assert {event["item_id"] for event in inner} == {item["id"]}
        found = [event["type"].removeprefix("response.") for event in inner]
        found = [kind if kind in part else kind.rpartition(".")[2] for kind in found]
        assert list(dict.fromkeys(found)) == kinds
        deltas = [event["delta"] for event in inner if event["type"].endswith(".delta")]
        [done] = [e for e in inner if e["type"].endswith((".delta", ".done")) and ("text" in e or "arguments" in e)]
        assert "".join(deltas) == (done["text"] if "text" in done else done["arguments"])
        assert done.get("name") == item.get("name")
        assert len(deltas) > 2


async def test_openais_client_reads_streams(official, nodes):
    nodes.script = says(ANSWER)
    async with official.responses.stream(model="tiny", input="hi", tools=[{**TOOL, "strict": True}]) as stream:
        kinds = {event.type async for event in stream}
        final = await stream.get_final_response()
    assert final.output_text == "\n\nI will look.\n"
    assert final.output[2].parsed_arguments == {"city": "Köln 🙂"}
    assert {"response.output_text.delta", "response.reasoning_text.delta"} <= kinds
    assert {"response.function_call_arguments.delta", "response.completed"} <= kinds


async def test_a_call_may_be_required(official, nodes):
    nodes.script = says(CALL)
    other = {"type": "function", "name": "other", "parameters": None}
    named = {"type": "function", "name": "get_weather"}
    for choice in ("required", named, {"type": "allowed_tools", "mode": "required", "tools": [named]}):
        response = await official.responses.create(model="tiny", input="hi", tools=[TOOL, other], tool_choice=choice)
        [call] = response.output
        assert (call.type, call.name, call.arguments) == ("function_call", "get_weather", ARGUMENTS)
        echoed = response.tool_choice
        assert (echoed if isinstance(echoed, str) else echoed.model_dump()) == choice
        assert not matches(nodes.prefills[-1].sampling.structured_outputs, "I will look.")


async def test_openais_client_parses_what_matches_a_schema(official, nodes):
    class City(pydantic.BaseModel):
        name: str

    nodes.script = says('{"name": "Köln"}')
    parsed = await official.responses.parse(model="tiny", input="hi", text_format=City)
    assert parsed.output_parsed == City(name="Köln")
    structured = nodes.prefills[-1].sampling.structured_outputs
    assert matches(structured, '<think>Hm.</think>{"name": "Köln"}')
    assert not matches(structured, '<think>Hm.</think>{"name": 1}')
    assert parsed.text.format.name == "City"
    async with official.responses.stream(model="tiny", input="hi", text_format=City) as stream:
        assert (await stream.get_final_response()).output_parsed == City(name="Köln")


async def test_a_failure_in_mid_stream_fails_the_response(client, nodes, router):
    nodes.script = says("hello world, hello there", hold=asyncio.Event(), hold_at=2)
    response = await client.post(PATH, json={**HI, "stream": True, "timeout": 1})
    last = events_of(response.text)[-1]
    assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
    assert last["response"]["error"] == {"code": "server_error", "message": "not finished within 1 s"}
    assert (await client.get(f"{PATH}/{last['response']['id']}")).status_code == 404
    await router.idle()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_cancels_its_response(client, nodes, router, stream):
    nodes.script = says("hello world, hello there", hold=asyncio.Event(), hold_at=2)
    request = asyncio.create_task(client.post(PATH, json={**HI, "stream": stream}))
    await nodes.until(lambda: nodes.prefills)
    request.cancel()
    await nodes.until(lambda: nodes.aborts)
    await router.idle()


# ---- requests ----


async def test_items_become_messages(client, nodes):
    call = {"type": "function_call", "call_id": "c1", "name": "get_weather", "arguments": '{"city": "Köln"}'}
    items = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
        call,
        {**call, "call_id": "c2"},
        {"type": "function_call_output", "call_id": "c1", "output": "Rain"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "Sun"}]},
        {"role": "assistant", "content": "One."},
        {"type": "reasoning", "id": "rs_2", "summary": [{"type": "summary_text", "text": "So."}]},
        {"role": "assistant", "content": "Two."},
    ]
    await post(client, input=items)
    function = {"name": "get_weather", "arguments": {"city": "Köln"}}
    assert messages_of(nodes) == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "a\nb"},
        {
            "role": "assistant",
            "content": "I look.",
            "tool_calls": [{"id": f"c{i}", "type": "function", "function": function} for i in (1, 2)],
            "reasoning": "Hm.",
            "reasoning_content": "Hm.",
        },
        {"role": "tool", "content": "Rain", "name": "get_weather", "tool_call_id": "c1"},
        {"role": "tool", "content": "Sun", "name": "get_weather", "tool_call_id": "c2"},
        {"role": "assistant", "content": "One."},
        {"role": "assistant", "content": "Two.", "reasoning": "So.", "reasoning_content": "So."},
    ]


async def test_what_comes_between_calls_is_said_in_their_message(client, nodes):
    """As a chat has such an answer: a template may refuse results that do not follow the message that calls."""
    nodes.script = says(f"I look. {CALL} And {CALL} Well")
    first = await post(client, tools=[TOOL])
    assert [item["type"] for item in first["output"]] == ["message", "function_call"] * 2 + ["message"]
    calls = [item["call_id"] for item in first["output"] if item["type"] == "function_call"]
    results = [{"type": "function_call_output", "call_id": call_id, "output": "Rain"} for call_id in calls]
    thought = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "So."}]}
    await post(client, tools=[TOOL], input=[thought, *results], previous_response_id=first["id"])
    _, asking, *told = messages_of(nodes)
    assert (asking["content"], asking["reasoning"]) == ("I look.  And  Well", "So.")
    assert [call["id"] for call in asking["tool_calls"]] == calls
    assert [(message["role"], message["tool_call_id"]) for message in told] == [("tool", name) for name in calls]


async def test_a_message_that_is_not_finished_is_continued(client, nodes):
    nodes.script = says("hello world")
    begun = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "The best ("}]}
    asked = {"role": "user", "content": "q"}
    called = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    for status in ("incomplete", "in_progress"):
        body = await post(client, input=[asked, {**begun, "status": status}])
        assert prompt_of(nodes).endswith("The best (")
        assert output_of(body) == [message("hello world")]
    for items in (
        [asked, {**begun, "status": "completed"}],
        [asked, begun],
        [asked, {**begun, "status": "incomplete"}, asked],
        [{**asked, "status": "incomplete"}],
        [asked, called, {**begun, "status": "incomplete"}],  # its calls come after the text in prompts
    ):
        await post(client, input=items)
        assert prompt_of(nodes).endswith("}")
    nodes.script = says("the lazy dog")
    cut = await post(client, max_output_tokens=1)
    assert output_of(cut) == [message("the", "incomplete")]
    await post(client, input=[], previous_response_id=cut["id"])
    assert prompt_of(nodes).endswith('"content": "the')
    counted = await client.post(f"{PATH}/input_tokens", json={**HI, "input": [], "previous_response_id": cut["id"]})
    assert counted.json()["input_tokens"] == len(nodes.prefills[-1].prompt_tokens)


async def test_the_template_gets_the_effort_and_the_tools(client, nodes):
    await post(client, tools=[TOOL], reasoning={"effort": "low"}, chat_template_kwargs={"thinking": True})
    assert prompt_of(nodes).endswith("<think>\n")
    tools = json.loads(prompt_of(nodes).split("|{")[0])
    assert tools == [{"type": "function", "function": {k: v for k, v in WEATHER["function"].items() if k != "strict"}}]
    asked = validate(json.dumps({**HI, "reasoning": {"effort": "low"}}).encode(), ResponsesRequest)
    effort = asked.chat([InputMessage(role="user", content="hi")])
    assert effort.variables == {"reasoning_effort": "low", "enable_thinking": True, "thinking": True}


# ---- fields and failures ----


async def test_harmless_fields_are_taken(client):
    harmless = {
        "n": 1,
        "background": False,
        "conversation": None,
        "truncation": "disabled",
        "service_tier": "auto",
        "safety_identifier": "s",
        "prompt_cache_key": "k",
        "max_tool_calls": 3,
        "include": ["reasoning.encrypted_content"],
        "text": {"format": {"type": "text"}, "verbosity": "medium"},
        "tools": [{**TOOL, "allowed_callers": ["direct"]}],
        "tool_choice": "none",
        "reasoning": {"summary": "auto"},
        "stream_options": {"include_obfuscation": False},
    }
    for summary in ("concise", "detailed"):
        assert (await post(client, reasoning={"summary": summary}))["reasoning"]["summary"] is None
    body = await post(client, **harmless)
    assert (body["service_tier"], body["prompt_cache_key"], body["tool_choice"]) == ("default", "k", "none")


async def test_numbers_that_json_cannot_say_are_not_repeated(client, nodes):
    """As text: what writes JSON here cannot say them either."""
    tools = '"tools": [{"type": "function", "name": "f", "parameters": {"a": ["large"]}}]'
    for fields, status in (
        (tools.replace('"large"', "1e999"), 400),
        (tools.replace('["large"]', "-1e999"), 400),
        (tools + ', "tool_choice": {"type": "function", "name": "f", "x": 1e999}', 200),
        (
            tools + ', "tool_choice": {"type": "allowed_tools", "mode": "auto", "x": 1e999, '
            '"tools": [{"type": "function", "name": "f", "x": 1e999}]}',
            200,
        ),
        ('"text": {"format": {"type": "text", "schema": {"a": 1e999}, "x": 1e999}}', 200),
    ):
        nodes.script = says('<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>')
        response = await client.post(PATH, content='{"model": "tiny", "input": "hi", ' + fields + "}")
        assert response.status_code == status, response.text
        assert "that can be read" in response.text or status == 200


async def test_failures_of_a_chat_name_the_fields_of_a_response(client):
    for fields, param in (
        ({"max_output_tokens": 9999}, "max_output_tokens"),
        ({"input": [{"role": "assistant", "content": 'said "a"', "status": "incomplete"}]}, "input"),
        ({"input": "x" * 9999}, "input"),
    ):
        response = await client.post(PATH, json={**HI, **fields})
        assert (response.status_code, error_of(response)["param"]) == (400, param)


async def test_failures_of_nodes_have_their_status(client, nodes):
    nodes.script = lambda prefill: Answer(error=Overloaded("full"))
    for stream in (False, True):
        assert (await client.post(PATH, json={**HI, "stream": stream})).status_code == 429
