"""Responses that run in the background: asked for again, cancelled, deleted, and failed."""

import asyncio

import openai
import pytest

from baton.errors import InternalError
from router.http.responses_api import routes
from router.http.responses_api.background import TASK
from tests.router.conftest import on_shared_loop, says
from tests.router.fake_node import Answer
from tests.router.http.responses_api.shapes import HI, PATH
from tests.router.http_shapes import error_of

pytestmark = on_shared_loop


async def ended(official, response_id):
    """The response, once it has ended. (The router runs on this loop.)"""
    async with asyncio.timeout(20):
        for task in asyncio.all_tasks():
            if task.get_name() == TASK:
                await task
    return await official.responses.retrieve(response_id)


async def test_it_is_there_at_once_and_has_its_output_later(official, nodes):
    hold = asyncio.Event()
    nodes.script = says("hello world", hold=hold, hold_at=1)
    begun = await official.responses.create(model="tiny", input="hi", background=True)
    assert (begun.status, begun.background, begun.output) == ("in_progress", True, [])
    assert (await official.responses.retrieve(begun.id)).to_dict() == begun.to_dict()
    with pytest.raises(openai.BadRequestError, match="has the status in_progress"):
        await official.responses.create(model="tiny", input="And?", previous_response_id=begun.id)
    hold.set()
    response = await ended(official, begun.id)
    assert (response.status, response.output_text, response.background) == ("completed", "hello world", True)
    nodes.script = says("more")
    second = await official.responses.create(model="tiny", input="And?", previous_response_id=begun.id)
    assert second.output_text == "more"
    with pytest.raises(openai.BadRequestError, match="that has ended"):
        await official.responses.cancel(begun.id)


async def test_it_may_be_cancelled(official, nodes, router):
    nodes.script = says("hello world", hold=asyncio.Event(), hold_at=1)
    begun = await official.responses.create(model="tiny", input="hi", background=True)
    await nodes.until(lambda: nodes.prefills)
    cancelled = await official.responses.cancel(begun.id)
    assert (cancelled.id, cancelled.status) == (begun.id, "cancelled")
    await nodes.until(lambda: nodes.aborts)
    await router.idle()
    assert (await official.responses.cancel(begun.id)).status == "cancelled"
    assert (await official.responses.retrieve(begun.id)).status == "cancelled"
    with pytest.raises(openai.BadRequestError, match="has the status cancelled"):
        await official.responses.create(model="tiny", input="And?", previous_response_id=begun.id)


async def test_it_ends_when_it_is_deleted(official, client, nodes, router):
    nodes.script = says("hello world", hold=asyncio.Event(), hold_at=1)
    begun = await official.responses.create(model="tiny", input="hi", background=True)
    await official.responses.delete(begun.id)
    await nodes.until(lambda: nodes.aborts)
    await router.idle()
    assert (await client.get(f"{PATH}/{begun.id}")).status_code == 404


async def test_its_failure_is_told_when_it_is_asked_for(official, nodes):
    nodes.script = lambda prefill: Answer(error=InternalError("a mistake"))
    begun = await official.responses.create(model="tiny", input="hi", background=True)
    response = await ended(official, begun.id)
    assert (response.status, response.error.code) == ("failed", "server_error")
    assert "a mistake" in response.error.message


async def test_a_mistake_of_ours_is_a_failure_too(official, monkeypatch, caplog):
    async def breaks(self):
        raise RuntimeError("odd")

    monkeypatch.setattr(routes._WholeResponse, "keep", breaks)
    begun = await official.responses.create(model="tiny", input="hi", background=True)
    response = await ended(official, begun.id)
    assert (response.status, response.error.message) == ("failed", "internal error: RuntimeError")
    assert "internal error" in caplog.text


async def test_what_is_refused_at_once_has_its_status(client):
    response = await client.post(PATH, json={**HI, "background": True, "temperature": -1})
    assert (response.status_code, error_of(response)["param"]) == (400, "temperature")
