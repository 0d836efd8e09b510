"""While the handoff hangs, the prefill node's token is with the client, or waits for the decode node, as asked for."""

from __future__ import annotations

import asyncio

import pytest

from tests.e2e.client import Client
from tests.e2e.scenes import Director, Fragile

pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize("first_token", ["prefill", "decode"])
async def test_who_streams_the_first_token(fragile: Fragile, first_token: str) -> None:
    """The decode node hangs in the midst of the handoff, when the router has taken in the first token."""
    router = fragile.pair if first_token == "prefill" else fragile.late
    async with Client(router) as client:
        scene = await Director(fragile, router, client, stream=True).scene("handing_off")
        request = scene.request.request
        told = await asyncio.to_thread(router.metric, "baton:time_to_first_token_seconds_count")
        if first_token == "prefill":
            await request.until(1)
        assert sum(map(len, request.answer.tokens.values())) == (first_token == "prefill")
        scene.thaw()
        answer = await request.end()
        assert scene.request.is_right(answer)
        assert answer.timings["attempts"] == 1
        told_since = await asyncio.to_thread(router.metric, "baton:time_to_first_token_seconds_count") - told
        assert told_since == (first_token == "decode")
