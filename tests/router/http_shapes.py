"""What tests of the HTTP API share."""

from typing import Any

import httpx

CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}


def error_of(response: httpx.Response) -> dict:
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


def allowed(mode: str, *tools: Any) -> dict[str, Any]:
    """A `tool_choice` that leaves these tools."""
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": list(tools)}}
