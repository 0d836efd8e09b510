"""Chats with tools, and a cluster whose answers have reasoning, content and calls."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest_asyncio

from baton.node_info import NodeRole
from tests.router.conftest import Shared, says, shared_by_all
from tests.router.fake_node import FakeCluster
from tests.router.http_shapes import CHAT
from tests.router.tiny_tokenizer import tiny_tokenizer

TEMPLATE = """{{- tools | tojson if tools else 'no tools' }}
{%- for message in messages %}
{{- '|' ~ message | tojson }}
{%- endfor %}
{{- '<think>\\n' if thinking else '' }}"""
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Says how the weather is.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        "strict": True,
    },
}
TOOLS: dict[str, Any] = {**CHAT, "tools": [WEATHER]}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln 🙂"}}\n</tool_call>'
CHATS = "/v1/chat/completions"
ARGUMENTS = '{"city": "Köln 🙂"}'
PARSERS: dict[str, Any] = {
    "tool_call_parser": "hermes",
    "enable_auto_tool_choice": True,
    "reasoning_parser": "qwen3",
}
"""Flags of a router that reads such answers."""
ANSWER = f"<think>\nThe weather.\n</think>\n\nI will look.\n{CALL}\n{CALL}"


@contextlib.asynccontextmanager
async def nodes_with_tools(answer: str) -> AsyncIterator[FakeCluster]:
    """A node of each role, which answer like that, with `TEMPLATE`."""
    cluster = FakeCluster(says(answer))
    try:
        for role in NodeRole:
            await cluster.add(role, chat_template=TEMPLATE, max_model_len=4096)
        yield cluster
    finally:
        await cluster.close()


def shared_with_tools(answer: str) -> Any:
    """The fixture `shared` of a module, with these nodes behind a router that has parsers."""

    @pytest_asyncio.fixture(scope="module", loop_scope="module")
    async def shared() -> AsyncIterator[Shared]:
        async with nodes_with_tools(answer) as nodes, shared_by_all(nodes, **PARSERS) as shared:
            yield shared

    return shared


def official_client() -> Any:
    """The fixture `official` of such a module: OpenAI's own client of the router."""

    @pytest_asyncio.fixture(loop_scope="module")
    async def official(shared: Shared) -> AsyncIterator[openai.AsyncOpenAI]:
        async with openai.AsyncOpenAI(base_url=f"{shared.router.http}/v1", api_key="none", max_retries=0) as client:
            yield client

    return official


def prompt_of(nodes: FakeCluster) -> str:
    return tiny_tokenizer().decode(nodes.prefills[-1].prompt_tokens, skip_special_tokens=False)


async def choice_of(client: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    response = await client.post("/v1/chat/completions", json={**TOOLS, **fields})
    assert response.status_code == 200, response.text
    choice: dict[str, Any] = response.json()["choices"][0]
    return choice


def chunks_of(text: str) -> list[dict[str, Any]]:
    events = [event.removeprefix("data: ") for event in text.split("\n\n") if event and not event.startswith(":")]
    assert events[-1] == "[DONE]"
    return [json.loads(event) for event in events[:-1]]
