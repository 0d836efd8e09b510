"""How chats become prompts: templates of requests, documents, reasoning effort, messages that are continued."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import httpx
import pytest

from baton.errors import BatonError, InvalidRequest, Overloaded
from baton.node_info import NodeRole
from router.http.schemas import ChatRequest
from router.offload import request_templates
from router.offload.request_templates import RequestTemplates, question_of
from router.offload.template_worker import render
from tests.router.conftest import on_shared_loop, says
from tests.router.fake_node import FakeCluster
from tests.router.http.test_access import running
from tests.router.http_shapes import CHAT, error_of, events
from tests.router.offload.test_structured_output import stop
from tests.router.tiny_tokenizer import tiny_tokenizer

CHATS = "/v1/chat/completions"
PREFILL = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello "}]
VARIABLES = "{{ reasoning_effort }}|{{ documents[0].title }}|{{ messages[0].content }}|{{ color }}|{{ bos_token }}"
ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
ARGUMENTS = {"messages": CHAT["messages"], "add_generation_prompt": True, "tools": None}


def text_of(prompt: Sequence[int]) -> str:
    return tiny_tokenizer().decode(list(prompt), skip_special_tokens=False)


def contents(stream: str) -> str:
    lines = [json.loads(line.removeprefix("data: ")) for line in stream.split("\n\n") if line.startswith("data: {")]
    return "".join(line["choices"][0]["delta"].get("content") or "" for line in lines if line["choices"])


async def test_the_last_message_is_continued_and_echoed(client: httpx.AsyncClient, nodes: FakeCluster) -> None:
    body = {**CHAT, "messages": PREFILL, "continue_final_message": True}
    answer = (await client.post(CHATS, json=body)).json()["choices"][0]["message"]
    assert answer == {"role": "assistant", "content": "hello world", "refusal": None}
    assert text_of(nodes.prefills[0].prompt_tokens).endswith("<|im_start|>assistant\nhello ")
    answer = (await client.post(CHATS, json={**body, "echo": True, "n": 1})).json()["choices"][0]["message"]
    assert answer == {"role": "assistant", "content": "hello hello world", "refusal": None}
    assert contents((await client.post(CHATS, json={**body, "echo": True, "stream": True})).text) == "hello hello world"


async def test_echo_is_of_the_assistant_unless_a_message_is_continued(client: httpx.AsyncClient) -> None:
    for messages, continued, content in (
        (CHAT["messages"], False, "hello world"),
        (CHAT["messages"], True, "hihello world"),
        (PREFILL, False, "hello hello world"),
    ):
        body = {"messages": messages, "continue_final_message": continued, "echo": True}
        assert (await client.post(CHATS, json=body)).json()["choices"][0]["message"]["content"] == content


async def test_the_prompt_does_not_begin_a_message_when_told_so(client: httpx.AsyncClient, nodes: FakeCluster) -> None:
    await client.post(CHATS, json={**CHAT, "add_generation_prompt": False})
    assert text_of(nodes.prefills[0].prompt_tokens).endswith("hi<|im_end|>\n")


async def test_the_prompt_may_be_returned_as_text(client: httpx.AsyncClient) -> None:
    body = {**CHAT, "return_prompt_text": True, "n": 2}
    text = "<|bos|><|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert (await client.post(CHATS, json=body)).json()["prompt_text"] == text
    chunks = events((await client.post(CHATS, json={**body, "stream": True})).text)
    assert [chunk.get("prompt_text") for chunk in chunks] == [text] + [None] * (len(chunks) - 1)


@on_shared_loop
@pytest.mark.parametrize(
    ("path", "body", "param", "said"),
    [
        (CHATS, {"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message", "exclude"),
        ("/tokenize", {"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message", "exc"),
        (CHATS, {"chat_template": "x"}, "chat_template", "--trust-request-chat-template"),
        ("/tokenize", {"chat_template": "x"}, "chat_template", "--trust-request-chat-template"),
        (CHATS, {"chat_template": "x" * 65_537}, "chat_template", "at most 65536"),
        (CHATS, {"reasoning_effort": "huge"}, "reasoning_effort", "'xhigh'"),
        (CHATS, {"documents": ["a"]}, "documents", "dictionary"),
        (CHATS, {"documents": [{}] * 1025}, "documents", "at most 1024"),
        (CHATS, {"documents": [{"a": [0] * 16_384}]}, "documents", "at most 16384"),
        (
            CHATS,
            {"echo": True, "n": 100, "messages": [{"role": "assistant", "content": "x" * 50_000}]},
            "echo",
            "5000000",
        ),
        ("/tokenize", {"prompt": "x"}, "prompt", "exclude each other"),
        ("/tokenize", {"suffix": "x"}, "suffix", "not supported"),
    ],
)
async def test_mistakes_are_named(
    shared_client: httpx.AsyncClient, path: str, body: dict[str, Any], param: str, said: str
) -> None:
    response = await shared_client.post(path, json={**CHAT, **body})
    assert response.status_code == 400, response.text
    assert error_of(response)["param"] == param
    assert said in error_of(response)["message"]


async def test_a_trusted_template_has_all_variables_in_chats_and_tokenize(nodes: FakeCluster) -> None:
    """`reasoning_effort` and `documents` come before the variables of the same names."""
    body = {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}, {"type": "text", "text": "you"}]}],
        "chat_template": VARIABLES,
        "chat_template_kwargs": {"color": "red", "reasoning_effort": "low"},
        "documents": [{"title": "fox", "text": "jumps"}],
        "reasoning_effort": "max",
    }
    text = "max|fox|hi\nyou|red|<|bos|>"
    async with running(nodes, trust_request_chat_template=True) as (_, client):
        assert (await client.post(CHATS, json=body)).status_code == 200
        assert text_of(nodes.prefills[0].prompt_tokens) == text
        assert text_of((await client.post("/tokenize", json=body)).json()["tokens"]) == text
        refused = await client.post(CHATS, json={**CHAT, "chat_template": "{{ messages[7].content.upper() }}"})
        assert (refused.status_code, error_of(refused)["param"]) == (400, "chat_template")
        answer = await client.post(CHATS, json={**CHAT, "chat_template": "{% for %}"})
        assert "cannot be compiled" in error_of(answer)["message"]


async def test_documents_and_effort_are_known_to_the_models_template() -> None:
    nodes = FakeCluster(says("hello"))
    await nodes.add(NodeRole.PREFILL, chat_template=VARIABLES)
    await nodes.add(NodeRole.DECODE, chat_template=VARIABLES)
    async with running(nodes) as (_, client):
        body = {**CHAT, "documents": [{"title": "fox"}], "reasoning_effort": "none"}
        assert (await client.post(CHATS, json=body)).status_code == 200
    await nodes.close()
    assert text_of(nodes.prefills[0].prompt_tokens) == "none|fox|hi||<|bos|>"


async def test_variables_that_requests_leave_out_have_the_operators_values() -> None:
    nodes = FakeCluster(says("hello"))
    for role in NodeRole:
        await nodes.add(role, chat_template="{{ color }}|{{ reasoning_effort }}|{{ messages[0].content }}")
    async with running(nodes, default_chat_template_kwargs={"color": "red", "reasoning_effort": "low"}) as (_, client):
        for fields, prompt in (
            ({}, "red|low|hi"),
            ({"chat_template_kwargs": {"color": "blue"}, "reasoning_effort": "high"}, "blue|high|hi"),
        ):
            assert (await client.post(CHATS, json={**CHAT, **fields})).status_code == 200
            assert text_of(nodes.prefills[-1].prompt_tokens) == prompt
            tokens = (await client.post("/tokenize", json={**CHAT, **fields})).json()["tokens"]
            assert text_of(tokens) == prompt
        assert (await client.post("/v1/messages", json={**CHAT, "max_tokens": 5})).status_code == 200
        assert text_of(nodes.prefills[-1].prompt_tokens) == "red|low|hi"
    await nodes.close()


def test_an_effort_says_whether_the_model_is_to_reason_unless_the_variables_do() -> None:
    def variables(**given: Any) -> Mapping[str, Any]:
        return ChatRequest.model_validate({**CHAT, **given}).variables

    none, low = variables(reasoning_effort="none"), variables(reasoning_effort="low")
    assert none == {"reasoning_effort": "none", "enable_thinking": False, "thinking": False}
    assert low == {"reasoning_effort": "low", "enable_thinking": True, "thinking": True}
    given = variables(reasoning_effort="none", chat_template_kwargs={"enable_thinking": True, "color": "red"})
    assert given == {**none, "enable_thinking": True, "color": "red"}
    assert variables() == {}


@pytest.fixture
async def templates() -> AsyncIterator[RequestTemplates]:
    templates = RequestTemplates(are_trusted=True)
    yield templates
    templates.close()


async def test_an_endless_template_is_refused_in_time_and_the_next_is_rendered(
    templates: RequestTemplates, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_templates, "TIME_LIMIT_S", 0.2)
    with pytest.raises(InvalidRequest, match=r"not rendered within 0\.2 s of CPU time") as refused:
        await templates.render(question_of(ENDLESS, {}, ARGUMENTS))
    assert refused.value.param == "chat_template"
    monkeypatch.undo()
    assert await templates.render(question_of("{{ messages | length }}", {}, ARGUMENTS)) == "1"


async def test_a_template_is_not_at_fault_if_the_process_gets_no_cpu(
    templates: RequestTemplates, monkeypatch: pytest.MonkeyPatch
) -> None:
    question = question_of("x", {}, ARGUMENTS)
    await templates.render(question)
    counted: list[BatonError] = []
    templates._on_refused = counted.append
    assert templates._worker is not None
    stop(templates._worker._process.pid)
    monkeypatch.setattr(request_templates, "_PATIENCE_S", 0.1)
    with pytest.raises(Overloaded, match="too busy") as refused:
        await templates.render(question)
    assert counted == [refused.value]


async def test_a_template_waits_for_others_only_so_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_templates, "_MAX_WAIT_S", 0.01)
    counted: list[BatonError] = []
    templates = RequestTemplates(are_trusted=True, on_refused=counted.append)
    async with templates._lock:
        with pytest.raises(Overloaded, match="chat templates") as refused:
            await templates.render(question_of("x", {}, ARGUMENTS))
    assert counted == [refused.value]


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        ("{{ 'x' * 5000000 }}", "writes 5000000 characters, of at most 4194304"),
        ("{{ raise_exception('no') }}", "refuses the messages: no"),
        ("{{ ''.__class__.__mro__ }}", "refuses"),
    ],
)
def test_what_a_template_does_wrong_is_said(source: str, said: str) -> None:
    assert said in render(source, {}, **ARGUMENTS)["refused"]
