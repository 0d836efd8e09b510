"""Chats as requests of the other APIs, and what the answers say, in a form that does not depend on the API."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence

import grpc

from baton.v1 import generation_pb2 as pb
from baton.v1 import generation_pb2_grpc, node_pb2
from baton.wire import unpack_tokens
from baton.wire.sampling import write_structured
from router.http.anthropic.schemas import MessagesRequest
from router.http.parse import parse_begun
from router.http.responses_api.schemas import LOGPROBS
from router.http.responses_api.unsupported import SHARED
from router.text.structured_output import structured_output_of
from tests.e2e.cluster import PATIENCE_S
from tests.e2e.parameters import Choice, Fields

RESPONSES, MESSAGES, TOKENS, SGLANG = "/v1/responses", "/v1/messages", "/inference/v1/generate", "/generate"
_TEMPLATE_FIELDS = ("messages", "chat_template", "chat_template_kwargs", "documents", "reasoning_effort")


# ---- requests; None: the API cannot say that ----


def as_tokens(chat: Fields) -> Fields | None:
    """A router renders it; what cannot be is known beforehand."""
    return None if {"use_beam_search", "best_of"} & chat.keys() else chat


def as_response(chat: Fields) -> Fields | None:
    names = {"messages": "input", "max_tokens": "max_output_tokens"}
    same = SHARED | {"top_logprobs", "chat_template_kwargs", "tool_choice"}
    body: Fields = {"store": False}
    for name, value in chat.items():
        match name:
            case "return_token_ids":
                pass
            case "logprobs":
                body["include"] = [LOGPROBS]
            case "tools":
                body[name] = [{"type": "function", **tool["function"]} for tool in value]
            case "tool_choice" if isinstance(value, dict):
                body[name] = {"type": "function", **value["function"]}
            case "response_format":
                body["text"] = {"format": {"type": value["type"], **value.get("json_schema", {})}}
            case _ if name in names or name in same:
                body[names.get(name, name)] = value
            case _:
                return None
    return body


def as_message(chat: Fields) -> Fields | None:
    body: Fields = {}
    for name, value in chat.items():
        match name:
            case "return_token_ids":
                pass
            case "stop":
                body["stop_sequences"] = value
            case "tools":
                functions = [tool["function"] for tool in value]
                body[name] = [{"name": one["name"], "input_schema": one["parameters"]} for one in functions]
            case "tool_choice":
                body[name] = {"type": "any"} if value == "required" else {"type": "tool", **value["function"]}
            case _ if name in MessagesRequest.model_fields:
                body[name] = value
            case _:
                return None
    return body


def as_grpc(chat: Fields) -> pb.GenerateRequest | None:
    request = pb.GenerateRequest()
    for name, value in chat.items():
        match name:
            case "return_token_ids" | "top_logprobs":
                pass
            case "logprobs":
                request.logprobs = chat["top_logprobs"]
            case "logit_bias":
                request.logit_bias.update({int(token): bias for token, bias in value.items()})
            case "structured_outputs":
                wanted = structured_output_of(None, value, {})
                assert wanted
                request.structured_outputs.CopyFrom(write_structured(wanted))
            case "stop" | "stop_token_ids" | "bad_words" | "allowed_token_ids":
                getattr(request, name).extend([value] if isinstance(value, str) else value)
            case _ if name in _TEMPLATE_FIELDS:
                pass
            case _ if hasattr(request, name) and isinstance(value, int | float | str):
                setattr(request, name, value)
            case _:
                return None
    request.chat.json = json.dumps({name: chat[name] for name in _TEMPLATE_FIELDS if name in chat})
    return request


# ---- answers: each API says some of what a chat does ----


def said_in_chat(body: Fields) -> Fields:
    choice = Choice()
    choice.add(body["choices"][0])
    said = choice.said
    usage = body["usage"]
    calls = said.get("tool_calls", [])
    return {
        "text": said.get("content") or "",
        "calls": [[call["name"], parse_begun(call["arguments"])] for call in calls],
        "arguments": [call["arguments"] for call in calls],
        "is_cut_off": said["finish_reason"] == "length",
        "stop": said.get("stop_reason"),
        "stop_string": said["stop_reason"] if isinstance(said.get("stop_reason"), str) else None,
        "usage": [usage["prompt_tokens"], usage["completion_tokens"]],
        "token_ids": said["token_ids"],
        "entries": [] if calls else said.get("logprobs.content", []),
        "logprobs": [entry["logprob"] for entry in said.get("logprobs.content", [])],
    }


def said_in_tokens(pieces: Sequence[Fields]) -> Fields:
    """`pieces`: the whole, or the chunks."""
    choice = Choice()
    for piece in pieces:
        for one in piece["choices"]:
            choice.add(one)
    said = choice.said
    return {
        "token_ids": said["token_ids"],
        "is_cut_off": said["finish_reason"] == "length",
        "logprobs": [entry["logprob"] for entry in said.get("logprobs.content", [])],
    }


def said_in_completions(body: Fields) -> list[Fields]:
    """Of each answer."""
    return [
        {
            "text": choice["text"],
            "token_ids": choice["token_ids"],
            "is_cut_off": choice["finish_reason"] == "length",
            "logprobs": choice["logprobs"]["token_logprobs"],
            "prompt_logprobs": [entry and next(iter(entry.values()))["logprob"] for entry in choice["prompt_logprobs"]],
        }
        for choice in body["choices"]
    ]


def said_in_sglang(pieces: Sequence[Fields]) -> list[Fields]:
    """`pieces`: the whole answers, or the events, of which the last of each answer has all."""
    whole = {piece.get("index", place): piece for place, piece in enumerate(pieces)}
    return [
        {
            "text": answer["text"],
            "token_ids": answer["output_ids"],
            "is_cut_off": answer["meta_info"]["finish_reason"]["type"] == "length",
            "logprobs": [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]],
            "prompt_logprobs": [entry[0] for entry in answer["meta_info"]["input_token_logprobs"]],
        }
        for _, answer in sorted(whole.items())
    ]


def said_in_response(pieces: Sequence[Fields]) -> Fields:
    """`pieces`: the whole, or the events."""
    body = pieces[0] if len(pieces) == 1 else _told(pieces)
    messages = [item["content"][0] for item in body["output"] if item["type"] == "message"]
    calls = [item for item in body["output"] if item["type"] == "function_call"]
    usage = body["usage"]
    return {
        "text": "".join(part["text"] for part in messages),
        "calls": [[call["name"], parse_begun(call["arguments"])] for call in calls],
        "arguments": [call["arguments"] for call in calls],
        "is_cut_off": body["status"] == "incomplete",
        "usage": [usage["input_tokens"], usage["output_tokens"]],
        "entries": [] if calls else [entry for part in messages for entry in part["logprobs"]],
    }


def _told(events: Sequence[Fields]) -> Fields:
    """The response that a stream ends with, which is what its deltas add up to."""
    told: dict[str, str] = {}
    for number, event in enumerate(events):
        assert event["sequence_number"] == number
        if event["type"].endswith(".delta"):
            told[event["item_id"]] = told.get(event["item_id"], "") + event["delta"]
    body: Fields = events[-1]["response"]
    for item in body["output"]:
        text = item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]
        assert told.pop(item["id"], "") == text
    assert not told
    return body


def said_in_message(pieces: Sequence[Fields]) -> Fields:
    """`pieces`: the whole, or the events."""
    body = pieces[0] if len(pieces) == 1 else _added_up(pieces)
    usage = body["usage"]
    return {
        "text": "".join(block["text"] for block in body["content"] if block["type"] == "text"),
        "calls": [[block["name"], block["input"]] for block in body["content"] if block["type"] == "tool_use"],
        "is_cut_off": body["stop_reason"] == "max_tokens",
        "stop_string": body["stop_sequence"],
        "usage": [usage["input_tokens"] + usage["cache_read_input_tokens"], usage["output_tokens"]],
    }


def _added_up(events: Sequence[Fields]) -> Fields:
    body: Fields = copy.deepcopy(events[0]["message"])
    inputs: dict[int, str] = {}
    for event in events:
        match event["type"]:
            case "content_block_start":
                assert event["index"] == len(body["content"])
                body["content"].append(copy.deepcopy(event["content_block"]))
            case "content_block_delta" if event["delta"]["type"] == "text_delta":
                body["content"][event["index"]]["text"] += event["delta"]["text"]
            case "content_block_delta":
                assert event["delta"]["type"] == "input_json_delta"
                inputs[event["index"]] = inputs.get(event["index"], "") + event["delta"]["partial_json"]
            case "message_delta":
                body |= event["delta"] | {"usage": event["usage"]}
    for index, text in inputs.items():
        body["content"][index]["input"] = parse_begun(text)
    return body


async def said_over_grpc(stub: generation_pb2_grpc.GenerationStub, request: pb.GenerateRequest) -> Fields | str:
    """`str`: refused."""
    try:
        responses = [response async for response in stub.Generate(request, timeout=PATIENCE_S)]
    except grpc.aio.AioRpcError as error:
        if error.code() is not grpc.StatusCode.INVALID_ARGUMENT:
            raise
        return str(error.details())
    deltas = [response.delta for response in responses if response.HasField("delta")]
    last, usage = deltas[-1], responses[-1].finished.usage
    stop = last.WhichOneof("stop_reason")
    return {
        "text": "".join(delta.text for delta in deltas),
        "is_cut_off": last.finish_reason == node_pb2.FINISH_REASON_LENGTH,
        "stop": stop and getattr(last, stop),
        "usage": [usage.num_prompt_tokens, usage.num_completion_tokens],
        "token_ids": [token for delta in deltas for token in unpack_tokens(delta.token_ids)],
        "logprobs": [entry.logprob for delta in deltas for entry in delta.logprobs],
    }
