"""OpenAI's client on the Responses API: whole, streamed, in JSON, one after another, and over a WebSocket."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pydantic
import pytest

MODEL = "baton-tiny"
ASKED: dict[str, Any] = {"model": MODEL, "input": "Once upon a time", "max_output_tokens": 16, "temperature": 0}


class Verdict(pydantic.BaseModel):
    ok: bool


@pytest.fixture
def client(api: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=api, api_key="none", max_retries=0) as client:
        yield client


def test_a_conversation_goes_on(client: openai.OpenAI) -> None:
    first = client.responses.create(**ASKED)
    assert first.output_text
    assert first.usage is not None
    second = client.responses.create(**ASKED, previous_response_id=first.id)
    assert second.usage is not None
    assert second.usage.input_tokens > first.usage.input_tokens + first.usage.output_tokens
    by_hand = [{"role": "user", "content": ASKED["input"]}, *first.output, {"role": "user", "content": ASKED["input"]}]
    assert client.responses.create(**{**ASKED, "input": by_hand}).output_text == second.output_text
    assert client.responses.retrieve(first.id).output_text == first.output_text
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)


def test_a_response_runs_in_the_background(client: openai.OpenAI) -> None:
    begun = client.responses.create(**ASKED, background=True)
    while (response := client.responses.retrieve(begun.id)).status in ("queued", "in_progress"):
        pass  # each look takes the router a moment
    assert response.output_text == client.responses.create(**ASKED).output_text
    long = client.responses.create(
        **{**ASKED, "max_output_tokens": 400, "extra_body": {"ignore_eos": True}}, background=True
    )
    assert client.responses.cancel(long.id).status == "cancelled"


def test_streams_and_sockets_say_the_same(client: openai.OpenAI) -> None:
    whole = client.responses.create(**ASKED).output_text
    with client.responses.stream(**ASKED) as stream:
        assert "".join(event.delta for event in stream if event.type == "response.output_text.delta") == whole
    with client.responses.connect() as connection:
        for _ in range(2):
            connection.response.create(**ASKED)
            text = ""
            for event in connection:
                if event.type == "response.output_text.delta":
                    text += event.delta
                if event.type in ("response.completed", "response.incomplete"):
                    break
            assert text == whole


def test_an_answer_matches_a_schema(client: openai.OpenAI) -> None:
    # Room for 64 blanks wherever some may be: a small model likes to write them.
    parsed = client.responses.parse(model=MODEL, input="Well?", text_format=Verdict, max_output_tokens=400)
    assert isinstance(parsed.output_parsed, Verdict)
