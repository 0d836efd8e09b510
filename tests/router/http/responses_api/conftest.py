"""A router with scripted nodes that all tests of a file share: those of the Responses API, over HTTP and WebSockets.

They run on the fixtures' loop, with `pytestmark = on_shared_loop`.
"""

from collections.abc import AsyncIterator

import httpx
import openai
import pytest
import pytest_asyncio

from tests.router.conftest import Router, Shared, shared_by_all
from tests.router.fake_node import FakeCluster
from tests.router.http.tool_chats import PARSERS, nodes_with_tools


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared() -> AsyncIterator[Shared]:
    async with nodes_with_tools("hello world") as nodes, shared_by_all(nodes, **PARSERS) as shared:
        yield shared


@pytest.fixture
def nodes(shared: Shared) -> FakeCluster:
    return shared.nodes_anew()


@pytest.fixture
def router(shared: Shared, nodes: FakeCluster) -> Router:
    return shared.router


@pytest.fixture
def client(shared: Shared, nodes: FakeCluster) -> httpx.AsyncClient:
    return shared.client


@pytest_asyncio.fixture(loop_scope="module")
async def official(router, nodes):
    async with openai.AsyncOpenAI(base_url=f"{router.http}/v1", api_key="none", max_retries=0) as client:
        yield client
