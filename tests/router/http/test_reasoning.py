"""Reasoning in chats over HTTP: parted from what a model says, counted, and left out if asked for."""

import httpx
import pytest

from baton.logits_processors import THINKING_BUDGET
from router.reasoning_parsers import REASONING_PARSERS
from tests.router.conftest import on_shared_loop, running_router, says, shared_fixtures
from tests.router.http.tool_chats import (
    ANSWER,
    ARGUMENTS,
    CALL,
    CHATS,
    TOOLS,
    choice_of,
    chunks_of,
    shared_with_tools,
)
from tests.router.http_shapes import CHAT, error_of
from tests.router.matching import matches
from tests.router.tiny_tokenizer import EOT, tiny_tokenizer

pytestmark = on_shared_loop
shared = shared_with_tools(ANSWER)
nodes, router, client = shared_fixtures()


async def test_reasoning_may_be_left_out(client):
    whole = await choice_of(client, include_reasoning=False)
    assert whole["message"].keys() == {"role", "content", "refusal", "tool_calls"}
    assert whole["message"]["content"] == "\n\nI will look.\n"
    stream = {**TOOLS, "stream": True, "include_reasoning": False}
    chunks = chunks_of((await client.post("/v1/chat/completions", json=stream)).text)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert all(deltas[1:-1])  # a chunk without news is not sent
    assert not any("reasoning" in delta or "reasoning_content" in delta for delta in deltas)
    assert "".join(delta.get("content") or "" for delta in deltas) == whole["message"]["content"]


@pytest.mark.parametrize("include", [True, False])
async def test_reasoning_is_counted_for_all_answers(client, include):
    one = len(tiny_tokenizer().encode("<think>\nThe weather.\n", False))  # `</think>` counts for what comes after it
    body = {**TOOLS, "n": 2, "include_reasoning": include}
    whole = (await client.post(CHATS, json=body)).json()["usage"]
    assert whole["completion_tokens_details"] == {"reasoning_tokens": 2 * one}
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = chunks_of((await client.post(CHATS, json={**body, "stream": True, "stream_options": options})).text)
    counts = [chunk["usage"]["completion_tokens_details"]["reasoning_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert (counts[0] < 2 * one, counts[-1]) == (True, 2 * one)


async def test_without_a_reasoning_parser_nothing_is_said_of_reasoning(nodes):
    async with (
        running_router(nodes, tool_call_parser="hermes", enable_auto_tool_choice=True) as router,
        httpx.AsyncClient(base_url=router.http, timeout=20) as client,
    ):
        assert "completion_tokens_details" not in (await client.post(CHATS, json=TOOLS)).json()["usage"]


async def test_reasoning_that_is_left_out_is_not_in_logprobs_or_token_ids(client):
    """Nor is anything else: which tokens are reasoning is known to a piece, not to a token."""
    told = {**TOOLS, "logprobs": True, "return_token_ids": True}
    shown = (await client.post(CHATS, json=told)).json()["choices"][0]
    assert len(shown["logprobs"]["content"]) == len(shown["token_ids"]) > 20
    hidden = {**told, "include_reasoning": False}
    body = (await client.post(CHATS, json=hidden)).json()
    chunks = chunks_of((await client.post(CHATS, json={**hidden, "stream": True})).text)
    choices = [body["choices"][0], *(chunk["choices"][0] for chunk in chunks)]
    assert {(choice["logprobs"], "token_ids" in choice) for choice in choices} == {(None, False)}
    assert body["prompt_token_ids"] == chunks[0]["prompt_token_ids"]
    assert all(choice["delta"] for choice in choices[2:-1])  # a chunk without news is not sent


@pytest.mark.parametrize("n", [1, 2])
async def test_reasoning_before_what_must_match_ends_where_the_constraint_says(client, nodes, n):
    """Qwen3's parser also ends it where a call begins, and what follows would not have to match."""
    thought = 'Hm. <tool_call>\n{"name": "get_weather", "arguments": {}}\n</tool_call>'
    schema = {"type": "json_schema", "json_schema": {"name": "city", "schema": {"type": "object"}}}
    for end, fields in (
        ('{"city": "Oslo"}', {**CHAT, "response_format": schema}),
        (CALL, {**TOOLS, "tool_choice": "required"}),
    ):
        nodes.script = says(f"<think>{thought}</think>{end}")
        choices = (await client.post(CHATS, json={**fields, "n": n, "max_tokens": 500})).json()["choices"]
        assert matches(nodes.prefills[-1].sampling.structured_outputs, f"<think>{thought}</think>{end}")
        for choice in choices:
            message = choice["message"]
            calls = [call["function"]["arguments"] for call in message.get("tool_calls", ())]
            found = (message["reasoning"], message["content"], calls)
            assert found == (thought, *(((None, [ARGUMENTS])) if end == CALL else (end, [])))


async def test_a_template_that_opens_the_reasoning_is_seen(client, nodes):
    nodes.script = says("Hm.</think>Yes.")
    message = (await choice_of(client, chat_template_kwargs={"thinking": True}))["message"]
    assert (message["reasoning"], message["content"]) == ("Hm.", "Yes.")
    assert (await choice_of(client))["message"]["content"] == "Hm.</think>Yes."


async def test_an_answer_that_goes_on_from_text_does_not_think(nodes):
    async with (
        running_router(
            nodes, tool_call_parser="hermes", enable_auto_tool_choice=True, reasoning_parser="deepseek_r1"
        ) as router,
        httpx.AsyncClient(base_url=router.http) as client,
    ):
        for begun, text, parts in (("So: ", "4.", (None, "4.")), ("<think>So", " 4?</think>4.", (" 4?", "4."))):
            nodes.script = says(text)
            messages = [*CHAT["messages"], {"role": "assistant", "content": begun}]
            message = (await choice_of(client, messages=messages, continue_final_message=True))["message"]
            assert (message.get("reasoning"), message["content"]) == parts


# ---- a model whose reasoning and calls share a format ----


async def test_an_answer_of_gpt_oss_has_its_parts(nodes):
    analysis, preamble = (
        "<|channel|>analysis<|message|>Hm.<|end|>",
        "<|channel|>commentary<|message|>I will look.<|end|>",
    )
    call = "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>" + ARGUMENTS
    nodes.script = says("<|start|>assistant".join([analysis, preamble, call]))
    async with (
        running_router(
            nodes, tool_call_parser="gpt_oss", enable_auto_tool_choice=True, reasoning_parser="gpt_oss"
        ) as router,
        httpx.AsyncClient(base_url=router.http) as client,
    ):
        choice = await choice_of(client)
        message = choice["message"]
        assert (message["reasoning"], message["content"], choice["finish_reason"]) == (
            "Hm.",
            "I will look.",
            "tool_calls",
        )
        assert [call["function"] for call in message["tool_calls"]] == [{"name": "get_weather", "arguments": ARGUMENTS}]
        body = {**TOOLS, "stream": True}
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks_of((await client.post(CHATS, json=body)).text)]
        assert "".join(delta.get("content") or "" for delta in deltas) == "I will look."
        parts = [part for delta in deltas for part in delta.get("tool_calls", ())]
        assert "".join(part["function"]["arguments"] for part in parts) == ARGUMENTS


async def test_a_budget_of_reasoning_is_checked(client, nodes):
    for budget, says_why in ((-2, "-1 or more"), (0.6, "integer"), (5, "one token")):
        refusal = await client.post(CHATS, json={**CHAT, "thinking_token_budget": budget})
        assert (refusal.status_code, error_of(refusal)["param"]) == (400, "thinking_token_budget")
        assert says_why in error_of(refusal)["message"]
    beams = await client.post(CHATS, json={**CHAT, "thinking_token_budget": 5, "use_beam_search": True})
    assert "exclude each other" in error_of(beams)["message"]
    assert (await client.post(CHATS, json={**CHAT, "thinking_token_budget": -1})).status_code == 200
    assert nodes.prefills[-1].sampling.logits_processors == ()


async def test_a_budget_of_reasoning_goes_to_the_nodes(client, nodes, monkeypatch):
    monkeypatch.setattr(REASONING_PARSERS["qwen3"], "closing", "<|endoftext|>")
    assert (await client.post(CHATS, json={**CHAT, "thinking_token_budget": 5})).status_code == 200
    (bound,) = nodes.prefills[-1].sampling.logits_processors
    assert (bound.name, bound.parsed()[0][:2]) == (THINKING_BUDGET, [5, [EOT]])
