"""What tests of the Responses API share: requests, and what is read from answers."""

import json
from typing import Any

from openai.types.responses import Response

from tests.router.fake_node import FakeCluster
from tests.router.http.tool_chats import WEATHER, prompt_of

PATH = "/v1/responses"
HI: dict[str, Any] = {"model": "tiny", "input": "hi"}
TOOL: dict[str, Any] = {"type": "function", **WEATHER["function"]}
LOGPROBS = {"include": ["message.output_text.logprobs"], "top_logprobs": 1}


async def post(client, **fields: Any) -> dict[str, Any]:
    response = await client.post(PATH, json={**HI, **fields})
    assert response.status_code == 200, response.text
    body = response.json()
    Response.model_validate(body, strict=True)
    return body


def messages_of(nodes: FakeCluster) -> list[dict[str, Any]]:
    """Of the last prompt."""
    return [json.loads("{" + message) for message in prompt_of(nodes).split("|{")[1:]]


def events_of(text: str) -> list[dict[str, Any]]:
    """Each event's data, whose type is the event's name, and whose numbers count them."""
    found = []
    for lines in filter(None, text.split("\n\n")):
        name, data = lines.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        assert event["sequence_number"] == len(found)
        found.append(event)
    return found


def output_of(body: dict[str, Any]) -> list[dict[str, Any]]:
    """Without ids, which must all differ."""
    ids = [item["id"] for item in body["output"]] + [item["call_id"] for item in body["output"] if "call_id" in item]
    assert len(set(ids)) == len(ids)
    return [{k: v for k, v in item.items() if k not in ("id", "call_id")} for item in body["output"]]


def message(text: str, status: str = "completed") -> dict[str, Any]:
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {"type": "message", "role": "assistant", "status": status, "content": [part]}
