"""A router with scripted nodes that all tests of a file share: those of the Responses API, over HTTP and WebSockets.

They run on the fixtures' loop, with `pytestmark = on_shared_loop`.
"""

from collections.abc import AsyncIterator

import httpx
import openai
import pytest
import pytest_asyncio

from tests.router.conftest import Router, running_router, says
from tests.router.fake_node import FakeCluster
from tests.router.http.tool_chats import PARSERS, nodes_with_tools


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster() -> AsyncIterator[FakeCluster]:
    async with nodes_with_tools("hello world") as cluster:
        yield cluster


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def router(cluster: FakeCluster) -> AsyncIterator[Router]:
    async with running_router(cluster, **PARSERS) as router:
        yield router


@pytest.fixture
def nodes(cluster: FakeCluster) -> FakeCluster:
    """As if nothing had happened."""
    cluster.script = says("hello world")
    cluster.prefills.clear()
    cluster.aborts.clear()
    return cluster


@pytest_asyncio.fixture(loop_scope="module")
async def client(router, nodes):
    async with httpx.AsyncClient(base_url=router.http, timeout=20) as client:
        yield client


@pytest_asyncio.fixture(loop_scope="module")
async def official(router, nodes):
    async with openai.AsyncOpenAI(base_url=f"{router.http}/v1", api_key="none", max_retries=0) as client:
        yield client
