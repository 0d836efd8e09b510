"""Tools and thinking in the Messages API: what reaches the template, and how messages look, whole and streamed."""

from __future__ import annotations

import json
import sys
from typing import Any

import httpx

from baton.logits_processors import THINKING_BUDGET
from router.http.anthropic.schemas import MessagesRequest
from router.http.body import validate_fields
from router.reasoning_parsers import REASONING_PARSERS
from tests.router.conftest import Router, on_shared_loop, says, shared_fixtures
from tests.router.fake_node import FakeCluster
from tests.router.http.test_messages import MESSAGE, USER, error_of, events
from tests.router.http.tool_chats import CALL, shared_with_tools
from tests.router.matching import matches
from tests.router.tiny_tokenizer import EOT, tiny_tokenizer

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER: dict[str, Any] = {"name": "get_weather", "description": "Says how it is.", "input_schema": SCHEMA}
OTHER: dict[str, Any] = {"type": "custom", "name": "other", "input_schema": {"type": "object"}}
TOOLS: dict[str, Any] = {**MESSAGE, "max_tokens": 2000, "tools": [WEATHER, OTHER]}
EMPTY = '<tool_call>\n{"name": "other", "arguments": {}}\n</tool_call>'
ANSWER = f"<think>\nHm.\n</think>I will look.\n{CALL}\n{EMPTY}"
BLOCKS: list[dict[str, Any]] = [
    {"type": "thinking", "thinking": "\nHm.\n", "signature": "unsigned"},
    {"type": "text", "text": "I will look.\n"},
    {"type": "tool_use", "name": "get_weather", "input": {"city": "Köln 🙂"}},
    {"type": "tool_use", "name": "other", "input": {}},
]


pytestmark = on_shared_loop
shared = shared_with_tools(ANSWER)
nodes, router, client = shared_fixtures()


async def ask(client: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    response = await client.post("/v1/messages", json={**TOOLS, **fields})
    assert response.status_code == 200, response.text
    body: dict[str, Any] = response.json()
    for block in body["content"]:
        if block["type"] == "tool_use":
            assert block.pop("id")
    return body


async def stream(client: httpx.AsyncClient, **fields: Any) -> tuple[list[dict[str, Any]], str]:
    """The blocks as a client puts them together, and the reason of the end."""
    response = await client.post("/v1/messages", json={**TOOLS, **fields, "stream": True})
    blocks: list[dict[str, Any]] = []
    texts: list[str] = []
    reason = ""
    for event in events(response.text):
        match event["type"]:
            case "content_block_start":
                assert event["index"] == len(blocks)
                blocks.append(event["content_block"])
                texts.append("")
            case "content_block_delta":
                assert event["index"] == len(blocks) - 1
                kind = event["delta"]["type"]
                if kind == "signature_delta":
                    blocks[-1]["signature"] = event["delta"]["signature"]
                else:
                    texts[-1] += event["delta"][kind.removesuffix("_delta").replace("input_json", "partial_json")]
            case "message_delta":
                reason = event["delta"]["stop_reason"]
    for block, text in zip(blocks, texts, strict=True):
        if block["type"] == "tool_use":
            assert block.pop("id")
            block["input"] = json.loads(text or "{}")
        else:
            block[block["type"]] = text
    return blocks, reason


def prompt_of(nodes: FakeCluster) -> list[Any]:
    """The tools, and the messages, as the template had them."""
    text = tiny_tokenizer().decode(nodes.prefills[-1].prompt_tokens, skip_special_tokens=False)
    tools, *messages = text.removesuffix("<think>\n").split("|{")
    return [tools if tools == "no tools" else json.loads(tools), *(json.loads("{" + m) for m in messages)]


async def test_a_message_has_thinking_text_and_calls(client, nodes):
    whole = await ask(client)
    assert (whole["content"], whole["stop_reason"]) == (BLOCKS, "tool_use")
    assert await stream(client) == (BLOCKS, "tool_use")
    nodes.script = says("Just <b>text</b>.")
    assert await stream(client) == ([{"type": "text", "text": "Just <b>text</b>."}], "end_turn")
    nodes.script = says("<think>Only this")
    assert await stream(client) == ([{**BLOCKS[0], "thinking": "Only this"}], "end_turn")


async def test_thinking_is_counted(client):
    counted = {"thinking_tokens": len(tiny_tokenizer().encode("<think>\nHm.\n", False))}
    assert (await ask(client))["usage"]["output_tokens_details"] == counted
    response = await client.post("/v1/messages", json={**TOOLS, "stream": True})
    [end] = [event for event in events(response.text) if event["type"] == "message_delta"]
    assert end["usage"]["output_tokens_details"] == counted


async def test_a_call_that_is_cut_off_keeps_what_is_there(client, nodes):
    nodes.script = says(CALL)
    num_tokens = len(tiny_tokenizer().encode('<tool_call>\n{"name": "get_weather", "arguments": {"city": "Kö', False))
    whole = await ask(client, max_tokens=num_tokens)
    assert whole["stop_reason"] == "max_tokens"
    assert [block["input"] for block in whole["content"]] == [{"city": "Kö"}]


async def test_a_call_has_what_json_can_say(client, nodes):
    arguments = r'{"city": "\ud83d Köln", "most": [1e999, {"least": -1e400}], "none": 1.5}'
    nodes.script = says(CALL.replace('{"city": "Köln 🙂"}', arguments))
    [block] = (await ask(client))["content"]
    most = sys.float_info.max
    assert block["input"] == {"city": "\ufffd Köln", "most": [most, {"least": -most}], "none": 1.5}
    [streamed], _ = await stream(client)
    assert streamed["input"]["city"] == block["input"]["city"]


async def test_choices_are_those_of_chats(client, nodes):
    for choice, good, bad in (
        ({"type": "any"}, f"{EMPTY}\n{CALL}", "Hello"),
        ({"type": "any", "disable_parallel_tool_use": True}, CALL, f"{EMPTY}\n{CALL}"),
        ({"type": "tool", "name": "other"}, EMPTY, CALL),
    ):
        nodes.script = says(good)
        whole = await ask(client, tool_choice=choice)
        assert whole["stop_reason"] == "tool_use"
        assert len(whole["content"]) == good.count("<tool_call>")
        structured = nodes.prefills[-1].sampling.structured_outputs
        assert matches(structured, good)
        assert not matches(structured, bad)
    nodes.script = says(f"{CALL}\n{CALL}")
    assert len((await ask(client, tool_choice={"type": "auto", "disable_parallel_tool_use": True}))["content"]) == 1
    assert nodes.prefills[-1].sampling.structured_outputs is None
    none = await ask(client, tool_choice={"type": "none"})
    assert none["content"] == [{"type": "text", "text": f"{CALL}\n{CALL}"}]
    strict = [{**WEATHER, "strict": True}]
    await ask(client, tools=strict)
    constrained = nodes.prefills[-1].sampling.structured_outputs
    assert constrained is not None
    assert not matches(constrained, "<tool_call>x")


CONVERSATION: list[dict[str, Any]] = [
    {"role": "user", "content": "Weather?"},
    {
        "role": "assistant",
        "content": [
            {"type": "redacted_thinking", "data": "Enc/"},
            {"type": "thinking", "thinking": "Hm.", "signature": "x"},
            {"type": "text", "text": "Let me see."},
            {"type": "tool_use", "id": "t1", "name": "get_weather", "input": {"city": "Köln"}},
        ],
    },
    {"role": "assistant", "content": [{"type": "tool_use", "id": "t2", "name": "other", "input": {}}]},
    {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "Rain"}]},
            {"type": "tool_result", "tool_use_id": "t2", "is_error": True},
            {"type": "tool_result", "tool_use_id": "t3", "content": "?"},
            {"type": "tool_result", "tool_use_id": "t4", "content": [{"type": "tool_reference", "tool_name": "other"}]},
            {"type": "text", "text": "And now?"},
        ],
    },
    {"role": "user", "content": "Well?"},
]
CALLED = [
    {"id": "t1", "type": "function", "function": {"name": "get_weather", "arguments": {"city": "Köln"}}},
    {"id": "t2", "type": "function", "function": {"name": "other", "arguments": {}}},
]


async def test_the_template_gets_tools_calls_results_and_thinking(client, nodes):
    await ask(client, messages=CONVERSATION)
    tools, *messages = prompt_of(nodes)
    assert tools == [
        {
            "type": "function",
            "function": {"name": "get_weather", "description": "Says how it is.", "parameters": SCHEMA},
        },
        {"type": "function", "function": {"name": "other", "parameters": {"type": "object"}}},
    ]
    assert messages == [
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "content": "Let me see.",
            "tool_calls": CALLED,
            "reasoning": "Hm.",
            "reasoning_content": "Hm.",
        },
        {"role": "tool", "content": "Rain", "tool_call_id": "t1", "name": "get_weather"},
        {"role": "tool", "content": "", "tool_call_id": "t2", "name": "other"},
        {"role": "tool", "content": "?", "tool_call_id": "t3"},
        {"role": "tool", "content": "other", "tool_call_id": "t4"},
        {"role": "user", "content": "And now?\nWell?"},
    ]


async def test_tools_and_thinking_are_counted(client, nodes):
    thinking = {"type": "enabled", "budget_tokens": 1024}
    for fields in ({}, {"messages": CONVERSATION}, {"thinking": thinking}, {"tools": None}):
        await ask(client, **fields)
        asked = {name: value for name, value in {**TOOLS, **fields}.items() if name != "max_tokens"}
        counted = await client.post("/v1/messages/count_tokens", json=asked)
        assert counted.json() == {"input_tokens": len(nodes.prefills[-1].prompt_tokens)}


async def test_thinking_is_told_to_the_template(client, nodes):
    nodes.script = says("Hm.</think>Yes.")
    thought = [{"type": "thinking", "thinking": "Hm.", "signature": "unsigned"}, {"type": "text", "text": "Yes."}]
    text = [{"type": "text", "text": "Hm.</think>Yes."}]
    enabled = {"type": "enabled", "budget_tokens": 1024}
    for fields, blocks in (
        ({"thinking": enabled}, thought),
        ({"thinking": {"type": "adaptive"}}, thought),
        ({"chat_template_kwargs": {"thinking": True}}, thought),
        ({"thinking": {"type": "disabled"}}, text),
        ({}, text),
    ):
        assert (await ask(client, **fields))["content"] == blocks, fields


async def test_a_budget_bounds_the_thinking(client, nodes, monkeypatch):
    enabled = {"thinking": {"type": "enabled", "budget_tokens": 1024}}
    await ask(client, **enabled)
    assert nodes.prefills[-1].sampling.logits_processors == (), "of a model whose closing tag is several tokens"
    monkeypatch.setattr(REASONING_PARSERS["qwen3"], "closing", "<|endoftext|>")
    for fields in ({"thinking": {"type": "adaptive"}}, {"thinking": {"type": "disabled", "budget_tokens": 1024}}, {}):
        await ask(client, **fields)
        assert nodes.prefills[-1].sampling.logits_processors == ()
    await ask(client, **enabled)
    (bound,) = nodes.prefills[-1].sampling.logits_processors
    assert (bound.name, bound.parsed()[0][:2]) == (THINKING_BUDGET, [1024, [EOT]])


async def test_the_effort_is_told_to_the_template() -> None:
    for fields, variables in (
        ({}, {"reasoning_effort": "high", "enable_thinking": False, "thinking": False}),
        ({"thinking": {"type": "adaptive"}}, {"reasoning_effort": "high", "enable_thinking": True, "thinking": True}),
        ({"thinking": {"type": "disabled"}}, {"enable_thinking": False, "thinking": False}),
    ):
        body = validate_fields({**MESSAGE, "output_config": {"effort": "high"}, **fields}, MessagesRequest)
        body.check()
        assert body.variables(may_reason=True) == variables
    adaptive = validate_fields({**MESSAGE, "thinking": {"type": "adaptive"}}, MessagesRequest)
    assert adaptive.variables(may_reason=False) is None, "it is left to the model"
    assert validate_fields({**MESSAGE, "output_config": {"effort": "low"}}, MessagesRequest).variables(False) == {
        "reasoning_effort": "low"
    }


async def test_the_text_may_have_to_match_a_schema(client, nodes):
    nodes.script = says('{"city": "Oslo"}')
    wanted = {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}
    body = await ask(client, tools=None, **wanted)
    assert body["content"] == [{"type": "text", "text": '{"city": "Oslo"}'}]
    structured = nodes.prefills[-1].sampling.structured_outputs
    assert matches(structured, '<think>Hm.</think>{"city": "Oslo"}')
    assert not matches(structured, '<think>Hm.</think>{"city": 1}')
    await ask(client, **wanted)
    assert matches(nodes.prefills[-1].sampling.structured_outputs, CALL), "it may call a tool instead"
    await ask(client, **wanted, tool_choice={"type": "any"})
    assert not matches(nodes.prefills[-1].sampling.structured_outputs, '{"city": "Oslo"}')
    broken = {"format": {"type": "json_schema", "schema": {"type": "frob"}}}
    response = await client.post("/v1/messages", json={**MESSAGE, "output_config": broken})
    assert (response.status_code, "output_config: " in error_of(response)["message"]) == (400, True)


async def test_an_answer_that_goes_on_from_text_does_not_think(client, nodes):
    nodes.script = says("<think>")
    messages = [USER, {"role": "assistant", "content": "So: "}]
    assert (await ask(client, messages=messages))["content"] == [{"type": "text", "text": "<think>"}]


def turn(role: str, **block: Any) -> dict[str, Any]:
    return {"messages": [USER, {"role": role, "content": [block]}]}


USE = {"type": "tool_use", "id": "t", "name": "f", "input": {}}
MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"tools": [{"name": "f"}]}, "input_schema"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools.0.type"),
    ({"tools": [{**OTHER, "name": "a b"}]}, "1 to 128 letters"),
    ({"tools": [OTHER, OTHER]}, "2 tools called `other`"),
    ({"tool_choice": {"type": "tool"}}, "needs a `name`"),
    ({"tool_choice": {"type": "tool", "name": "x"}}, "`x`, which `tools` lacks"),
    ({"tool_choice": {"type": "all"}}, "tool_choice.type"),
    ({"tools": [], "tool_choice": {"type": "any"}}, "needs `tools`"),
    ({"thinking": {"type": "enabled"}}, "at least 1024, not None"),
    ({"thinking": {"type": "enabled", "budget_tokens": 1000}}, "at least 1024, not 1000"),
    ({"thinking": {"type": "frob"}}, "thinking.type"),
    ({"output_config": {"effort": "frob"}}, "output_config.effort"),
    ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
    ({"output_config": {"task_budget": {"total": 9}}}, "`task_budget` in `output_config` is not supported"),
    (turn("user", **USE), "must be in a message of the assistant"),
    (turn("user", type="thinking", thinking=""), "must be in a message of the assistant"),
    (turn("assistant", type="tool_result", tool_use_id="t"), "must be in a message of the user"),
    (turn("assistant", **USE), "whose tool_result is missing"),
    (turn("assistant", **{**USE, "input": "{}"}), "needs an object in `input`"),
    (turn("assistant", **{**USE, "name": ""}), "`name` of a tool_use block must have 1 to"),
    (turn("user", type="tool_result", tool_use_id="t", content=[{"type": "image"}]), "type 'image'"),
    (turn("user", type="tool_result", tool_use_id="t", content=[{"type": "tool_reference"}]), "string in `tool_name`"),
    (turn("user", type="tool_reference", tool_name="other"), "type 'tool_reference'"),
    (turn("user", type="redacted_thinking", data=""), "must be in a message of the assistant"),
]


async def test_mistakes_are_named(client, nodes):
    for fields, text in MISTAKES:
        for path in ("/v1/messages", "/v1/messages/count_tokens"):
            response = await client.post(path, json={**TOOLS, **fields})
            assert response.status_code == 400, fields
            assert text in error_of(response)["message"]
    budget = {"thinking": {"type": "enabled", "budget_tokens": 2000}}
    response = await client.post("/v1/messages", json={**TOOLS, **budget})
    assert "below `max_tokens`, 2000, not 2000" in error_of(response)["message"]
    assert not nodes.prefills


async def test_calls_that_the_model_decides_on_need_the_flags(nodes):
    router = Router(nodes)
    await router.start()
    await router.ready()
    nodes.script = says('[{"name": "other", "parameters": {}}]')
    async with httpx.AsyncClient(base_url=router.http, timeout=20) as client:
        response = await client.post("/v1/messages", json=TOOLS)
        assert "--enable-auto-tool-choice" in error_of(response)["message"]
        assert await stream(client, tool_choice={"type": "any"}) == ([BLOCKS[3]], "tool_use")
    await router.stop()
