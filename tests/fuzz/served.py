"""A router with scripted nodes, for tests that send it anything; and what must hold whatever was sent."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import httpx
import pytest

from baton.node_info import NodeRole
from tests.router.conftest import Router, says
from tests.router.fake_node import FakeCluster
from tests.router.http_shapes import CHAT

SHARES = pytest.mark.parametrize("share", [2, pytest.param(1, marks=pytest.mark.full)])
"""CI sends half of a test's cases, `-m full` all."""
CASE_S = 20.0
"""What one case may take on a busy machine; one that hangs takes for ever."""

AT_ONCE = 16

CHAT_BODY = {
    **CHAT,
    "max_tokens": 8,
    "temperature": 0.5,
    "top_p": 0.9,
    "n": 1,
    "stop": ["x"],
    "seed": 1,
    "logit_bias": {"7": 1.0},
    "logprobs": True,
    "top_logprobs": 1,
    "stream": False,
    "tools": [
        {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}},
        {
            "type": "custom",
            "custom": {
                "name": "c",
                "format": {"type": "grammar", "grammar": {"syntax": "lark", "definition": 'start: "a" | /b+/'}},
            },
        },
    ],
    "tool_choice": "none",
    "parallel_tool_calls": False,
    "documents": [{"title": "a", "text": "b"}],
    "reasoning_effort": "low",
    "continue_final_message": True,
    "add_generation_prompt": False,
    "echo": True,
}
COMPLETION_BODY = {
    "model": "tiny",
    "prompt": ["hi", [5, 7]],
    "max_tokens": 8,
    "n": 2,
    "echo": True,
    "stop": "x",
    "stop_token_ids": [3],
    "allowed_token_ids": [5, 7],
    "bad_words": ["x"],
    "logprobs": 1,
    "min_tokens": 1,
    "timeout": 5.0,
    "stream": True,
    "stream_options": {"include_usage": True},
    "cache_salt": "a",
    "priority": -1,
    "logits_processors": ["forced", {"qualname": "forced", "args": [[5, 7]], "kwargs": {"logit": 1.0}}],
}
MESSAGE_BODY = {
    "model": "tiny",
    "max_tokens": 8,
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}]},
        {"role": "assistant", "content": "there"},
    ],
    "system": "Be terse.",
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 7,
    "stop_sequences": ["x"],
    "metadata": {"user_id": "a"},
    "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": {"type": "object"}}},
    "stream": True,
}
RESPONSE_BODY = {
    "model": "tiny",
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "custom_tool_call", "call_id": "d", "name": "c", "input": "a"},
        {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "x"}]},
    ],
    "instructions": "x",
    "max_output_tokens": 8,
    "text": {"format": {"type": "text"}},
    "tools": [
        {"type": "function", "name": "f", "parameters": {"type": "object"}},
        {
            "type": "namespace",
            "name": "n",
            "tools": [
                {"type": "function", "name": "f"},
                {"type": "custom", "name": "c", "format": {"type": "grammar", "syntax": "regex", "definition": "a+"}},
            ],
        },
    ],
    "tool_choice": "none",
    "include": ["message.output_text.logprobs"],
    "top_logprobs": 1,
    "reasoning": {"effort": "low"},
    "store": True,
    "background": False,
    "stream": False,
    "metadata": {"a": "b"},
}
TOKENS_BODY = {
    "model": "tiny",
    "token_ids": [5, 6, 7],
    "sampling_params": {
        **{name: COMPLETION_BODY[name] for name in ("max_tokens", "n", "stop", "stop_token_ids", "bad_words")},
        **{
            name: COMPLETION_BODY[name] for name in ("allowed_token_ids", "logits_processors", "logprobs", "min_tokens")
        },
        "temperature": 0.5,
        "logit_bias": {"7": 1.0},
        "prompt_logprobs": 1,
        "detokenize": False,
    },
    "request_id": "a",
    **{name: COMPLETION_BODY[name] for name in ("cache_salt", "priority", "stream", "stream_options", "timeout")},
}
SGLANG_BODY = {
    "input_ids": [[5, 6, 7], [8]],
    "rid": ["a", "b"],
    "sampling_params": {
        **{name: COMPLETION_BODY[name] for name in ("n", "stop", "stop_token_ids")},
        "max_new_tokens": 8,
        "min_new_tokens": 1,
        "sampling_seed": 1,
        "temperature": 0.5,
        "logit_bias": {"7": 1.0},
        "regex": "a+",
        "no_stop_trim": True,
        "custom_params": {},
    },
    "return_logprob": True,
    "logprob_start_len": [0, -1],
    "top_logprobs_num": 1,
    "return_text_in_logprobs": True,
    "return_prompt_token_ids": True,
    "lora_path": "",
    **{name: COMPLETION_BODY[name] for name in ("cache_salt", "priority", "stream", "stream_options", "timeout")},
}
BODIES = {
    "/v1/chat/completions": CHAT_BODY,
    "/v1/completions": COMPLETION_BODY,
    "/inference/v1/generate": TOKENS_BODY,
    "/generate": SGLANG_BODY,
    "/v1/chat/completions/render": CHAT_BODY,
    "/v1/completions/render": COMPLETION_BODY,
    "/v1/messages": MESSAGE_BODY,
    "/v1/messages/count_tokens": {name: MESSAGE_BODY[name] for name in ("model", "messages", "system")},
    "/v1/responses": RESPONSE_BODY,
    "/v1/responses/input_tokens": {name: RESPONSE_BODY[name] for name in ("model", "input", "instructions", "tools")},
    "/tokenize": {"model": "tiny", "prompt": "hi there", "add_special_tokens": True, "return_token_strs": True},
    "/detokenize": {"model": "tiny", "tokens": [5, 6, 7, 8]},
}


@asynccontextmanager
async def serving(text: str = "hello world", **settings: object) -> AsyncIterator[Router]:
    """Ready, with one prefill and one decode node that answer with `text`."""
    nodes = FakeCluster(says(text))
    await nodes.add(NodeRole.PREFILL)
    await nodes.add(NodeRole.DECODE)
    router = Router(nodes, **settings)
    try:
        await router.start()
        try:
            await router.ready()
            yield router
        finally:
            await router.stop()
    finally:
        await nodes.close()


async def answers_as_ever(client: httpx.AsyncClient) -> None:
    """A usual request gets its usual answer, and nobody has lost a node."""
    answer = await client.post("/v1/chat/completions", json={**CHAT, "max_tokens": 50})
    assert answer.status_code == 200, answer.text
    assert json.loads(answer.text)["choices"][0]["message"]["content"] == "hello world"
    assert (await client.get("/ready")).status_code == 200


def no_mistakes(caplog: pytest.LogCaptureFixture) -> None:
    """Nothing was logged as internal error."""
    wrong = [record for record in caplog.records if record.levelno >= logging.ERROR and not _of_another_loop(record)]
    assert not wrong, "\n".join(f"{record.name}: {record.getMessage()} {record.exc_text or ''}" for record in wrong[:3])


def _of_another_loop(record: logging.LogRecord) -> bool:
    """grpc.aio has one poller for all event loops of a process: it may still have news for that of an earlier test."""
    error = record.exc_info[1] if record.exc_info else None
    return "PollerCompletionQueue" in record.getMessage() and str(error) == "Event loop is closed"


async def some_at_once(one: Callable[[int], Awaitable[None]], count: int) -> None:
    """`one` for each number below `count`, AT_ONCE of them at a time."""
    numbers = iter(range(count))

    async def attempt_id() -> None:
        for number in numbers:
            await one(number)

    async with asyncio.TaskGroup() as group:
        for _ in range(AT_ONCE):
            group.create_task(attempt_id())
