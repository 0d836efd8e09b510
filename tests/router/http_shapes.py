"""What tests of the HTTP API share."""

import json
from typing import Any

import httpx

CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}

SAMPLING: dict[str, Any] = {
    "temperature": 0.25,
    "top_p": 0.5,
    "top_k": 7,
    "min_p": 0.125,
    "repetition_penalty": 1.5,
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "seed": 11,
    "max_tokens": 9,
    "min_tokens": 2,
    "ignore_eos": True,
}


def error_of(response: httpx.Response) -> dict:
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


def events(text: str) -> list[dict[str, Any]]:
    """What a whole stream of server-sent events says, without comments."""
    lines = [line for line in text.split("\n\n") if line]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1] if not line.startswith(":")]


def allowed(mode: str, *tools: Any) -> dict[str, Any]:
    """A `tool_choice` that leaves these tools."""
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": list(tools)}}
