"""A chat's tools and calls as they are read: what is refused, what they count as, and calls that broke off."""

import json
from typing import Any

import pytest

from baton.errors import InvalidRequest
from router.http.anthropic.tools import CustomTool
from router.http.body import validate
from router.http.responses_api.tools import FunctionTool
from router.http.schemas import ChatRequest, size_of_prompt
from router.http.tools import call_plan, plain_tools
from router.text.answer_reader import Parsers
from router.text.call_plan import CallMode
from tests.router.http_shapes import CHAT, allowed


def tool(name: str, parameters: dict | None = None, description: str = "") -> dict:
    return {"type": "function", "function": {"name": name, "parameters": parameters, "description": description}}


def nested(depth: int) -> dict:
    return {"a": nested(depth - 1)} if depth else {}


def called(arguments: str) -> dict:
    return {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}


def read(**fields: Any) -> ChatRequest:
    body = validate(json.dumps({**CHAT, **fields}).encode(), ChatRequest)
    body.check()
    for message in body.messages:
        message.plain()
    return body


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"tools": [{"type": "function"}]}, "tools", "tools.0.function.function: Field required"),
        ({"tools": [{"type": "x", "function": {}}]}, "tools", "'function'"),
        ({"tools": [tool("a b")]}, "tools", "not 'a b'"),
        ({"tools": [tool("a\n")]}, "tools", "1 to 128 letters"),
        ({"tools": [tool("a" * 129)]}, "tools", "1 to 128 letters"),
        ({"tools": [tool("f"), tool("g"), tool("f")]}, "tools", "2 tools called `f`"),
        ({"tools": [tool("f", nested(33))]}, "tools", "nested at most 31 deep"),
        ({"tools": [tool("f", {"a": [0] * 20_000})]}, "tools", "16384 names and values"),
        ({"tools": [tool(name, description="x" * 200_000) for name in "fg"]}, "tools", "of at most 262144"),
        ({"tools": [tool(f"f{i}") for i in range(129)]}, "tools", "at most 128"),
        ({"tool_choice": "any"}, "tool_choice", "'none', 'auto', 'required' or a tool, not 'any'"),
        ({"tool_choice": "required"}, "tool_choice", "'required' needs `tools`"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice", "'required' needs `tools`"),
        ({"tools": [tool("f")], "tool_choice": tool("g")}, "tool_choice", "names `g`, which `tools` lacks"),
        ({"tool_choice": tool("f")}, "tool_choice", "names `f`, which `tools` lacks"),
        ({"tools": [tool("f")], "tool_choice": {"type": "function", "name": "f"}}, "tool_choice", "must be {"),
        ({"tools": [tool("f")], "tool_choice": {**tool("f"), "type": "custom"}}, "tool_choice", "must be {"),
        ({"tools": [tool("f")], "tool_choice": allowed("auto", tool("g"))}, "tool_choice", "names `g`, which"),
        ({"tools": [tool("f")], "tool_choice": allowed("none", tool("f"))}, "tool_choice", '"auto" or "required"'),
        ({"tools": [tool("f")], "tool_choice": allowed("auto", "f")}, "tool_choice", "must be {"),
        ({"tools": [tool("f")], "tool_choice": {"type": "allowed_tools"}}, "tool_choice", "must be {"),
        ({"tools": [tool("f")], "tool_choice": allowed("required")}, "tool_choice", "one or more"),
        ({"messages": [{"role": "function", "content": ""}]}, "messages", "the role `tool`"),
        ({"messages": [{"role": "assistant", "function_call": {"name": "f"}}]}, "messages", "`function_call`"),
    ],
)
def test_mistakes_are_named(fields, param, says):
    with pytest.raises(InvalidRequest) as refusal:
        read(**fields)
    assert refusal.value.param == param
    assert says in refusal.value.message


def test_a_tool_and_its_choice_are_functions_unless_they_say_otherwise():
    plain = {"function": {"name": "f"}}
    body = read(tools=[plain, tool("g")], tool_choice=plain).with_allowed_tools(Parsers())
    assert [shown["type"] for shown in plain_tools(body.tools) or []] == ["function", "function"]
    plan = call_plan(Parsers(), body.tools, body.tool_choice, parallel_tool_calls=True)
    assert (plan.mode, list(plan.tools or [])) == (CallMode.ONE, ["f"])


def test_of_two_names_for_the_reasoning_of_a_message_vllms_comes_first():
    both = {"role": "assistant", "content": "4", "reasoning": "2 + 2", "reasoning_content": "older"}
    plain = read(messages=[both]).messages[0].plain()
    assert (plain["reasoning"], plain["reasoning_content"]) == ("2 + 2", "2 + 2")


def test_names_of_tools_are_as_long_as_anthropic_and_the_responses_api_have_them():
    name = "mcp__" + "a" * 123
    tools = read(tools=[tool(name)]).tools
    assert tools is not None
    assert tools[0].function.name == name
    assert CustomTool(name=name, input_schema={}).in_chat().function.name == name
    assert FunctionTool(type="function", name=name).of_chat().function.name == name


def test_tools_and_calls_count_as_text_of_the_prompt():
    alone = size_of_prompt(read())
    assert size_of_prompt(read(tools=[tool("f", description="x" * 5000)])) >= alone + 5000
    assert size_of_prompt(read(tools=[tool("f", {"a": ["x" * 2000]})])) >= alone + 2000
    assert size_of_prompt(read(messages=[called(json.dumps({"a": "x" * 3000}))])) >= 3000
    assert size_of_prompt(read(messages=[{"role": "assistant", "reasoning": "x" * 100}])) >= 100


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ('{"a": "b', {"a": "b"}),
        ('{"a": 1, ', {"a": 1}),
        (" {", {}),
        (" ", {}),
        ('{"a": truth', {}),
        ('{"a": 1, b: 2}', {}),
        ("a", {}),
        ("[1]", {}),
        ("null", {}),
        (json.dumps('{"a": "b'), {"a": "b"}),  # as Vercel's AI SDK sends it
        (json.dumps("a"), {}),
        ("[" * 200_000, {}),
    ],
)
def test_a_chat_goes_on_after_a_call_whose_arguments_are_no_object(text, arguments):
    [call] = read(messages=[called(text)]).messages[0].plain()["tool_calls"]
    assert call["function"]["arguments"] == arguments


THOUGHT = {"type": "thinking", "thinking": "a"}
TEXT = {"type": "text", "text": "c"}


@pytest.mark.parametrize(
    ("content", "beside", "text", "thought"),
    [
        ([THOUGHT, {"type": "redacted_thinking", "data": "x"}, {**THOUGHT, "thinking": "b"}, TEXT], {}, "c", "a\nb"),
        ([THOUGHT], {"reasoning_content": "r"}, "", "r"),
        ([THOUGHT, TEXT], {"reasoning": "r"}, "c", "r"),
        ([{"type": "redacted_thinking", "data": "x"}, TEXT], {}, "c", None),
    ],
)
def test_thoughts_may_be_parts_of_a_content(content, beside, text, thought):
    """As some versions of LiteLLM send them to vLLM."""
    message = read(messages=[{"role": "assistant", "content": content, **beside}]).messages[0].plain()
    assert (message["content"], message.get("reasoning"), message.get("reasoning_content")) == (text, thought, thought)


@pytest.mark.parametrize(
    ("message", "says"),
    [
        ({"role": "assistant", "content": [{"type": "thinking", "thinking": 3}]}, "a string in `thinking`"),
        ({"role": "user", "content": [THOUGHT]}, "a part of type 'thinking' is not supported"),
        ({"role": "assistant", "content": [THOUGHT, 3]}, "a part of type unknown is not supported"),
    ],
)
def test_other_thoughts_are_refused(message, says):
    with pytest.raises(InvalidRequest, match=says):
        read(messages=[message])
