"""A router with scripted nodes behind it: in-process, on real sockets."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any, NamedTuple

import httpx
import pytest
import pytest_asyncio

from baton.address import HostPort
from baton.messages import Prefill
from baton.node_info import NodeRole
from router.server import RouterServer
from router.settings import RouterSettings
from tests.router.fake_node import PATIENCE_S, Answer, FakeCluster
from tests.router.tiny_tokenizer import IM_END, tiny_tokenizer

ANY_PORT = HostPort("127.0.0.1", 0)


def says(text: str, **more: Any) -> Callable[[Prefill], Answer]:
    """A script: every sample is this text and then EOS."""
    tokens = (*tiny_tokenizer().encode(text, False), IM_END)
    return lambda prefill: Answer(tokens=(tokens,), **more)


_LOOK_AGAIN_S = 0.2


class Router:
    """A running router, and the nodes behind it."""

    def __init__(self, nodes: FakeCluster, **settings: object) -> None:
        self.nodes = nodes
        self._settings = settings

    async def start(self) -> None:
        settings = {"http": ANY_PORT, "grpc": ANY_PORT, "drain_timeout": 1.0, **self._settings}
        addresses = {role.value: self.nodes.addresses(role) for role in NodeRole}
        fields: dict[str, Any] = {**addresses, **settings}
        self.server = RouterServer(RouterSettings(**fields))
        await self.server.start()
        self.http = f"http://{self.server.http_address}"
        self.grpc = str(self.server.grpc_address)

    async def ready(self, wanted: bool = True) -> None:
        """Wait until it is ready, and nothing is missing; or until it is not."""
        await self.until(lambda: (self.server.cluster.readiness().status == "ready") is wanted)

    async def until(self, holds: Callable[[], object]) -> None:
        """Wait for nodes to come or go, from the router's view."""
        changed = asyncio.Event()
        self.server.cluster.watch(lambda _: changed.set())
        async with asyncio.timeout(PATIENCE_S):
            while not holds():
                changed.clear()
                with contextlib.suppress(TimeoutError):  # a link's reason may change without the cluster's readiness
                    await asyncio.wait_for(changed.wait(), _LOOK_AGAIN_S)

    def problems(self) -> str:
        return "; ".join(link.problem for link in self.server.cluster.links if link.problem)

    async def idle(self) -> None:
        """Wait until no request is live."""
        await self.until(lambda: not self.server.core.requests)

    async def stop(self) -> None:
        hurry = asyncio.Event()
        hurry.set()
        await self.server.stop(hurry)


@contextlib.asynccontextmanager
async def running_router(nodes: FakeCluster, **settings: object) -> AsyncIterator[Router]:
    """Ready, in front of `nodes`."""
    router = Router(nodes, **settings)
    await router.start()
    try:
        await router.ready()
        yield router
    finally:
        await router.stop()


class Shared(NamedTuple):
    """A router for all tests of a module, which run on its loop (`on_shared_loop`)."""

    router: Router
    client: httpx.AsyncClient
    script: Callable[[Prefill], Answer]

    def nodes_anew(self) -> FakeCluster:
        """For the next test: the nodes answer as at first, and have heard nothing yet."""
        nodes = self.router.nodes
        nodes.script = self.script
        nodes.prefills.clear()
        nodes.aborts.clear()
        return nodes


@contextlib.asynccontextmanager
async def shared_by_all(nodes: FakeCluster, **settings: object) -> AsyncIterator[Shared]:
    """What a module's fixture yields. It is for tests that only ask: whatever else they do to the router or its nodes
    would be there for those after them."""
    async with (
        running_router(nodes, **settings) as router,
        httpx.AsyncClient(base_url=router.http, timeout=20) as client,
    ):
        yield Shared(router, client, nodes.script)
        await router.idle()


def shared_fixtures() -> tuple[Any, Any, Any]:
    """The fixtures `nodes`, `router` and `client` of a module whose tests share its fixture `shared`: these names are
    to be given to them there."""

    @pytest.fixture
    def nodes(shared: Shared) -> FakeCluster:
        return shared.nodes_anew()

    @pytest.fixture
    def router(shared: Shared, nodes: FakeCluster) -> Router:
        return shared.router

    @pytest.fixture
    def client(shared: Shared, nodes: FakeCluster) -> httpx.AsyncClient:
        return shared.client

    return nodes, router, client


@contextlib.asynccontextmanager
async def two_nodes() -> AsyncIterator[FakeCluster]:
    """One prefill and one decode node, which say hello."""
    cluster = FakeCluster(says("hello world"))
    await cluster.add(NodeRole.PREFILL)
    await cluster.add(NodeRole.DECODE)
    yield cluster
    await cluster.close()


@pytest.fixture
async def nodes() -> AsyncIterator[FakeCluster]:
    async with two_nodes() as nodes:
        yield nodes


@pytest.fixture
async def router(nodes: FakeCluster) -> AsyncIterator[Router]:
    async with running_router(nodes) as router:
        yield router


@pytest.fixture
async def client(router):
    async with httpx.AsyncClient(base_url=router.http, timeout=20) as client:
        yield client


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared() -> AsyncIterator[Shared]:
    async with two_nodes() as nodes, shared_by_all(nodes) as shared:
        yield shared


@pytest.fixture(scope="module")
def shared_client(shared: Shared) -> httpx.AsyncClient:
    """For requests that are refused and reach no node."""
    return shared.client


on_shared_loop = pytest.mark.asyncio(loop_scope="module")
