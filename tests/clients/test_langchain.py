"""LangChain and LangGraph: bound tools, structured output in three ways, an agent."""

from __future__ import annotations

from typing import Any

import pytest
from langchain.agents import create_agent
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from questions import (
    ANNA,
    API_KEY,
    FILL_PERSON,
    MODEL,
    SUM_ANSWER,
    SUM_QUESTION,
    WEATHER_ANSWER,
    WEATHER_QUESTION,
    Person,
    get_weather,
)

weather = tool(get_weather)


@pytest.fixture
def chat(api: str) -> ChatOpenAI:
    return ChatOpenAI(model=MODEL, base_url=api, api_key=API_KEY, temperature=0, max_retries=0)


def test_a_chat_whole_and_streamed(chat: ChatOpenAI) -> None:
    assert chat.invoke(SUM_QUESTION).content == SUM_ANSWER
    assert "".join(str(chunk.content) for chunk in chat.stream(SUM_QUESTION)) == SUM_ANSWER


def test_bound_tools_are_called(chat: ChatOpenAI) -> None:
    message: Any = chat.bind_tools([weather]).invoke(WEATHER_QUESTION)
    assert [(call["name"], call["args"]) for call in message.tool_calls] == [("get_weather", {"city": "Oslo"})]


@pytest.mark.parametrize("method", ["function_calling", "json_mode", "json_schema"])
def test_structured_output(chat: ChatOpenAI, method: Any) -> None:
    assert chat.with_structured_output(Person, method=method).invoke(FILL_PERSON) == ANNA


def test_an_agent_calls_a_tool_and_answers(chat: ChatOpenAI) -> None:
    agent: Any = create_agent(chat, tools=[weather])
    messages = agent.invoke({"messages": [{"role": "user", "content": WEATHER_QUESTION}]})["messages"]
    assert [message.type for message in messages] == ["human", "ai", "tool", "ai"]
    assert messages[-1].content == WEATHER_ANSWER
