"""Responses that the router keeps: conversations go on from them, and their clients read, list and delete them."""

import openai
import pytest
from pydantic import SecretStr

from tests.router.conftest import on_shared_loop, says
from tests.router.http.responses_api.shapes import HI, PATH, TOOL, messages_of, post
from tests.router.http.test_access import bearer, running
from tests.router.http.tool_chats import ANSWER
from tests.router.http_shapes import error_of

pytestmark = on_shared_loop


def reference(item):
    """As Vercel's AI SDK sends what a model said before."""
    return {"type": "item_reference", "id": item.id}


async def test_a_response_goes_on_from_the_previous_one(official, nodes):
    nodes.script = says(ANSWER)
    first = await official.responses.create(model="tiny", input="hi", tools=[TOOL], instructions="Be brief.")
    calls = [item for item in first.output if item.type == "function_call"]
    nodes.script = says("Rain.")
    results = [{"type": "function_call_output", "call_id": call.call_id, "output": "Rain"} for call in calls]
    second = await official.responses.create(model="tiny", input=results, previous_response_id=first.id)
    chained = messages_of(nodes)
    assert second.previous_response_id == first.id
    user, assistant, *tools = chained
    assert user == {"role": "user", "content": "hi"}  # and no instructions
    assert (assistant["reasoning"], assistant["content"]) == ("\nThe weather.\n", "\n\nI will look.\n")
    assert [call["id"] for call in assistant["tool_calls"]] == [call.call_id for call in calls]
    assert [tool["tool_call_id"] for tool in tools] == [call.call_id for call in calls]
    by_hand = [{"role": "user", "content": "hi"}, *first.output, *results]
    await official.responses.create(model="tiny", input=by_hand)
    assert messages_of(nodes) == chained
    by_reference = [{"role": "user", "content": "hi"}, *map(reference, first.output), *results]
    third = await official.responses.create(model="tiny", input=by_reference)
    assert messages_of(nodes) == chained
    counted = await official.responses.input_tokens.count(model="tiny", input=by_reference)
    assert counted.input_tokens == len(nodes.prefills[-1].prompt_tokens)
    assert [item.type async for item in official.responses.input_items.list(third.id, order="asc")] == [
        *("message", *(item.type for item in first.output), *(result["type"] for result in results))
    ]
    await official.responses.create(model="tiny", input="And now?", previous_response_id=second.id)
    assert messages_of(nodes) == [
        *chained,
        {"role": "assistant", "content": "Rain."},
        {"role": "user", "content": "And now?"},
    ]


async def test_the_tokens_of_a_conversation_are_counted(official, client, nodes):
    first = await official.responses.create(model="tiny", input="hi", tools=[TOOL], instructions="Be brief.")
    only = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "other"}]}
    for fields in (
        {"input": "hi"},
        {"input": "hi", "tools": [TOOL], "instructions": "Be brief.", "reasoning": {"effort": "low"}},
        {"input": "And now?", "previous_response_id": first.id},
        {"input": "hi", "tools": [TOOL, {**TOOL, "name": "other"}], "tool_choice": only},
    ):
        counted = await official.responses.input_tokens.count(model="tiny", **fields)
        await official.responses.create(model="tiny", **fields)
        assert counted.input_tokens == len(nodes.prefills[-1].prompt_tokens)
    assert counted.object == "response.input_tokens"
    assert len(nodes.prefills) == 5, "nothing is generated to count"
    longer = await client.post(f"{PATH}/input_tokens", json={**HI, "input": "a b " * 10_000})
    assert longer.json()["input_tokens"] > 4096, "of the context"
    for fields, status, param in (
        ({"input": []}, 400, "input"),
        ({"input": [{"role": "assistant", "content": 'said "a"', "status": "incomplete"}]}, 400, "input"),
        ({"previous_response_id": "resp_x"}, 400, "previous_response_id"),
        ({"model": "x"}, 404, "model"),
    ):
        refused = await client.post(f"{PATH}/input_tokens", json={**HI, **fields})
        assert (refused.status_code, error_of(refused)["param"]) == (status, param)


# ---- what is kept ----


async def test_a_response_is_kept_until_it_is_deleted(official, client):
    made = await official.responses.create(model="tiny", input="hi")
    assert len({item.id for item in made.output} | {made.id}) == 1 + len(made.output)
    again = await official.responses.retrieve(made.id)
    assert again.to_dict() == made.to_dict()
    assert (await client.get(f"{PATH}/{made.id}?stream=true")).status_code == 400
    refused = await client.post(f"{PATH}/{made.id}/cancel")
    assert (refused.status_code, "background" in error_of(refused)["message"]) == (400, True)
    await official.responses.delete(made.id)
    with pytest.raises(openai.NotFoundError, match="not found"):
        await official.responses.retrieve(made.id)
    for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/cancel"), ("GET", "/input_items")):
        assert (await client.request(method, f"{PATH}/{made.id}{path}")).status_code == 404
    with pytest.raises(openai.BadRequestError) as gone:
        await official.responses.create(model="tiny", input="hi", previous_response_id=made.id)
    assert (gone.value.code, gone.value.param) == ("previous_response_not_found", "previous_response_id")
    with pytest.raises(openai.NotFoundError, match=f"Item with id '{made.output[0].id}' not found") as lost:
        await official.responses.create(model="tiny", input=[reference(made.output[0])])
    assert lost.value.param == "input"


async def test_streamed_responses_are_kept_too_unless_they_must_not_be(official, client):
    async with official.responses.stream(model="tiny", input="hi") as stream:
        final = await stream.get_final_response()
    assert (await official.responses.retrieve(final.id)).output_text == "hello world"
    body = await post(client, store=False)
    assert body["store"] is False
    assert (await client.get(f"{PATH}/{body['id']}")).status_code == 404


async def test_the_items_of_a_conversation_come_in_pages(official, client):
    first = await official.responses.create(model="tiny", input="one")
    second = await official.responses.create(model="tiny", input="two", previous_response_id=first.id)
    pages = official.responses.input_items.list(second.id, limit=2, order="asc")
    items = [item async for item in pages]
    assert [item.content[0].text for item in items] == ["one", "hello world", "two"]
    assert items[1].content[0].logprobs == []  # OpenAI's schema wants the field, where its client does without
    page = (await client.get(f"{PATH}/{second.id}/input_items?limit=1")).json()
    assert ([item["content"][0]["text"] for item in page["data"]], page["has_more"]) == (["two"], True)
    for query in ("limit=0", "limit=101", "limit=x", "order=up", "after=none"):
        assert (await client.get(f"{PATH}/{second.id}/input_items?{query}")).status_code == 400


async def test_one_client_does_not_see_anothers_responses(nodes):
    async with running(nodes, api_key=(SecretStr("sk-one"), SecretStr("sk-two"))) as (_, client):
        one, two = bearer("sk-one"), bearer("sk-two")
        response = (await client.post(PATH, json=HI, headers=one)).json()
        made, item = response["id"], response["output"][0]["id"]
        for method in ("GET", "DELETE"):
            assert (await client.request(method, f"{PATH}/{made}", headers=two)).status_code == 404
        response = await client.post(PATH, json={**HI, "previous_response_id": made}, headers=two)
        assert error_of(response)["code"] == "previous_response_not_found"
        referring = {**HI, "input": [{"type": "item_reference", "id": item}]}
        assert [(await client.post(PATH, json=referring, headers=key)).status_code for key in (one, two)] == [200, 404]
        assert (await client.get(f"{PATH}/{made}", headers=one)).status_code == 200


async def test_a_router_may_keep_nothing(nodes):
    async with running(nodes, max_stored_responses=0) as (_, client):
        body = (await client.post(PATH, json=HI)).json()
        assert body["store"] is False
        assert (await client.get(f"{PATH}/{body['id']}")).status_code == 404
        for name in ("store", "background"):
            refused = await client.post(PATH, json={**HI, name: True})
            assert (refused.status_code, error_of(refused)["param"]) == (400, name)
