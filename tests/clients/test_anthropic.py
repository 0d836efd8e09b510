"""Anthropic's client: messages, streams, tools, counting."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from questions import (
    API_KEY,
    MODEL,
    SUM_ANSWER,
    SUM_QUESTION,
    WEATHER_ANSWER,
    WEATHER_QUESTION,
    WEATHER_RESULT,
    WEATHER_SCHEMA,
)

TOOL: Any = {"name": "get_weather", "description": "Get the weather in a city.", "input_schema": WEATHER_SCHEMA}
GREEDY: dict[str, Any] = {"model": MODEL, "max_tokens": 200, "extra_body": {"temperature": 0}}


@pytest.fixture
def client(url: str) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=url, api_key=API_KEY, max_retries=0) as client:
        yield client


def test_a_message_whole_and_streamed(client: anthropic.Anthropic) -> None:
    messages: list[Any] = [{"role": "user", "content": SUM_QUESTION}]
    whole = client.messages.create(**GREEDY, messages=messages)
    assert [block.text for block in whole.content if block.type == "text"] == [SUM_ANSWER]
    with client.messages.stream(**GREEDY, messages=messages) as stream:
        assert "".join(stream.text_stream) == SUM_ANSWER
    assert client.messages.count_tokens(model=MODEL, messages=messages).input_tokens == whole.usage.input_tokens


@pytest.mark.parametrize("streamed", [False, True])
def test_a_tool_is_called_and_its_result_used(client: anthropic.Anthropic, streamed: bool) -> None:
    messages: list[Any] = [{"role": "user", "content": WEATHER_QUESTION}]
    asked: dict[str, Any] = {**GREEDY, "tools": [TOOL]}
    if streamed:
        with client.messages.stream(**asked, messages=messages) as stream:
            first = stream.get_final_message()
    else:
        first = client.messages.create(**asked, messages=messages)
    assert first.stop_reason == "tool_use"
    (use,) = [block for block in first.content if block.type == "tool_use"]
    assert (use.name, use.input) == ("get_weather", {"city": "Oslo"})
    result = {"type": "tool_result", "tool_use_id": use.id, "content": WEATHER_RESULT}
    messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    second = client.messages.create(**asked, messages=messages)
    assert [block.text for block in second.content if block.type == "text"] == [WEATHER_ANSWER]


def test_models_are_listed(client: anthropic.Anthropic) -> None:
    (model,) = client.models.list()
    assert (model.id, model.display_name, client.models.retrieve(MODEL)) == (MODEL, MODEL, model)


def test_thinking_is_asked_for_as_claude_code_does(client: anthropic.Anthropic) -> None:
    message = client.beta.messages.create(
        **{**GREEDY, "max_tokens": 2000},
        messages=[{"role": "user", "content": SUM_QUESTION}],
        thinking={"type": "enabled", "budget_tokens": 1024},
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    )
    assert [block.text for block in message.content if block.type == "text"] == [SUM_ANSWER]


def test_mistakes_are_its_errors(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
        client.messages.create(model=MODEL, max_tokens=0, messages=[{"role": "user", "content": "Hi"}])
