"""A router with scripted nodes that all tests of a file share: those of the Responses API, over HTTP and WebSockets.

They run on the fixtures' loop, with `pytestmark = on_shared_loop`.
"""

import openai
import pytest_asyncio

from tests.router.conftest import shared_fixtures
from tests.router.http.tool_chats import shared_with_tools

shared = shared_with_tools("hello world")
nodes, router, client = shared_fixtures()


@pytest_asyncio.fixture(loop_scope="module")
async def official(router, nodes):
    async with openai.AsyncOpenAI(base_url=f"{router.http}/v1", api_key="none", max_retries=0) as client:
        yield client
