"""The API's description: served, whole, and true for the bodies that tests elsewhere send."""

import json

import pytest
from fastapi import FastAPI

from baton.sampling import NAMES, RANGES
from router.http.anthropic.schemas import CountTokensRequest, MessagesRequest
from router.http.descriptions import operations
from router.http.field_table import models_of, rows_of
from router.http.openapi import describe
from router.http.responses_api.schemas import ResponsesRequest
from router.http.schemas import ChatRequest, CompletionRequest


def references(node: object) -> set[str]:
    if isinstance(node, dict):
        own = {node["$ref"]} if "$ref" in node else set()
        return own.union(*map(references, node.values()))
    return set().union(*map(references, node)) if isinstance(node, list) else set()


def test_every_reference_is_there():
    document = describe()
    names = {f"#/components/schemas/{name}" for name in document["components"]["schemas"]}
    assert references(document) <= names


@pytest.mark.parametrize("kind", [ChatRequest, CompletionRequest])
def test_every_field_is_described(kind):
    described = describe()["components"]["schemas"][kind.__name__]
    assert set(described["properties"]) == set(kind.model_fields)
    assert described["properties"]["stop_token_ids"]["anyOf"][0]["maxItems"] == 1024
    assert (described["properties"]["n"]["minimum"], described["properties"]["n"]["maximum"]) == (1, 128)


def test_the_messages_api_is_described():
    document = describe()
    for kind in (MessagesRequest, CountTokensRequest):
        assert set(document["components"]["schemas"][kind.__name__]["properties"]) == set(kind.model_fields)
    described = document["components"]["schemas"]["MessagesRequest"]
    assert described["required"] == ["messages", "max_tokens"]
    assert described["properties"]["max_tokens"]["minimum"] == 1
    failure = document["paths"]["/v1/messages"]["post"]["responses"]["400"]["content"]["application/json"]["schema"]
    assert failure == {"$ref": "#/components/schemas/MessagesError"}


def test_the_responses_api_is_described():
    described = describe()["components"]["schemas"]["ResponsesRequest"]
    chats = {"n", "best_of", "use_beam_search", "max_tokens", "prompt_logprobs", "response_format", "return_token_ids"}
    chats |= {"logprob_token_ids"}
    assert set(described["properties"]) == set(ResponsesRequest.model_fields) - chats
    assert described["required"] == ["input"]
    assert described["properties"]["input"]["anyOf"][0] == {"type": "string"}


def test_sampling_parameters_are_described_by_their_declaration():
    schemas = describe()["components"]["schemas"]
    assert schemas["CompletionRequest"]["properties"]["max_tokens"]["minimum"] == 0  # with `echo`
    described = schemas["ChatRequest"]["properties"]
    assert set(NAMES) - set(described) == {"num_logprobs", "num_prompt_logprobs", "bad_words_token_ids", "beam_width"}
    limits = {name: described[name] for name in RANGES.keys() - {"num_logprobs", "top_k", "seed", "beam_width"}}
    for name, limit in limits.items():
        least = "exclusiveMinimum" if RANGES[name].excludes_least else "minimum"
        assert (limit[least], limit["maximum"]) == (RANGES[name].least, RANGES[name].most), name


async def test_it_is_served_and_so_is_a_page_without_scripts(client):
    response = await client.get("/openapi.json")
    assert (response.status_code, response.json()) == (200, json.loads(json.dumps(describe())))
    page = await client.get("/docs")
    assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert page.headers["content-security-policy"] == "default-src 'none'; style-src 'unsafe-inline'"
    assert "<script" not in page.text
    assert "//" not in page.text.replace("<!doctype", "")
    for path in describe()["paths"]:
        assert f"<code>{path}</code>" in page.text
    assert "<td><code>temperature</code></td><td>number</td><td>[0, 1e6]</td>" in page.text
    assert (await client.get("/redoc")).status_code == 404


def test_every_operation_and_field_is_described_in_words():
    """docs/api.md and /docs show it: put what is missing into router/http/descriptions.py."""
    document = describe()
    missing = [f"{at[0]} {at[1]}" for at, content in operations(document).items() if not content.get("summary")]
    for content in operations(document).values():
        for kind in models_of(content.get("requestBody", {})):
            rows = rows_of(document["components"]["schemas"][kind])
            missing += [f"{kind}.{row.name}" for row in rows if not row.description]
    assert missing == []


@pytest.mark.parametrize(("value", "kind"), [("a", "string"), (3, "number"), (False, "boolean")])
def test_a_field_with_one_value_has_that_values_type(value, kind):
    [row] = rows_of({"properties": {"field": {"anyOf": [{"const": value}, {"type": "null"}]}}})
    assert row.kind == kind


@pytest.mark.filterwarnings("ignore:Duplicate Operation ID")  # of GET and HEAD
async def test_every_route_is_in_it(router):
    app = router.server.app
    while not isinstance(app, FastAPI):
        app = app._app
    served = {(method, path) for path, item in app.openapi()["paths"].items() for method in item if method != "head"}
    described = {(method, path) for path, item in describe()["paths"].items() for method in item}
    assert served - described == {("get", "/v1/models/")}  # the same as without the slash
    assert {(method, path) for method, path in described if method in ("get", "post")} <= served


async def test_every_path_of_it_is_there(client):
    made = (await client.post("/v1/responses", json={"input": "hi"})).json()["id"]
    (timeline,) = (await client.get("/debug/requests")).json()["requests"]
    for path, methods in describe()["paths"].items():
        named = path.replace("{name}", "tiny").replace("{response_id}", made)
        named = named.replace("{request_id}", timeline["request_id"]).replace("{file}", "main.js")
        for method in sorted(methods.keys() & {"delete", "get", "post"}, reverse=True):
            response = await client.request(method, named, content=b"{}")
            absent = (405,) if "{response_id}" in path else (404, 405)
            needs_flag = path == "/tokenizer_info" or path.startswith("/admin/")
            assert (response.status_code in absent) is needs_flag, path
            assert str(response.status_code) in methods[method]["responses"]
