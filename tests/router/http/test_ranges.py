"""Every field of every request is refused outside its range, as its schema has it: by name, with value and range."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from pydantic import BaseModel, ValidationError

from router.http.descriptions import operations
from router.http.docs_page import body_models
from router.http.openapi import describe
from tests.router.conftest import on_shared_loop

DOCUMENT = describe()
SCHEMAS: dict[str, Any] = DOCUMENT["components"]["schemas"]
BODIES = {
    path: SCHEMAS[models[0]]
    for (_, path), content in operations(DOCUMENT).items()
    if not path.startswith("/admin") and (models := body_models(content, DOCUMENT))
}
"""Those of clients: the admin API answers only with a key of its own, and has its cases in `test_admin`."""
USER = {"role": "user", "content": "hi"}
VALID: dict[str, Any] = {
    "messages": [USER],
    "prompt": "x",
    "tokens": [5],
    "token_ids": [5],
    "max_tokens": 8,
    "input": "x",
}
"""For fields that are required."""
BESIDE: dict[str, dict[str, Any]] = {
    "top_logprobs": {"logprobs": True, "include": ["message.output_text.logprobs"]},
    "min_tokens": {"max_tokens": None},
    "stream_options": {"stream": True},
}
"""What a field needs beside it."""


def parts(field: dict[str, Any]) -> list[dict[str, Any]]:
    return [field, *(part for part in field.get("anyOf", ()) if part.get("type") != "null")]


def out_of_range(field: dict[str, Any]) -> Iterator[tuple[Any, str]]:
    """Values just outside, and what the refusal must say."""
    for part in parts(field):
        if "minimum" in part:
            yield part["minimum"] - 1, f"{part['minimum'] - 1:.0f}"
        if "exclusiveMinimum" in part:
            yield part["exclusiveMinimum"], f"{part['exclusiveMinimum']:.0f}"
        if "maximum" in part:
            yield part["maximum"] + 1, f"{part['maximum'] + 1:.0f}"
        if "maxLength" in part:
            yield "x" * (part["maxLength"] + 1), str(part["maxLength"])
        if "maxItems" in part:
            yield [item(part["items"])] * (part["maxItems"] + 1), str(part["maxItems"])
        if "enum" in part:
            yield "nonsense", repr(part["enum"][-1])


def item(schema: dict[str, Any]) -> Any:
    (schema, *_) = schema.get("oneOf", [schema])
    schema = SCHEMAS[schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema
    if "properties" in schema:
        return {name: item(schema["properties"][name]) for name in schema.get("required", ())}
    if "const" in schema:
        return schema["const"]
    return {"string": "x", "integer": 5, "object": {}}.get(schema.get("type", "string"), "x")


def wrong_type(field: dict[str, Any]) -> Any:
    """A value of none of its types."""
    kinds = {part.get("type") for part in parts(field)}
    candidates: list[tuple[str, Any]] = [("string", "x"), ("integer", 5), ("object", {"x": 1}), ("array", [None])]
    taken = kinds | ({"integer"} if "number" in kinds else set())
    return next((value for kind, value in candidates if kind not in taken), True)


async def refusal(client: httpx.AsyncClient, path: str, name: str, value: Any) -> tuple[str | None, str]:
    """The field that is named, and the message."""
    schema = BODIES[path]
    beside = {field: given for field, given in BESIDE.get(name, {}).items() if field in schema["properties"]}
    body = {field: VALID[field] for field in schema.get("required", ())} | beside | {name: value}
    if path == "/tokenize" and name != "messages":
        body.setdefault("prompt", "x")
    if path == "/generate" and name != "input_ids":
        body.setdefault("text", "x")
    response = await client.post(path, json={key: given for key, given in body.items() if given is not None})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    return error.get("param"), error["message"]


@on_shared_loop
@pytest.mark.parametrize("path", BODIES)
async def test_a_value_out_of_range_is_named_with_its_range(shared_client: httpx.AsyncClient, path: str) -> None:
    wrong = []
    for name, field in BODIES[path]["properties"].items():
        for value, said in out_of_range(field):
            param, message = await refusal(shared_client, path, name, value)
            if param not in (None, name) or name not in message or said not in message:
                wrong.append((name, said, param, message))
    assert wrong == []


@on_shared_loop
@pytest.mark.parametrize("path", BODIES)
async def test_a_value_of_another_type_is_named(shared_client: httpx.AsyncClient, path: str) -> None:
    wrong = []
    for name, field in BODIES[path]["properties"].items():
        param, message = await refusal(shared_client, path, name, wrong_type(field))
        if param not in (None, name) or name not in message:
            wrong.append((name, param, message))
    assert wrong == []


def models_below(kind: type[BaseModel]) -> Iterator[type[BaseModel]]:
    for model in kind.__subclasses__():
        yield model
        yield from models_below(model)


def test_null_is_the_same_as_a_field_that_is_not_there() -> None:
    """Of every object within bodies, too: some clients write all fields that they know."""
    refused = []
    for model in models_below(BaseModel):
        if model.__module__.startswith("router.http"):
            optional = {name: None for name, field in model.model_fields.items() if not field.is_required()}
            try:
                model.model_validate(optional)
            except ValidationError as error:
                refused += [(model.__name__, at) for e in error.errors() if (at := e["loc"][0]) in optional]
    assert refused == []
