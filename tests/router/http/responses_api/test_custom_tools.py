"""Custom tools in the Responses API, in the items and events that OpenAI's client knows."""

import json
from typing import Any

import pytest

from tests.router.conftest import on_shared_loop, says
from tests.router.http.responses_api.shapes import HI, PATH, TOOL, events_of, messages_of, output_of, post
from tests.router.http.test_custom_tools import ANSWER, call, constraint
from tests.router.http.tool_chats import ARGUMENTS, CALL, prompt_of
from tests.router.http_shapes import error_of
from tests.router.matching import matches
from tests.router.text.test_lark_regex import APPLY_PATCH, PATCH
from tests.router.tiny_tokenizer import tiny_tokenizer

PATCHING: dict[str, Any] = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edits files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": APPLY_PATCH},
}
NOTING: dict[str, Any] = {"type": "custom", "name": "note"}
RECURSIVE = {"type": "grammar", "syntax": "lark", "definition": 'start: "(" start ")" | "x"'}
TOOLS = [PATCHING, NOTING, TOOL]
NAMED = {"type": "custom", "name": "apply_patch"}

pytestmark = on_shared_loop


async def test_calls_are_items_of_their_own(client, nodes):
    nodes.script = says(ANSWER)
    body = await post(client, tools=TOOLS)
    text, patch, weather, note = output_of(body)
    assert text["content"][0]["text"] == "I will patch it.\n"
    assert patch == {"type": "custom_tool_call", "status": "completed", "name": "apply_patch", "input": PATCH}
    assert (weather["type"], weather["arguments"]) == ("function_call", ARGUMENTS)
    assert note == {**patch, "name": "note", "input": "Done: “x”"}
    assert body["output"][1]["id"].startswith("ctc_")
    assert body["tools"] == [PATCHING, {**NOTING, "format": {"type": "text"}}, TOOL]


async def test_fields_of_formats_that_nobody_knows_are_not_repeated(client, nodes):
    nodes.script = says("Done.")
    tools = json.dumps([{**PATCHING, "format": {**PATCHING["format"], "x": 1}}]).replace('"x": 1', '"x": 1e999')
    response = await client.post(PATH, content=f'{{"model": "tiny", "input": "hi", "tools": {tools}}}')
    assert response.json()["tools"] == [PATCHING]


async def test_openais_client_reads_the_input_as_it_comes(official, nodes):
    nodes.script = says(ANSWER)
    whole = await official.responses.create(model="tiny", input="hi", tools=TOOLS)
    async with official.responses.stream(model="tiny", input="hi", tools=TOOLS) as stream:
        events = [event async for event in stream]
        final = await stream.get_final_response()
    calls = [[item for item in found.output if item.type == "custom_tool_call"] for found in (whole, final)]
    assert [[(item.name, item.input) for item in found] for found in calls] == [
        [("apply_patch", PATCH), ("note", "Done: “x”")]
    ] * 2
    deltas = [event for event in events if event.type == "response.custom_tool_call_input.delta"]
    first = [event.delta for event in deltas if event.item_id == calls[1][0].id]
    assert "".join(first) == PATCH
    assert len(first) > 10
    done = [event.input for event in events if event.type == "response.custom_tool_call_input.done"]
    assert done == [PATCH, "Done: “x”"]
    kinds = {event.type for event in events if "call" in event.type}
    assert kinds >= {"response.function_call_arguments.delta", "response.function_call_arguments.done"}


async def test_an_input_that_is_cut_off_is_incomplete(client, nodes):
    nodes.script = says(call("note", "one\ntwo"))
    num_tokens = len(tiny_tokenizer().encode('<tool_call>\n{"name": "note", "arguments": {"input": "one\\nt', False))
    [item] = output_of(await post(client, tools=TOOLS, max_output_tokens=num_tokens))
    assert item == {"type": "custom_tool_call", "status": "incomplete", "name": "note", "input": "one\nt"}


@pytest.mark.parametrize(
    "choice", ["required", NAMED, {"type": "allowed_tools", "mode": "required", "tools": [NAMED]}], ids=str
)
async def test_a_call_may_be_required(official, nodes, choice):
    nodes.script = says(call("apply_patch", PATCH))
    response = await official.responses.create(model="tiny", input="hi", tools=TOOLS, tool_choice=choice)
    [item] = response.output
    assert (item.type, item.name, item.input) == ("custom_tool_call", "apply_patch", PATCH)
    assert (response.tool_choice if isinstance(choice, str) else response.tool_choice.to_dict()) == choice
    assert matches(constraint(nodes), call("apply_patch", PATCH))
    assert not matches(constraint(nodes), call("apply_patch", PATCH[1:]))


async def test_the_conversation_goes_on_from_a_call(official, client, nodes):
    nodes.script = says(call("apply_patch", PATCH))
    first = await official.responses.create(model="tiny", input="hi", tools=TOOLS)
    [asked] = first.output
    result: dict[str, Any] = {"type": "custom_tool_call_output", "call_id": asked.call_id, "output": "Patched."}
    nodes.script = says("Done.")
    ways: list[dict[str, Any]] = [
        {"input": [result], "previous_response_id": first.id},
        {"input": [{"role": "user", "content": "hi"}, asked.to_dict(), result]},
    ]
    for way in ways:
        second = await official.responses.create(model="tiny", tools=TOOLS, **way)
        assert second.output_text == "Done."
        _, assistant, tool = messages_of(nodes)
        function = {"name": "apply_patch", "arguments": {"input": PATCH}}
        assert assistant["tool_calls"] == [{"id": asked.call_id, "type": "function", "function": function}]
        assert (tool["content"], tool["name"], tool["tool_call_id"]) == ("Patched.", "apply_patch", asked.call_id)
        items = (await official.responses.input_items.list(second.id, order="asc")).data
        assert [item.type for item in items] == ["message", "custom_tool_call", "custom_tool_call_output"]
        assert (items[1].input, items[2].output) == (PATCH, "Patched.")


async def test_they_may_be_in_namespaces(client, nodes):
    nodes.script = says(call("ed__apply_patch", PATCH))
    namespace = {"type": "namespace", "name": "ed", "tools": [PATCHING, {**TOOL, "name": "f"}]}
    body = await post(client, tools=[NOTING, namespace])
    [item] = output_of(body)
    assert (item["type"], item["name"], item["namespace"], item["input"]) == (
        "custom_tool_call",
        "apply_patch",
        "ed",
        PATCH,
    )
    assert [f'"{name}"' in prompt_of(nodes) for name in ("note", "ed__apply_patch", "ed__f")] == [True] * 3
    await post(client, tools=[NOTING, namespace], input=[{"role": "user", "content": "hi"}, body["output"][0]])
    assert messages_of(nodes)[1]["tool_calls"][0]["function"]["name"] == "ed__apply_patch"


@pytest.mark.parametrize(
    ("fields", "param", "why"),
    [
        ({"tools": [{**NOTING, "format": {"type": "grammar"}}]}, "tools", "format.grammar.syntax: Field required"),
        ({"tools": [{**NOTING, "format": {**PATCHING["format"], "syntax": "ebnf"}}]}, "tools", "'lark' or 'regex'"),
        ({"tools": [{**PATCHING, "format": {**PATCHING["format"], "definition": "x"}}]}, "tools", "The grammar of the"),
        ({"tools": [NOTING, {**TOOL, "name": "note"}]}, "tools", "2 tools called `note`"),
        ({"tools": [{**NOTING, "output": "x"}]}, "tools", "`output` in `tools`"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "note"}}, "tool_choice", "`tools` lacks"),
        ({"tools": TOOLS, "tool_choice": {"type": "custom"}}, "tool_choice", "'function' and 'custom' are"),
        (
            {
                "tools": [{**NOTING, "format": RECURSIVE}],
                "tool_choice": "required",
            },
            "tools",
            "The grammar of the tool `note` cannot be enforced",
        ),
        ({"input": [{"type": "custom_tool_call", "call_id": "c", "name": "f"}]}, "input", "input: Field required"),
    ],
)
async def test_mistakes_are_named(client, fields, param, why):
    response = await client.post(PATH, json={**HI, **fields})
    assert response.status_code == 400, response.text
    assert error_of(response)["param"] == param
    assert why in error_of(response)["message"]


async def test_events_are_numbered_and_items_end(client, nodes):
    nodes.script = says(f"{call('note', 'a')}\n{CALL}")
    events = events_of((await client.post(PATH, json={**HI, "tools": TOOLS, "stream": True})).text)
    kinds = [event["type"].removeprefix("response.") for event in events if "delta" not in event["type"]]
    assert kinds == [
        *("created", "in_progress"),
        *("output_item.added", "custom_tool_call_input.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.done", "output_item.done"),
        "completed",
    ]
    added = next(event["item"] for event in events if event["type"] == "response.output_item.added")
    assert (added["type"], added["input"], added["status"]) == ("custom_tool_call", "", "in_progress")
