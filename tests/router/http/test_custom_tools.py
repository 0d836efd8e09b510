"""Custom tools in chats: the model is shown functions with one string, and clients get the string."""

import json
import time
from typing import Any

import httpx
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionMessageCustomToolCall

from baton.node_info import NodeRole
from baton.structured_output import xgrammar_compiler
from baton.structured_output.constraint import StructuredBackend
from tests.cpu_time import takes_less_than
from tests.router.conftest import on_shared_loop, running_router, says, shared_fixtures
from tests.router.fake_node import FakeCluster
from tests.router.http.tool_chats import (
    CALL,
    CHATS,
    PARSERS,
    WEATHER,
    chunks_of,
    official_client,
    prompt_of,
    shared_with_tools,
)
from tests.router.http_shapes import CHAT, allowed, error_of
from tests.router.matching import matches
from tests.router.text.test_lark_regex import APPLY_PATCH, PATCH
from tests.router.tiny_tokenizer import tiny_tokenizer

LARK = {"type": "grammar", "grammar": {"syntax": "lark", "definition": APPLY_PATCH}}
REGEX = {"type": "grammar", "grammar": {"syntax": "regex", "definition": r"[a-z]+\n\"(é|\d)/"}}
RECURSIVE = {"type": "grammar", "grammar": {"syntax": "lark", "definition": 'start: "(" start ")" | "x"'}}


def custom(name: str, form: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    return {"type": "custom", "custom": {"name": name, **({"format": form} if form else {}), **fields}}


def call(name: str, text: str) -> str:
    arguments = json.dumps({"input": text}, ensure_ascii=False)
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


PATCHING = custom("apply_patch", LARK, description="Edits files.")
NOTING = custom("note", {"type": "text"})
CUSTOM: dict[str, Any] = {**CHAT, "tools": [PATCHING, NOTING, WEATHER]}
ANSWER = f"I will patch it.\n{call('apply_patch', PATCH)}\n{CALL}\n{call('note', 'Done: “x”')}"
NAMED = {"type": "custom", "custom": {"name": "apply_patch"}}

pytestmark = on_shared_loop
shared = shared_with_tools(ANSWER)
nodes, router, client = shared_fixtures()
official = official_client()


def constraint(nodes):
    return nodes.prefills[-1].sampling.structured_outputs


async def refusal_of(client, **fields: Any) -> tuple[str, str]:
    response = await client.post(CHATS, json={**CUSTOM, **fields})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    return error["param"], error["message"]


# ---- answers ----


async def test_openais_client_reads_calls_whole_and_streamed(official):
    whole = await official.chat.completions.create(**CUSTOM)
    ChatCompletion.model_validate(whole.model_dump(), strict=True)
    message = whole.choices[0].message
    patch, weather, note = message.tool_calls
    assert isinstance(patch, ChatCompletionMessageCustomToolCall)
    assert (patch.type, patch.custom.name, patch.custom.input) == ("custom", "apply_patch", PATCH)
    assert (weather.type, weather.function.name) == ("function", "get_weather")
    assert (note.custom.name, note.custom.input) == ("note", "Done: “x”")
    assert (message.content, whole.choices[0].finish_reason) == ("I will patch it.\n", "tool_calls")
    async with official.chat.completions.stream(**CUSTOM) as stream:
        async for _ in stream:
            pass
        streamed = stream.current_completion_snapshot.choices[0]
    assert [one.to_dict()["custom"] for one in streamed.message.tool_calls if one.type == "custom"] == [
        patch.custom.to_dict(),
        note.custom.to_dict(),
    ]
    assert streamed.finish_reason == "tool_calls"


async def test_the_input_is_streamed_as_it_comes(client):
    response = await client.post(CHATS, json={**CUSTOM, "stream": True})
    chunks = [part for chunk in chunks_of(response.text) for part in chunk["choices"][0]["delta"].get("tool_calls", ())]
    begun, *rest = [part for part in chunks if part["index"] == 0]
    assert begun["id"].startswith("chatcmpl-tool-")
    assert begun == {**begun, "type": "custom", "custom": {"name": "apply_patch", "input": begun["custom"]["input"]}}
    assert all(set(part) == {"index", "custom"} for part in rest)
    assert len(rest) > 10
    assert "".join(part["custom"]["input"] for part in [begun, *rest]) == PATCH
    assert {part["index"] for part in chunks if "function" in part} == {1}


async def test_an_input_that_is_cut_off_has_what_came(client, nodes):
    nodes.script = says(call("note", "one\ntwo"))
    num_tokens = len(tiny_tokenizer().encode('<tool_call>\n{"name": "note", "arguments": {"input": "one\\nt', False))
    choice = (await client.post(CHATS, json={**CUSTOM, "max_tokens": num_tokens})).json()["choices"][0]
    assert choice["message"]["tool_calls"][0]["custom"] == {"name": "note", "input": "one\nt"}
    assert choice["finish_reason"] == "length"


# ---- what answers must match ----


@pytest.mark.parametrize("choice", ["required", NAMED, allowed("required", NAMED)])
async def test_a_required_call_has_input_of_the_grammar(official, nodes, choice):
    nodes.script = says(call("apply_patch", PATCH))
    answer = await official.chat.completions.create(**CUSTOM, tool_choice=choice)
    assert answer.choices[0].message.tool_calls[0].custom.input == PATCH
    assert answer.choices[0].finish_reason == ("stop" if choice is NAMED else "tool_calls")
    assert matches(constraint(nodes), call("apply_patch", PATCH))
    assert not matches(constraint(nodes), call("apply_patch", PATCH[1:]))
    assert matches(constraint(nodes), call("note", PATCH[1:])) is (choice == "required")
    assert not matches(constraint(nodes), call("apply_patch", PATCH).replace('"input"', '"patch"'))
    assert not matches(constraint(nodes), "Hello")


async def test_with_hermes_grammars_are_enforced_where_the_model_calls(client, nodes):
    tools = [custom("f", REGEX), NOTING, custom("g", RECURSIVE)]
    await client.post(CHATS, json={**CUSTOM, "tools": tools})
    good = call("f", 'ab\n"é/')
    for text in ("Hello", f"So: {good}", good.replace("é", "7"), call("note", "any\n“”"), call("g", "not of it")):
        assert matches(constraint(nodes), text), text
    for text in (good.replace("é", "e"), good.replace("ab", "a b"), call("note", "x").replace('"x"', "1")):
        assert not matches(constraint(nodes), text), text
    for tools in ([NOTING, custom("g", RECURSIVE)], [custom("g")]):
        await client.post(CHATS, json={**CUSTOM, "tools": tools})
        assert constraint(nodes) is None


async def test_definitions_that_do_not_compile_are_named(client, nodes):
    for syntax, definition, says_why in (
        ("lark", 'start: "a', "The grammar of the tool `f` is refused: "),
        ("lark", "start: a", 'unknown name: "a"'),
        ("regex", "(", "The regex of the tool `f` is refused: "),
    ):
        bad = custom("f", {"type": "grammar", "grammar": {"syntax": syntax, "definition": definition}})
        param, message = await refusal_of(client, tools=[bad, NOTING])
        assert (param, says_why in message) == ("tools", True), message
        await client.post(CHATS, json={**CUSTOM, "tools": [bad, NOTING], "tool_choice": "none"})
    for choice in ("required", {"type": "custom", "custom": {"name": "g"}}):
        param, message = await refusal_of(client, tools=[custom("g", RECURSIVE)], tool_choice=choice)
        assert param == "tools"
        assert message.startswith("The grammar of the tool `g` cannot be enforced: it is no regular expression: ")
        assert "`start` leads back to itself" in message


async def test_xgrammar_enforces_no_grammar_of_a_tool(monkeypatch):
    """It does not know Lark, and would write quotes into JSON as they are. Here it would say that it cannot start."""
    monkeypatch.setattr(xgrammar_compiler, "is_installed", lambda: True)
    cluster = FakeCluster(says("hello world"))
    try:
        for role in NodeRole:
            await cluster.add(role, structured_outputs_backend=StructuredBackend.XGRAMMAR)
        async with (
            running_router(cluster, **PARSERS) as router,
            httpx.AsyncClient(base_url=router.http, timeout=20) as client,
        ):
            response = await client.post(CHATS, json={**CUSTOM, "tools": [PATCHING, NOTING]})
            assert response.json()["choices"][0]["message"]["content"] == "hello world"
            assert constraint(cluster) is None
            regex = {"tools": [custom("f", REGEX)]}
            for fields in ({"tool_choice": NAMED}, {**regex, "tool_choice": "required"}):
                param, message = await refusal_of(client, **fields)
                assert (param, "XGrammar cannot constrain" in message) == ("tools", True)
    finally:
        await cluster.close()


@pytest.mark.parametrize(
    ("fields", "param", "why"),
    [
        ({"tools": [{"type": "custom"}]}, "tools", "tools.0.custom.custom: Field required"),
        ({"tools": [custom("a b")]}, "tools", "not 'a b'"),
        ({"tools": [custom("f"), custom("f")]}, "tools", "2 tools called `f`"),
        ({"tools": [WEATHER, custom("get_weather")]}, "tools", "2 tools called `get_weather`"),
        ({"tools": [custom("f", {"type": "grammar"})]}, "tools", "format.grammar.grammar: Field required"),
        ({"tools": [custom("f", {"type": "json"})]}, "tools", "'text', 'grammar'"),
        ({"tools": [custom("f", {**LARK, "grammar": {"syntax": "ebnf", "definition": "x"}})]}, "tools", "'lark' or"),
        ({"tools": [custom("f", {**LARK, "grammar": {"syntax": "lark", "definition": ""}})]}, "tools", "at least 1"),
        ({"tools": [custom("f", description="x" * 200_000), custom("g", description="x" * 99_999)]}, "tools", "262144"),
        ({"tools": [{"type": "web_search"}]}, "tools", "tools.0: `type` must be 'function' or 'custom'"),
        ({"tool_choice": {"type": "custom", "custom": {"name": "get_weather"}}}, "tool_choice", "which `tools` lacks"),
        ({"tool_choice": {"type": "function", "function": {"name": "note"}}}, "tool_choice", "which `tools` lacks"),
        ({"tool_choice": {"type": "custom", "name": "note"}}, "tool_choice", "must be {"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"type": "custom"}]}]}, "messages", "Field required"),
    ],
)
async def test_mistakes_are_named(client, fields, param, why):
    found, message = await refusal_of(client, **fields)
    assert found == param
    assert why in message


@pytest.mark.parametrize("path", [CHATS, "/v1/responses"])
async def test_grammars_that_are_too_large_together_are_not_read(client, path):
    definition = "start: " + "?" * 200_000
    if path == CHATS:
        form = {"type": "grammar", "grammar": {"syntax": "lark", "definition": definition}}
        body = {**CHAT, "tools": [custom(f"f{i}", form) for i in range(30)]}
    else:
        wanted = {"type": "grammar", "syntax": "lark", "definition": definition}
        body = {
            "model": "tiny",
            "input": "hi",
            "tools": [{"type": "custom", "name": f"f{i}", "format": wanted} for i in range(30)],
        }
    with takes_less_than(2, time.process_time):  # bodies of this size are read on another thread
        response = await client.post(path, json=body)
    assert "has 6000210 characters, of at most" in error_of(response)["message"]


# ---- prompts ----


async def test_the_template_gets_functions_with_one_string(client, nodes):
    asked = {"id": "c1", "type": "custom", "custom": {"name": "apply_patch", "input": 'a "b"\n'}}
    messages = [
        {"role": "assistant", "content": None, "tool_calls": [asked]},
        {"role": "tool", "tool_call_id": "c1", "content": "Done"},
    ]
    body = {**CUSTOM, "messages": messages}
    assert (await client.post(CHATS, json=body)).status_code == 200
    tools, *rendered = prompt_of(nodes).split("|{")
    patch, note, weather = (tool["function"] for tool in json.loads(tools))
    assert (patch["name"], patch["description"]) == ("apply_patch", "Edits files.")
    assert patch["parameters"] == {
        "type": "object",
        "properties": {
            "input": {
                "type": "string",
                "description": f"All that the tool gets, as one text. It must match this Lark grammar:\n{APPLY_PATCH}",
            }
        },
        "required": ["input"],
        "additionalProperties": False,
    }
    assert set(note) == {"name", "parameters"}
    assert note["parameters"]["properties"]["input"]["description"] == "All that the tool gets, as one text."
    assert weather["name"] == "get_weather"
    function = {"name": "apply_patch", "arguments": {"input": 'a "b"\n'}}
    message = json.loads("{" + rendered[0])
    assert message["tool_calls"] == [{"id": "c1", "type": "function", "function": function}]
    counted = (await client.post("/tokenize", json={**body, "add_special_tokens": False})).json()
    assert tuple(counted["tokens"]) == nodes.prefills[-1].prompt_tokens
