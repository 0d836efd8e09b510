"""What the Responses API refuses, by name; and its store."""

import json
from typing import Any

import pytest

from baton.errors import InvalidRequest
from router.http.body import validate
from router.http.responses_api.items import ItemReference
from router.http.responses_api.schemas import ResponsesRequest
from router.http.responses_api.store import ResponseStore, StoredResponse
from tests.router.http.responses_api.shapes import HI, TOOL


def item(**fields: Any) -> dict[str, Any]:
    return {"input": [fields]}


IMAGE = {"type": "input_image", "image_url": "x"}
FORMAT = {"type": "json_schema", "name": "x", "schema": {"type": "object"}}
MISTAKES: list[tuple[dict[str, Any], str, str]] = [
    ({"input": []}, "input", "must not be empty"),
    ({"input": 3}, "input", "a string or a list of items"),
    ({"input": ["x"]}, "input", "item 0 must be an object"),
    (item(type="mcp_call", id="x"), "input", "item 0 of type 'mcp_call' is not supported"),
    (item(type="item_reference"), "input", "Field required"),
    (item(type="computer_call_output"), "input", "'computer_call_output'"),
    (item(role="user", content=[IMAGE]), "input", "type 'input_image' is not supported"),
    (item(role="user", content=[{"type": "input_file"}]), "input", "type 'input_file'"),
    (item(role="tool", content="x"), "input", "role"),
    ({"background": True, "stream": True}, "background", "`background` and `stream` exclude each other"),
    ({"background": True, "store": False}, "background", "`background` needs `store`"),
    ({"conversation": "conv_1"}, "conversation", "`conversation`"),
    ({"previous_input_messages": [{"role": "user"}]}, "previous_input_messages", "`previous_input_messages`"),
    ({"enable_response_messages": True}, "enable_response_messages", "`enable_response_messages`"),
    ({"prompt": {"id": "p"}}, "prompt", "`prompt`"),
    ({"truncation": "auto"}, "truncation", "disabled"),
    ({"messages": []}, "messages", "`messages`"),
    ({"max_tokens": 5}, "max_tokens", "`max_tokens`"),
    ({"response_format": {"type": "text"}}, "response_format", "`response_format`"),
    ({"n": 2}, "n", "`n` is not a field of responses"),
    ({"best_of": 1}, "best_of", "`best_of`"),
    ({"return_token_ids": True}, "return_token_ids", "`return_token_ids`"),
    ({"max_output_tokens": 0}, "max_output_tokens", "1 or more, and below 2^31, not 0"),
    ({"max_output_tokens": 2**31}, "max_output_tokens", "1 or more, and below 2^31, not 2147483648"),
    ({"include": ["file_search_call.results"]}, "include", "not 'file_search_call.results'"),
    ({"top_logprobs": 2}, "top_logprobs", "needs 'message.output_text.logprobs'"),
    (
        {"tools": [{"type": "web_search"}]},
        "tools",
        "tools.0: `type` must be 'function' or 'custom': there are no other",
    ),
    ({"tools": [{"type": "image_generation"}, {"type": "web_search"}]}, "tools", "tools.0: `type` must be"),
    ({"tools": [TOOL, {"type": "file_search"}]}, "tools", "tools.1: `type` must be"),
    ({"tools": [{"type": "namespace", "name": "a b", "tools": [TOOL]}]}, "tools", "tools.0.function.namespace"),
    ({"tools": [{"type": "namespace", "name": "n"}]}, "tools", "tools.0: `type` must be"),
    ({"tools": [{"type": "namespace", "name": "n" * 120, "tools": [TOOL]}]}, "tools", "more than 128 characters"),
    ({"tools": [{**TOOL, "output": "x"}]}, "tools", "`output` in `tools`"),
    ({"tools": [TOOL, TOOL]}, "tools", "2 tools called `get_weather`"),
    ({"tools": [TOOL], "tool_choice": {"type": "web_search"}}, "tool_choice", "type 'web_search'"),
    ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "mode": "auto"}}, "tool_choice", "one or more"),
    ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "tools": ["f"]}}, "tool_choice", "type 'None'"),
    ({"text": {"verbosity": "high"}}, "text", "verbosity"),
    ({"text": {"format": {"type": "xml"}}}, "text", "text.format.type"),
    ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text", "`schema`"),
    ({"text": {"format": FORMAT}, "guided_regex": "a"}, "text", "exclude each other"),
    ({"reasoning": {"summary": "long"}}, "reasoning", "auto"),
    ({"reasoning": {"mode": "pro"}}, "reasoning", "`mode` in `reasoning`"),
    ({"stream_options": {"include_obfuscation": True}}, "stream_options", "include_obfuscation"),
    ({"metadata": {"a": "x" * 513}}, "metadata", "512"),
    ({"metadata": {str(i): "x" for i in range(17)}}, "metadata", "17 entries"),
]


def read(**fields: Any) -> None:
    body = validate(json.dumps({**HI, **fields}).encode(), ResponsesRequest)
    body.check()
    for message in body.chat([item for item in body.input if not isinstance(item, ItemReference)]).messages:
        message.plain()


@pytest.mark.parametrize(("fields", "param", "says"), MISTAKES)
def test_mistakes_are_named(fields, param, says):
    with pytest.raises(InvalidRequest) as refusal:
        read(**fields)
    assert says in refusal.value.message
    assert refusal.value.param == param


# ---- store ----


def test_the_store_drops_what_was_used_least_recently():
    def kept(size: int) -> StoredResponse:
        return StoredResponse(b"x" * (size - StoredResponse(b"", b"").size), b"")

    store = ResponseStore(max_responses=3, max_bytes=10_000)
    for name in ("a", "b", "c"):
        store.put(b"", name, kept(3_000))
    store.get(b"", "a")
    store.put(b"", "d", kept(2_000))
    assert [name for name in "abcd" if _has(store, name)] == ["a", "c", "d"]
    store.put(b"", "e", kept(6_000))
    assert [name for name in "acde" if _has(store, name)] == ["d", "e"]
    store.put(b"", "f", kept(10_001))
    assert not _has(store, "f")
    store.put(b"", "d", kept(2_500))
    assert store.num_bytes == 6_000 + 2_500
    store.put(b"", "e", kept(10_001))
    assert not _has(store, "e")
    store.put(b"", "e", kept(1_500))
    store.delete(b"", "d")
    store.delete(b"", "e")
    assert store.num_bytes == 0


def _has(store: ResponseStore, name: str) -> bool:
    return (b"", name) in store._kept
