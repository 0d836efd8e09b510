"""`/openapi.json`: the requests and answers of the API, for programs. FastAPI cannot derive it, because the routes read
their bodies themselves."""

from __future__ import annotations

import functools
from typing import Any

from fastapi import APIRouter
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

import baton
from router.http.admin import PATH as ADMIN
from router.http.admin import NodeRequest
from router.http.anthropic.schemas import CountTokensRequest, MessagesRequest
from router.http.console.openapi import FILE, SNAPSHOT
from router.http.console.page import FOLDER as CONSOLE_FOLDER
from router.http.console.snapshot import PATH as SNAPSHOT_PATH
from router.http.debug_requests import PATH as REQUESTS
from router.http.descriptions import with_descriptions
from router.http.errors.anthropic import PATH as MESSAGES
from router.http.node_openapi import ADMIN_ERRORS, ADMIN_NODES, NAMED_NODE_ERRORS, NODE, NODE_NAME, NODES
from router.http.request_openapi import LIMIT, RECENT, REQUEST_ID, TIMELINES
from router.http.responses_api.openapi import COUNT, DELETED, PAGE_OF_ITEMS, RESPONSE, RESPONSE_ID
from router.http.responses_api.routes import PATH as RESPONSES
from router.http.responses_api.schemas import InputTokensRequest, ResponsesRequest
from router.http.schema_parts import in_path, object_of
from router.http.schemas import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from router.http.sglang.openapi import ANSWER as SGLANG_ANSWER
from router.http.sglang.openapi import MODEL_INFO, SERVER_INFO
from router.http.sglang.routes import MODEL_INFO as MODEL_INFOS
from router.http.sglang.routes import PATH as SGLANG
from router.http.sglang.routes import SERVER_INFO as SERVER_INFOS
from router.http.sglang.schemas import SglangRequest
from router.http.tokens.openapi import ALL_RENDERED, RENDERED
from router.http.tokens.openapi import ANSWER as TOKENS_ANSWER
from router.http.tokens.routes import PATH as TOKENS
from router.http.tokens.routes import RENDERED_CHAT, RENDERED_COMPLETION
from router.http.tokens.schemas import TokensRequest

_REF = "#/components/schemas/{model}"
_STRING = {"type": "string"}
_INTEGER = {"type": "integer"}
_NATURAL = {"type": "integer", "minimum": 0}
_STRING_OR_NULL = {"type": ["string", "null"]}
_OBJECT = {"type": "object"}

_ERROR = object_of(
    {"error": object_of({"message": _STRING, "type": _STRING, "param": _STRING_OR_NULL, "code": _STRING_OR_NULL})}
)
_MESSAGES_ERROR = object_of(
    {
        "type": {"const": "error"},
        "error": object_of({"type": _STRING, "message": _STRING}),
        "request_id": _STRING_OR_NULL,
    }
)
_OPENAI, _ANTHROPIC = "Error", "MessagesError"
"""The names of both forms of failures."""
_MODEL = object_of(
    {
        "id": _STRING,
        "object": {"const": "model"},
        "created": _INTEGER,
        "owned_by": _STRING,
        "max_model_len": _INTEGER,
        "type": {"const": "model"},
        "display_name": _STRING,
        "created_at": _STRING,
    }
)
_MODELS = object_of(
    {
        "object": {"const": "list"},
        "data": {"type": "array", "items": _MODEL},
        "has_more": {"const": False},
        "first_id": _STRING,
        "last_id": _STRING,
    }
)
_ANSWER = object_of(
    {
        "id": _STRING,
        "object": {"enum": ["chat.completion", "text_completion"]},
        "created": _INTEGER,
        "model": _STRING,
        "choices": {"type": "array", "items": _OBJECT, "minItems": 1},
        "usage": _OBJECT,
        "timings": _OBJECT,
    },
    "timings",
)
_MESSAGE = object_of(
    {
        "id": _STRING,
        "type": {"const": "message"},
        "role": {"const": "assistant"},
        "model": _STRING,
        "content": {"type": "array", "items": _OBJECT},
        "stop_reason": {"enum": ["end_turn", "max_tokens", "stop_sequence", "tool_use"]},
        "stop_sequence": _STRING_OR_NULL,
        "usage": _OBJECT,
        "timings": _OBJECT,
    },
    "timings",
)
_COUNT = object_of({"input_tokens": _INTEGER})
_TOKENS = object_of(
    {
        "count": _INTEGER,
        "max_model_len": _INTEGER,
        "tokens": {"type": "array", "items": _INTEGER},
        "token_strs": {"type": ["array", "null"], "items": _STRING},
    },
    "token_strs",
)
_TEXT = object_of({"prompt": _STRING})

_BODY_ERRORS = {
    400: "The request is wrong; `param` names the field",
    404: "There is no such model",
    408: "The body did not come in time",
    413: "The body is too large",
    429: "There is no room now; see Retry-After",
    500: "Our own mistake",
    503: "No node can answer now; see Retry-After",
}
_GENERATE_ERRORS = {**_BODY_ERRORS, 504: "The request was not finished in time"}
_STATUS = object_of({"status": _STRING})
_VERSION = object_of({"version": _STRING})
_LOAD = object_of({"server_load": _NATURAL})
_INDEXED_NODE = object_of({"node_id": _STRING, "role": _STRING, "incarnation": _STRING, "num_blocks": _NATURAL})
_PREFIX_INDEX = object_of({"num_blocks": _NATURAL, "nodes": {"type": "array", "items": _INDEXED_NODE}})
_TOKENIZER = object_of(
    {
        "tokenizer_class": _STRING,
        "added_tokens_decoder": _OBJECT,
        "model_max_length": _INTEGER,
        "chat_template": _STRING_OR_NULL,
    }
)
_KEPT_ERRORS = {400: _BODY_ERRORS[400], 404: "There is no such response"}
_NO_CONSOLE = {404: "Without the console (--no-console), and for other names"}
_NOT_READY = {503: "Not now; the message says why"}
_NAMED_MODEL_ERRORS = {400: "Several models are served", 404: _BODY_ERRORS[404], **_NOT_READY}


_BODIES: tuple[type[BaseModel], ...] = (
    *(ChatRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest),
    *(MessagesRequest, CountTokensRequest, ResponsesRequest, InputTokensRequest, TokensRequest, SglangRequest),
    NodeRequest,
)


@functools.cache
def describe() -> dict[str, Any]:
    """The whole document, in OpenAPI 3.1, made once in a process (a tenth of a second); not to be changed."""
    _, schemas = models_json_schema([(kind, "validation") for kind in _BODIES], ref_template=_REF)
    document = {
        "openapi": "3.1.0",
        "info": {"title": "baton", "version": baton.__version__},
        "paths": {**_answers(), **_models(), **_operation()},
        "components": {"schemas": {**schemas["$defs"], _OPENAI: _ERROR, _ANTHROPIC: _MESSAGES_ERROR}},
    }
    return with_descriptions(document)


def _answers() -> dict[str, Any]:
    """Everything that generates, and the responses that are kept."""
    return {
        "/v1/chat/completions": _post("chat", ChatRequest, _ANSWER, _GENERATE_ERRORS, streams=True),
        "/v1/completions": _post("completion", CompletionRequest, _ANSWER, _GENERATE_ERRORS, streams=True),
        TOKENS: _post("tokens", TokensRequest, TOKENS_ANSWER, _GENERATE_ERRORS, streams=True),
        SGLANG: _post("sglang", SglangRequest, SGLANG_ANSWER, _GENERATE_ERRORS, streams=True),
        RENDERED_CHAT: _post("render_chat", ChatRequest, RENDERED, _BODY_ERRORS),
        RENDERED_COMPLETION: _post("render_completion", CompletionRequest, ALL_RENDERED, _BODY_ERRORS),
        MESSAGES: _post("messages", MessagesRequest, _MESSAGE, _GENERATE_ERRORS, streams=True, failure=_ANTHROPIC),
        f"{MESSAGES}/count_tokens": _post("count_tokens", CountTokensRequest, _COUNT, _BODY_ERRORS, failure=_ANTHROPIC),
        RESPONSES: _post("responses", ResponsesRequest, RESPONSE, _GENERATE_ERRORS, streams=True),
        f"{RESPONSES}/input_tokens": _post("input_tokens", InputTokensRequest, COUNT, _BODY_ERRORS),
        f"{RESPONSES}/{{response_id}}": {
            **_get("response", _json(RESPONSE), _KEPT_ERRORS),
            "delete": {"operationId": "delete_response", "responses": _responses(_json(DELETED), _KEPT_ERRORS)},
            **RESPONSE_ID,
        },
        f"{RESPONSES}/{{response_id}}/cancel": {
            "post": {"operationId": "cancel_response", "responses": _responses(_json(RESPONSE), _KEPT_ERRORS)},
            **RESPONSE_ID,
        },
        f"{RESPONSES}/{{response_id}}/input_items": {
            **_get("input_items", _json(PAGE_OF_ITEMS), _KEPT_ERRORS),
            **RESPONSE_ID,
        },
    }


def _models() -> dict[str, Any]:
    """Models and their tokenizers."""
    return {
        "/tokenize": _post("tokenize", TokenizeRequest, _TOKENS, _BODY_ERRORS),
        "/detokenize": _post("detokenize", DetokenizeRequest, _TEXT, _BODY_ERRORS),
        "/v1/models": _get("models", _json(_MODELS), _NOT_READY),
        "/v1/models/{name}": {
            **_get("model", _json(_MODEL), {404: _BODY_ERRORS[404], **_NOT_READY}),
            **in_path("name"),
        },
        **{path: _get("model_info", _json(MODEL_INFO), _NAMED_MODEL_ERRORS) for path in MODEL_INFOS},
        **{path: _get("server_info", _json(SERVER_INFO), _NAMED_MODEL_ERRORS) for path in SERVER_INFOS},
        "/tokenizer_info": _get("tokenizer_info", _json(_TOKENIZER), {404: "Without the flag", **_NOT_READY}),
    }


def _operation() -> dict[str, Any]:
    """For operators: health, debugging, administration, pages."""
    return {
        "/health": _get("health", _json(_STATUS)),
        "/ping": {**_get("ping", _json(_STATUS)), "post": _get("ping_post", _json(_STATUS))["get"]},
        "/ready": _get("ready", _json(_STATUS), _NOT_READY),
        "/health_generate": _get("health_generate", _json(_STATUS), _NOT_READY),
        "/load": _get("load", _json(_LOAD)),
        "/debug/nodes": _get("nodes", _json(NODES)),
        SNAPSHOT_PATH: _get("debug_console", _json(SNAPSHOT)),
        REQUESTS: {**_get("debug_requests", _json(RECENT), {400: _BODY_ERRORS[400]}), **LIMIT},
        f"{REQUESTS}/{{request_id}}": {
            **_get("debug_request", _json(TIMELINES), {404: "It is not among those remembered"}),
            **REQUEST_ID,
        },
        ADMIN: {
            **_get("admin_nodes", _json(ADMIN_NODES), ADMIN_ERRORS),
            **_post("add_node", NodeRequest, NODE, {**_BODY_ERRORS, **ADMIN_ERRORS}),
        },
        f"{ADMIN}/{{node}}": {
            "delete": {"operationId": "remove_node", "responses": _responses(_json(NODE), NAMED_NODE_ERRORS)},
            **NODE_NAME,
        },
        f"{ADMIN}/{{node}}/drain": {
            "post": {"operationId": "drain_node", "responses": _responses(_json(NODE), NAMED_NODE_ERRORS)},
            **NODE_NAME,
        },
        "/debug/prefix_index": _get("prefix_index", _json(_PREFIX_INDEX)),
        "/version": _get("version", _json(_VERSION)),
        "/metrics": _get("metrics", {"text/plain": {"schema": _STRING}}),
        "/openapi.json": _get("openapi", _json(_OBJECT)),
        "/docs": _get("docs", {"text/html": {"schema": _STRING}}),
        "/": _get("console", {"text/html": {"schema": _STRING}}, _NO_CONSOLE),
        f"{CONSOLE_FOLDER}{{file}}": {**_get("console_file", {"*/*": {}}, _NO_CONSOLE), **FILE},
    }


def routes(root_path: str) -> APIRouter:
    """`root_path`: the prefix at which clients find the API, if they do."""
    servers = {"servers": [{"url": root_path}]} if root_path else {}
    document, router = {**describe(), **servers}, APIRouter()

    async def openapi() -> JSONResponse:
        return JSONResponse(document)

    router.add_api_route("/openapi.json", openapi, methods=["GET", "HEAD"])
    return router


def _json(schema: dict[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}


def _responses(content: dict[str, Any], errors: dict[int, str], failure: str = _OPENAI) -> dict[str, Any]:
    error = _json({"$ref": _REF.format(model=failure)})
    failures = {str(status): {"description": text, "content": error} for status, text in errors.items()}
    return {"200": {"description": "The answer", "content": content}, **failures}


def _get(name: str, content: dict[str, Any], errors: dict[int, str] | None = None) -> dict[str, Any]:
    return {"get": {"operationId": name, "responses": _responses(content, errors or {})}}


def _post(
    name: str,
    body: type[BaseModel],
    answer: dict[str, Any],
    errors: dict[int, str],
    streams: bool = False,
    failure: str = _OPENAI,
) -> dict[str, Any]:
    """`streams`: with `stream` in the body, the answer is a stream of events."""
    content = _json(answer)
    if streams:
        content["text/event-stream"] = {}
    request = {"required": True, "content": _json({"$ref": _REF.format(model=body.__name__)})}
    return {"post": {"operationId": name, "requestBody": request, "responses": _responses(content, errors, failure)}}
