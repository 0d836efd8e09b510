"""Constrained answers match what they must, and are the same on every way: handed off or not, whole, streamed, n."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import httpx
import pytest

from baton.v1 import common_pb2
from tests.e2e.client import Client
from tests.e2e.cluster import PATIENCE_S, Router
from tests.e2e.conftest import House

pytestmark = pytest.mark.timeout(300)

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 10, "maximum": 99},
        "kind": {"enum": ["cat", "dog"]},
    },
    "required": ["name", "age", "kind"],
    "additionalProperties": False,
}


def is_person(text: str) -> bool:
    person = json.loads(text)
    assert person.keys() == {"name", "age", "kind"}
    return len(person["name"]) <= 8 and 10 <= person["age"] <= 99 and person["kind"] in ("cat", "dog")


Case = tuple[dict[str, Any], Callable[[str], Any]]
PEOPLE: Case = ({"response_format": {"type": "json_schema", "json_schema": {"name": "p", "schema": PERSON}}}, is_person)
CASES: dict[str, Case] = {
    "schema": PEOPLE,
    "choice": ({"structured_outputs": {"choice": ["yes", "no", "may\nbe"]}}, lambda t: t in ("yes", "no", "may\nbe")),
    "regex": ({"guided_regex": "[0-9]{3}-[a-f]{2}"}, re.compile("[0-9]{3}-[a-f]{2}").fullmatch),
    "grammar": (
        {"structured_outputs": {"grammar": 'start: "(" start ")" | "x" start | "y"'}},
        re.compile(r"[(x]*y\)*").fullmatch,
    ),
}


class Asker:
    """Completions of one router."""

    def __init__(self, router: Router) -> None:
        self._client = httpx.AsyncClient(base_url=router.url, trust_env=False, verify=False, timeout=PATIENCE_S)

    async def post(self, **fields: Any) -> httpx.Response:
        body = {"prompt": "Once upon a time", "max_tokens": 120, "temperature": 1.0, "seed": 7, **fields}
        return await self._client.post("/v1/completions", json=body)

    async def ask(self, **fields: Any) -> list[dict[str, Any]]:
        answer = await self.post(**fields)
        assert answer.status_code == 200, answer.text
        choices: list[dict[str, Any]] = answer.json()["choices"]
        return choices

    async def stream(self, **fields: Any) -> str:
        answer = await self.post(**fields, stream=True)
        events = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
        return "".join(json.loads(event)["choices"][0]["text"] for event in events)

    async def chat(self, **fields: Any) -> dict[str, Any]:
        answer = await self._post_chat(**fields)
        assert answer.status_code == 200, answer.text
        choice: dict[str, Any] = answer.json()["choices"][0]
        return choice

    async def chat_deltas(self, **fields: Any) -> list[dict[str, Any]]:
        answer = await self._post_chat(**fields, stream=True)
        events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
        return [event["choices"][0]["delta"] for event in events]

    async def _post_chat(self, **fields: Any) -> httpx.Response:
        messages = [{"role": "user", "content": "Once upon a time"}]
        body = {"messages": messages, "max_tokens": 200, "temperature": 1.0, "seed": 7, **fields}
        return await self._client.post("/v1/chat/completions", json=body)

    async def close(self) -> None:
        await self._client.aclose()


@pytest.fixture
async def handed_off(house: House) -> AsyncIterator[Asker]:
    asker = Asker(house.chunk_2048)
    yield asker
    await asker.close()


@pytest.fixture
async def alone(house: House) -> AsyncIterator[Asker]:
    """The decode node of `handed_off`, which computes prompts too."""
    asker = Asker(house.alone)
    yield asker
    await asker.close()


@pytest.mark.parametrize("case", CASES)
async def test_an_answer_matches_and_is_the_same_on_every_way(handed_off: Asker, alone: Asker, case: str) -> None:
    fields, matches = CASES[case]
    greedy, together, *singles = await asyncio.gather(
        handed_off.ask(**fields, temperature=0, max_tokens=400),
        handed_off.ask(**fields, n=3),
        *(alone.ask(**fields | {"seed": 7 + sample}) for sample in range(3)),
    )
    streams = await asyncio.gather(*(handed_off.stream(**fields | {"seed": 7 + sample}) for sample in range(3)))
    for choice, [single], streamed in zip(together, singles, streams, strict=True):
        assert choice["finish_reason"] == "stop", choice
        assert matches(choice["text"]), choice["text"]
        assert single["text"] == streamed == choice["text"]
    (choice,) = greedy
    assert choice["finish_reason"] == "length" or matches(choice["text"]), choice["text"]


async def test_json_objects_and_free_answers_run_beside_each_other(handed_off: Asker, alone: Asker) -> None:
    wanted = {"response_format": {"type": "json_object"}, "max_tokens": 100}
    free = await alone.ask(temperature=0)
    guided = await alone.ask(**wanted)
    asked = [(asker.ask(temperature=0), asker.ask(**wanted)) for asker in (handed_off, alone)]
    answers = await asyncio.gather(*itertools.chain.from_iterable(asked))
    assert answers == [free, guided] * 2
    (choice,) = guided
    if choice["finish_reason"] == "stop":
        assert isinstance(json.loads(choice["text"]), dict)
    assert choice["text"].startswith("{")


async def test_parameters_that_forbid_tokens_agree_with_the_grammar(handed_off: Asker, alone: Asker) -> None:
    """EOS is forbidden by min_tokens, and the grammar ends all the same."""
    fields, matches = PEOPLE
    extra = {**fields, "min_tokens": 100, "repetition_penalty": 1.2, "top_p": 0.8, "logprobs": 2}
    (first,), (second,) = await asyncio.gather(handed_off.ask(**extra), alone.ask(**extra))
    logprobs, others = first.pop("logprobs"), second.pop("logprobs")
    assert first == second
    assert logprobs["tokens"] == others["tokens"]
    assert logprobs["token_logprobs"] == pytest.approx(others["token_logprobs"], abs=1e-4)
    assert matches(first["text"])


async def test_grpc_means_the_same(house: House, alone: Asker) -> None:
    structured = common_pb2.StructuredOutput(kind="json", text=json.dumps(PERSON))
    async with Client(house.chunk_2048) as client:
        answer = await client.generate(
            "Once upon a time", structured_outputs=structured, temperature=1.0, seed=7, max_tokens=120
        )
        assert answer.texts[0] == (await alone.ask(**PEOPLE[0]))[0]["text"]
        with pytest.raises(grpc.aio.AioRpcError, match="frob") as refused:
            await client.generate("x", structured_outputs=common_pb2.StructuredOutput(kind="frob"))
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


PEOPLE_TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": PERSON}} for name in ("add_person", "drop_person")
]
ONE_OF_THEM = {"type": "function", "function": {"name": "drop_person"}}


@pytest.mark.parametrize(("choice", "reason"), [("required", "tool_calls"), (ONE_OF_THEM, "stop")])
async def test_enforced_calls_are_the_same_on_every_way(
    handed_off: Asker, alone: Asker, choice: Any, reason: str
) -> None:
    fields = {"tools": PEOPLE_TOOLS, "tool_choice": choice, "parallel_tool_calls": False}
    whole, other, deltas = await asyncio.gather(
        handed_off.chat(**fields), alone.chat(**fields), handed_off.chat_deltas(**fields)
    )
    message = whole["message"]
    assert (message["content"], whole["finish_reason"]) == (None, reason)
    [called] = [call["function"] for call in message["tool_calls"]]
    assert called["name"] in (("add_person", "drop_person") if choice == "required" else ("drop_person",))
    assert is_person(called["arguments"])
    assert [call["function"] for call in other["message"]["tool_calls"]] == [called]
    parts = [delta["tool_calls"][0]["function"] for delta in deltas if "tool_calls" in delta]
    assert [part["name"] for part in parts if "name" in part] == [called["name"]]
    assert "".join(part["arguments"] for part in parts) == called["arguments"]


async def test_a_custom_tool_gets_what_its_grammar_says_on_every_way(handed_off: Asker, alone: Asker) -> None:
    lark = 'start: line+ "END"\nline: "\\"" /[a-c]{1,3}/ "\\"" LF\n%import common.LF'
    tool = {
        "name": "write",
        "format": {"type": "grammar", "grammar": {"syntax": "lark", "definition": lark}},
    }
    fields = {
        "tools": [{"type": "custom", "custom": tool}],
        "tool_choice": "required",
        "parallel_tool_calls": False,
    }
    whole, other, deltas = await asyncio.gather(
        handed_off.chat(**fields), alone.chat(**fields), handed_off.chat_deltas(**fields)
    )
    [called] = [call["custom"] for call in whole["message"]["tool_calls"]]
    assert called["name"] == "write"
    assert re.fullmatch(r'("[a-c]{1,3}"\n)+END', called["input"])
    assert [call["custom"] for call in other["message"]["tool_calls"]] == [called]
    parts = [delta["tool_calls"][0]["custom"] for delta in deltas if "tool_calls" in delta]
    assert "".join(part["input"] for part in parts) == called["input"]


async def test_a_structural_tag_leaves_text_free_around_what_it_constrains(handed_off: Asker, alone: Asker) -> None:
    number = {"type": "tag", "begin": "<", "content": {"type": "regex", "pattern": "[0-9]{3}"}, "end": ">"}
    tags = {"type": "triggered_tags", "triggers": ["<"], "tags": [number], "at_least_one": True}
    fields = {"response_format": {"type": "structural_tag", "format": tags}, "max_tokens": 40}
    (first,), (second,) = await asyncio.gather(handed_off.ask(**fields), alone.ask(**fields))
    assert first == second
    assert re.match(r"<[0-9]{3}>", first["text"])


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "frob"}}}}, "frob"),
        ({"guided_regex": "(a"}, "regex"),
        ({"guided_regex": "a", "guided_choice": ["b"]}, "exclude each other"),
        ({"structured_outputs": {"grammar": "start: x"}}, "unknown name"),
        ({"structured_outputs": {"frob": 1}}, "frob"),
        ({"guided_choice": []}, "choice"),
        ({"response_format": {"type": "xml"}}, "xml"),
        # Takes minutes to compile.
        ({"guided_json": {"allOf": [{"type": "string", "pattern": f".*{i}.*"} for i in range(20)]}}, "within 1 s"),
    ],
)
async def test_what_cannot_be_compiled_is_refused(handed_off: Asker, fields: dict[str, Any], param: str) -> None:
    answer = await handed_off.post(**fields)
    assert answer.status_code == 400, answer.text
    assert param in answer.json()["error"]["message"]
    assert (await handed_off.ask(**PEOPLE[0]))[0]["finish_reason"] == "stop"
