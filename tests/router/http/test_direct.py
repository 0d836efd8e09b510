"""Handlers that are called past the framework: what their own mistakes look like to a client."""

import json
from typing import Any

from fastapi import Request
from fastapi.responses import Response
from starlette.types import Message, Receive, Scope, Send

from router.http.direct import DirectRoutes
from router.http.scope import RequestScope

PATH = "/v1/chat/completions"
HEAD: Message = {"type": "http.response.start", "status": 200, "headers": []}


class BreaksOff(Response):
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send(HEAD)
        raise RuntimeError("odd")


async def breaks(request: Request) -> Response:
    raise RuntimeError("odd")


async def begins(request: Request) -> Response:
    return BreaksOff()


async def framework(scope: Scope, receive: Receive, send: Send) -> None:
    raise AssertionError("not called")


async def receive() -> Message:
    return {"type": "http.request"}


async def sent_by(handler: Any) -> list[Message]:
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": PATH, "headers": [], "client": None, "state": {}}
    await RequestScope(DirectRoutes(framework, {PATH: handler}))(scope, receive, send)
    return sent


async def test_a_mistake_of_ours_is_an_answer_in_the_form_of_the_api(caplog):
    head, body = await sent_by(breaks)
    assert head["status"] == 500
    assert json.loads(body["body"])["error"]["code"] == "internal"
    assert f"internal error in POST {PATH}" in caplog.text


async def test_an_answer_that_breaks_off_is_followed_by_no_other(caplog):
    assert await sent_by(begins) == [HEAD]
    assert f"internal error in POST {PATH}" in caplog.text
