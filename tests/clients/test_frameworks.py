"""instructor, pydantic-ai and litellm."""

from __future__ import annotations

import json
from typing import Any

import instructor
import litellm
import openai
import pytest
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from questions import (
    ANNA,
    API_KEY,
    FILL_PERSON,
    MODEL,
    PERSON_TEXT,
    SUM_ANSWER,
    SUM_QUESTION,
    WEATHER_ANSWER,
    WEATHER_QUESTION,
    WEATHER_SCHEMA,
    Person,
    get_weather,
)


@pytest.mark.parametrize("mode", [instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT])
def test_instructor(api: str, mode: instructor.Mode) -> None:
    client: Any = instructor.from_openai(openai.OpenAI(base_url=api, api_key=API_KEY, max_retries=0), mode=mode)
    messages = [{"role": "user", "content": PERSON_TEXT}]
    person = client.chat.completions.create(
        model=MODEL, messages=messages, response_model=Person, temperature=0, max_retries=0
    )
    assert person.model_dump() == ANNA.model_dump()


@pytest.fixture
def model(api: str) -> OpenAIChatModel:
    return OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=api, api_key=API_KEY))


async def test_pydantic_ai_calls_tools(model: OpenAIChatModel) -> None:
    agent: Any = Agent(model, tools=[get_weather], model_settings={"temperature": 0.0})
    assert (await agent.run(WEATHER_QUESTION)).output == WEATHER_ANSWER


async def test_pydantic_ai_makes_objects(model: OpenAIChatModel) -> None:
    agent: Any = Agent(model, output_type=Person, model_settings={"temperature": 0.0})
    assert (await agent.run(PERSON_TEXT)).output == ANNA


def test_litellm(api: str) -> None:
    asked: dict[str, Any] = {"model": f"openai/{MODEL}", "api_base": api, "api_key": API_KEY, "temperature": 0}
    answer: Any = litellm.completion(**asked, messages=[{"role": "user", "content": SUM_QUESTION}])
    assert answer.choices[0].message.content == SUM_ANSWER
    tool = {"type": "function", "function": {"name": "get_weather", "parameters": WEATHER_SCHEMA}}
    called: Any = litellm.completion(
        **asked, messages=[{"role": "user", "content": WEATHER_QUESTION}], tools=[tool], tool_choice="auto"
    )
    assert json.loads(called.choices[0].message.tool_calls[0].function.arguments) == {"city": "Oslo"}
    filled: Any = litellm.completion(
        **asked, messages=[{"role": "user", "content": FILL_PERSON}], response_format=Person
    )
    assert Person.model_validate_json(filled.choices[0].message.content) == ANNA
