"""Requests that use each parameter, and their answers in a form that does not depend on how they came."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.e2e.cluster import PATIENCE_S, Router

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PROMPT = "Quantum ? 17 zebra, and ["
"""Unlike what the model has learnt: then many tokens are likely, and parameters make a difference."""
MESSAGES = [{"role": "user", "content": "Tell me a story about a dog."}]
BASE: dict[str, Any] = {"max_tokens": 28, "temperature": 1.5, "seed": 7, "ignore_eos": True, "return_token_ids": True}
"""What all requests have that do not say otherwise."""

Fields = dict[str, Any]
TOOL = {
    "type": "function",
    "function": {
        "name": "note",
        "parameters": {
            "type": "object",
            "properties": {"text": {"type": "string", "maxLength": 80}},
            "required": ["text"],
        },
    },
}
TEMPLATE = (
    "{{ style }} {{ reasoning_effort }} {% for d in documents or [] %}{{ d.title }}: {{ d.text }}{% endfor %}"
    "{% for m in messages %}{{ m.role }}? {{ m.content }} ({% endfor %}"
)
"""Of a request's own, which the routers of these tests allow."""
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 60}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}


def _completions(*cases: Fields) -> list[tuple[str, Fields]]:
    return [(COMPLETIONS, case) for case in cases]


def _chat(*cases: Fields) -> list[tuple[str, Fields]]:
    return [(CHAT, case) for case in cases]


PARAMETERS: dict[str, list[tuple[str, Fields]]] = {
    "temperature": _completions({"temperature": 0.7}, {"temperature": 0.0}, {"temperature": 2.5}),
    "top_p": _completions({"top_p": 0.5}, {"top_p": 0.95}),
    "top_k": _completions({"top_k": 2}, {"top_k": 40}),
    "min_p": _completions({"min_p": 0.2}),
    "presence_penalty": _completions(
        {"presence_penalty": 2.0, "temperature": 2.0}, {"presence_penalty": -1.0, "temperature": 0}
    ),
    "frequency_penalty": _completions(
        {"frequency_penalty": 2.0, "temperature": 2.0}, {"frequency_penalty": 0.7, "temperature": 0}
    ),
    "repetition_penalty": _completions({"repetition_penalty": 2.0}, {"repetition_penalty": 1.1, "temperature": 0}),
    "logit_bias": _completions({"logit_bias": {"200": 4.5, "263": -100}}),
    "seed": _completions({"seed": 1}, {"seed": 2**63 - 1}, {"seed": -5}),
    "stop": _completions({"stop": ["zebra", " the"]}, {"stop": ". "}),
    "stop_token_ids": _completions({"stop_token_ids": [1576, 300, 16, 18]}, {"stop_token_ids": [1576]}),
    "include_stop_str_in_output": _completions({"stop": ["friend", "."], "include_stop_str_in_output": True}),
    "ignore_eos": _completions({"ignore_eos": False, "max_tokens": 200}),
    "max_tokens": _completions({"max_tokens": 1}, {"max_tokens": 2}, {"max_tokens": 120}),
    "min_tokens": _completions({"ignore_eos": False, "min_tokens": 100, "max_tokens": 120}),
    "bad_words": _completions({"bad_words": ["dog", "the", "was"]}),
    "allowed_token_ids": _completions({"allowed_token_ids": list(range(100, 1000, 3))}),
    "logprobs": _completions({"logprobs": 0}, {"logprobs": 5, "presence_penalty": 1.0}),
    "logprob_token_ids": _completions({"logprob_token_ids": [300, 16, 18], "logprobs": 0}),
    "top_logprobs": _chat({"logprobs": True, "top_logprobs": 4}),
    "skip_special_tokens": _completions({"skip_special_tokens": False, "logit_bias": {"4": 16, "2": 16}}),
    "spaces_between_special_tokens": _completions(
        {"spaces_between_special_tokens": False, "skip_special_tokens": False, "logit_bias": {"4": 16, "2": 16}}
    ),
    "truncate_prompt_tokens": _completions({"truncate_prompt_tokens": 5}),
    "return_tokens_as_token_ids": _completions({"return_tokens_as_token_ids": True, "logprobs": 1}),
    "cache_salt": _completions({"cache_salt": "a"}),
    "request_id": _completions({}),
    "prompt_logprobs": _completions({"prompt_logprobs": 2}, {"prompt_logprobs": 0, "logprobs": 1}),
    "echo": _completions({"echo": True, "logprobs": 1}),
    "priority": _completions({"priority": -3}),
    "use_beam_search": _completions(
        {"use_beam_search": True, "best_of": 4, "n": 1, "temperature": 0, "max_tokens": 12},
        {"use_beam_search": True, "best_of": 3, "n": 1, "temperature": 0, "max_tokens": 30, "ignore_eos": False},
    ),
    "length_penalty": _completions(
        {"use_beam_search": True, "best_of": 3, "n": 1, "temperature": 0, "length_penalty": 2.0, "ignore_eos": False}
    ),
    "logits_processors": _completions(
        {"logits_processors": ["after_prompt"]},
        {"logits_processors": [{"qualname": "forced", "kwargs": {"token_ids": [300, 16, 18]}}], "logprobs": 1},
    ),
    "chat_template": _chat({"chat_template": TEMPLATE}),
    "chat_template_kwargs": _chat({"chat_template": TEMPLATE, "chat_template_kwargs": {"style": "short ["}}),
    "documents": _chat({"chat_template": TEMPLATE, "documents": [{"title": "Zoo", "text": "A zebra, and 17"}]}),
    "reasoning_effort": _chat({"chat_template": TEMPLATE, "reasoning_effort": "high"}),
    "continue_final_message": _chat({"continue_final_message": True, "add_generation_prompt": False}),
    "tools": _chat({"tools": [TOOL], "tool_choice": "required"}),
    "tool_choice": _chat({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "note"}}}),
    "response_format": _chat(
        {"response_format": {"type": "json_object"}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}},
    ),
    "structured_outputs": _completions(
        {"structured_outputs": {"json": PERSON}},
        {"structured_outputs": {"regex": "([0-9]{3}-){40}"}},
        {"structured_outputs": {"choice": ["a long choice of many words and tokens", "and another one that is long"]}},
        {"structured_outputs": {"grammar": 'start: "(" start ")" | "x" start | "y"'}},
    ),
}
"""For each parameter, routes and fields. The first of several cases runs in CI; all run with `-m full`."""

_WHOLE = ("finish_reason", "stop_reason", "tool_calls")
"""What a chunk says once, or is put together otherwise than by appending."""
SEARCHES = {"use_beam_search", "length_penalty"}
"""Nothing comes before these end, and n are the best answers of one search."""
CHANGE_NOTHING = {"cache_salt", "request_id", "max_tokens", "priority"}
"""These leave tokens as they are, or cut them off."""


def body_of(path: str, fields: Fields, number: int = 0) -> Fields:
    """A whole request; `number` varies prompt and seed."""
    prompt: Fields = {"prompt": f"{PROMPT} number {number}" if number else PROMPT}
    if path == CHAT:
        prompt = {"messages": MESSAGES if not number else [{"role": "user", "content": f"Tell story {number}."}]}
    seed = fields.get("seed", BASE["seed"]) + 100 * number
    return {**prompt, **BASE, **fields, "seed": seed % 2**63}


Case = tuple[str, Fields]
FULL_NUMBERS = range(5)
"""Of the prompts that each case has with `-m full`."""


def client_of(router: Router) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=router.url, trust_env=False, verify=False, timeout=PATIENCE_S)


@asynccontextmanager
async def clients_of(*routers: Router) -> AsyncIterator[list[httpx.AsyncClient]]:
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(client_of(router)) for router in routers]


async def pieces(http: httpx.AsyncClient, path: str, body: Fields) -> list[Fields] | str:
    """The events of an answer, or the whole as the only one; or why there is none."""
    answer = (await http.post(path, json=body)).text
    lines = [line.removeprefix("data: ") for line in answer.split("\n") if line.startswith("data: {")] or [answer]
    found: list[Fields] = list(map(json.loads, lines))
    error = next((piece["error"] for piece in found if piece.get("error")), None)
    return str(error["message"]) if error else found


def cases_of(name: str, numbers: Iterable[int], every: bool) -> list[Case]:
    cases = PARAMETERS[name] if every else PARAMETERS[name][:1]
    return [(path, body_of(path, fields, number)) for path, fields in cases for number in numbers]


@dataclass
class Choice:
    """One answer: `said` has what clients see of it, lists and texts joined if it came in pieces."""

    said: Fields = field(default_factory=dict)

    def add(self, piece: Mapping[str, Any]) -> None:
        """A choice of a whole answer, or of one chunk."""
        content = piece.get("message") or piece.get("delta") or {}
        logprobs = {f"logprobs.{name}": value for name, value in (piece.get("logprobs") or {}).items()}
        flat = {**piece, **content, **logprobs}
        for name in ("message", "delta", "logprobs", "role", "refusal", "index", "prompt_token_ids"):
            flat.pop(name, None)
        for name, value in flat.items():
            if value is None:
                continue
            if name == "tool_calls":
                value = self._with_calls(value)
            joins = isinstance(value, str | list) and name not in _WHOLE
            self.said[name] = self.said[name] + value if joins and name in self.said else value

    def _with_calls(self, calls: list[Fields]) -> list[Fields]:
        """All calls so far; their ids are drawn anew each time."""
        known = [dict(call) for call in self.said.get("tool_calls", ())]
        for i, call in enumerate(calls):
            at = call.get("index", i)
            if at == len(known):
                known.append({"name": "", "arguments": ""})
            for part in ("name", "arguments"):
                known[at][part] += call["function"].get(part) or ""
        return known

    @property
    def num_tokens(self) -> int:
        return len(self.said.get("token_ids", ()))


def difference(one: Any, other: Any, where: str = "") -> str | None:
    """Where they differ first; None: nowhere, but for the last digits of logprobs, which depend on what else is in a
    batch."""
    if isinstance(one, float) and isinstance(other, float):
        equal = math.isclose(one, other, rel_tol=1e-4, abs_tol=2e-4)
    elif isinstance(one, Mapping) and isinstance(other, Mapping):
        parts = ((name, one.get(name), other.get(name)) for name in sorted(one.keys() | other.keys()))
        return next(filter(None, (difference(a, b, f"{where}.{name}") for name, a, b in parts)), None)
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        parts = ((str(i), a, b) for i, (a, b) in enumerate(zip(one, other, strict=True)))
        return next(filter(None, (difference(a, b, f"{where}[{i}]") for i, a, b in parts)), None)
    else:
        equal = bool(one == other)
    return None if equal else f"{where}: {one!r} and {other!r}"


class Stream:
    """A streamed request under way."""

    def __init__(self, http: httpx.AsyncClient, path: str, body: Fields) -> None:
        self.choices: dict[int, Choice] = {}
        self.timings: Fields = {}
        self._progress = asyncio.Condition()
        self._task = asyncio.create_task(self._run(http, path, {**body, "stream": True}))

    async def until_begun(self) -> None:
        """Until a few tokens have come, or all."""
        async with self._progress:
            await self._progress.wait_for(lambda: self._task.done() or self._num_tokens() >= 2)

    async def end(self) -> list[Fields]:
        await self._task
        return [choice.said for _, choice in sorted(self.choices.items())]

    def _num_tokens(self) -> int:
        return max((choice.num_tokens for choice in self.choices.values()), default=0)

    async def _run(self, http: httpx.AsyncClient, path: str, body: Fields) -> None:
        try:
            async for chunk in events(http, path, body):
                assert "error" not in chunk, chunk
                self.timings = chunk.get("timings") or self.timings
                for piece in chunk["choices"]:
                    self.choices.setdefault(piece["index"], Choice()).add(piece)
                async with self._progress:
                    self._progress.notify_all()
        finally:
            async with self._progress:
                self._progress.notify_all()


async def events(http: httpx.AsyncClient, path: str, body: Fields) -> AsyncIterator[Fields]:
    async with http.stream("POST", path, json=body) as response:
        assert response.status_code == httpx.codes.OK, await response.aread()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                yield json.loads(line.removeprefix("data: "))


async def whole(http: httpx.AsyncClient, path: str, body: Fields) -> list[Fields]:
    """What the answers say."""
    response = await http.post(path, json=body)
    assert response.status_code == httpx.codes.OK, response.text
    pieces = sorted(response.json()["choices"], key=lambda piece: int(piece["index"]))
    choices = [Choice() for _ in pieces]
    for choice, piece in zip(choices, pieces, strict=True):
        choice.add(piece)
    return [choice.said for choice in choices]
