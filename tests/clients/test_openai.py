"""OpenAI's client: chats, streams, tools, parsed answers, completions."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from questions import (
    ANNA,
    API_KEY,
    FILL_PERSON,
    MODEL,
    SUM_ANSWER,
    SUM_QUESTION,
    WEATHER_ANSWER,
    WEATHER_QUESTION,
    WEATHER_RESULT,
    WEATHER_SCHEMA,
    Person,
)

WEATHER_TOOL: Any = {
    "type": "function",
    "function": {"name": "get_weather", "description": "Get the weather in a city.", "parameters": WEATHER_SCHEMA},
}
ASKS_WEATHER: list[Any] = [{"role": "user", "content": WEATHER_QUESTION}]
ASKS_SUM: list[Any] = [{"role": "user", "content": SUM_QUESTION}]


@pytest.fixture
def client(api: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=api, api_key=API_KEY, max_retries=0) as client:
        yield client


def test_a_chat_whole_and_streamed(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model=MODEL, messages=ASKS_SUM, temperature=0)
    assert whole.choices[0].message.content == SUM_ANSWER
    stream = client.chat.completions.create(model=MODEL, messages=ASKS_SUM, temperature=0, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == SUM_ANSWER


async def test_an_async_chat(api: str) -> None:
    async with openai.AsyncOpenAI(base_url=api, api_key=API_KEY, max_retries=0) as client:
        stream = await client.chat.completions.create(model=MODEL, messages=ASKS_SUM, temperature=0, stream=True)
        assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == SUM_ANSWER


@pytest.mark.parametrize("choice", ["auto", "required", {"type": "function", "function": {"name": "get_weather"}}])
def test_a_tool_is_called_and_its_result_used(client: openai.OpenAI, choice: Any) -> None:
    asked = client.chat.completions.create(
        model=MODEL, messages=ASKS_WEATHER, tools=[WEATHER_TOOL], tool_choice=choice, temperature=0
    )
    message = asked.choices[0].message
    assert message.tool_calls
    (call,) = message.tool_calls
    assert call.type == "function"
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": "Oslo"})
    told = [*ASKS_WEATHER, message, {"role": "tool", "tool_call_id": call.id, "content": WEATHER_RESULT}]
    answer = client.chat.completions.create(model=MODEL, messages=told, tools=[WEATHER_TOOL], temperature=0)
    assert answer.choices[0].message.content == WEATHER_ANSWER


def test_the_streaming_helper_gathers_calls(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(
        model=MODEL, messages=ASKS_WEATHER, tools=[WEATHER_TOOL], temperature=0
    ) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.tool_calls
    assert json.loads(final.choices[0].message.tool_calls[0].function.arguments) == {"city": "Oslo"}


def test_an_answer_is_parsed(client: openai.OpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": FILL_PERSON}]
    parsed = client.chat.completions.parse(model=MODEL, messages=messages, response_format=Person, temperature=0)
    assert parsed.choices[0].message.parsed == ANNA
    tool = openai.pydantic_function_tool(Person)
    called = client.chat.completions.parse(
        model=MODEL, messages=messages, tools=[tool], tool_choice="required", temperature=0
    )
    assert called.choices[0].message.tool_calls
    assert isinstance(called.choices[0].message.tool_calls[0].function.parsed_arguments, Person)


def test_completions(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"model": MODEL, "prompt": ["28 + 98 =", "17 + 25 ="], "max_tokens": 8, "temperature": 0}
    assert [choice.text for choice in client.completions.create(**fields).choices] == [" 126", " 42"]
    echoed = client.completions.create(**{**fields, "prompt": "28 + 98 =", "echo": True, "logprobs": 1}).choices[0]
    assert echoed.text == "28 + 98 = 126"
    assert echoed.logprobs
    assert echoed.logprobs.token_logprobs
    assert echoed.logprobs.token_logprobs[0] is None


def test_responses_with_a_tool(client: openai.OpenAI) -> None:
    tool: Any = {"type": "function", "name": "get_weather", "parameters": WEATHER_SCHEMA, "strict": False}
    first = client.responses.create(model=MODEL, input=WEATHER_QUESTION, tools=[tool], temperature=0)
    (call,) = [item for item in first.output if item.type == "function_call"]
    assert (call.name, json.loads(call.arguments)) == ("get_weather", {"city": "Oslo"})
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": WEATHER_RESULT}
    second = client.responses.create(
        model=MODEL, input=[result], previous_response_id=first.id, tools=[tool], temperature=0
    )
    assert second.output_text == WEATHER_ANSWER


def test_mistakes_are_its_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.chat.completions.create(model=MODEL, messages=ASKS_SUM, temperature=-1)
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="another", messages=ASKS_SUM)
