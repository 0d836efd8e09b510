"""10,000 requests at once: each is answered or refused, and nothing is kept of them."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import resource
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from router.generation import Generation
from router.life import RequestLife
from tests.fuzz.crowd import NUM_GRPC, NUM_HTTP
from tests.fuzz.served import CASE_S, serving
from tests.router.conftest import says

NUM_REQUESTS = NUM_HTTP + NUM_GRPC
NUM_DESCRIPTORS = 19_900
"""Here: a router leaves half of them to its gRPC port."""
MAX_NUM_REQUESTS = 2_000
KEPT_BLOCKS = NUM_REQUESTS
"""Of Python's memory: less than one for each request, which has hundreds while it lives. Resident memory does not tell:
an allocator keeps the free ones between two that are used."""


@contextlib.contextmanager
def descriptors(count: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < count:
        pytest.skip(f"{count} descriptors are needed, and {hard} to be had")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, count), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def num_blocks() -> int:
    gc.collect()
    return sys.getallocatedblocks()


def num_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def num_alive(*kinds: type) -> int:
    gc.collect()
    return sum(type(each) in kinds for each in gc.get_objects())


@pytest.mark.timeout(180)
async def test_many_at_once() -> None:
    """The nodes hold all answers until the refused have heard so, so that all others are there at the same time."""
    hold = asyncio.Event()
    with descriptors(NUM_DESCRIPTORS):
        async with serving(max_num_requests=MAX_NUM_REQUESTS) as router:
            router.nodes.script = says("hello world", hold=hold)
            before = num_descriptors(), num_blocks(), num_alive(Generation, RequestLife)
            command = [sys.executable, "-m", "tests.fuzz.crowd", str(router.server.http_address), router.grpc]
            crowd = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
            ends = Counter[str]()
            assert crowd.stdout
            async for line in crowd.stdout:
                ends[line.decode().strip()] += 1
                if ends.total() >= NUM_REQUESTS - MAX_NUM_REQUESTS:
                    hold.set()
            assert await crowd.wait() == 0
            assert ends == {"200": MAX_NUM_REQUESTS, "429": NUM_REQUESTS - MAX_NUM_REQUESTS}
            await router.idle()
            async with asyncio.timeout(CASE_S):
                while num_descriptors() > before[0] + 8:  # noqa: ASYNC110 - connections close behind their last bytes
                    await asyncio.sleep(0.01)
            router.nodes.prefills.clear()
            for node in router.nodes.nodes:
                node._works.clear()
            assert num_alive(Generation, RequestLife) == before[2]
            assert num_blocks() - before[1] < KEPT_BLOCKS
