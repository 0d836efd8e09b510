"""What tests of the HTTP API share."""

import httpx

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}


def error_of(response: httpx.Response) -> dict:
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error
