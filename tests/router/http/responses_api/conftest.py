"""A router with scripted nodes that all tests of a file share: those of the Responses API, over HTTP and WebSockets.

They run on the fixtures' loop, with `pytestmark = on_shared_loop`.
"""

from collections.abc import AsyncIterator

import httpx
import openai
import pytest
import pytest_asyncio

from baton.node_info import NodeRole
from tests.router.conftest import Router, says
from tests.router.fake_node import FakeCluster
from tests.router.http.test_tool_calls import TEMPLATE


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster() -> AsyncIterator[FakeCluster]:
    cluster = FakeCluster(says("hello world"))
    for role in NodeRole:
        await cluster.add(role, chat_template=TEMPLATE, max_model_len=4096)
    yield cluster
    await cluster.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def router(cluster: FakeCluster) -> AsyncIterator[Router]:
    router = Router(cluster, tool_call_parser="hermes", enable_auto_tool_choice=True, reasoning_parser="qwen3")
    await router.start()
    await router.ready()
    yield router
    await router.stop()


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
