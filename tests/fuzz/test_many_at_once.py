"""Thousands of requests at once: each is answered or refused, and nothing is kept of them."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import resource
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from router.generation import Generation
from router.requests.request_state import RequestState
from tests.fuzz.served import CASE_S, serving
from tests.router.conftest import Router, says

NUM_WARM = 40
NUM_DESCRIPTORS = 19_900
"""Here: a router leaves half of them to its gRPC port."""


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


async def crowd(router: Router, count: int, on_end: Callable[[Counter[str]], None]) -> Counter[str]:
    """How so many requests at once end."""
    command = [sys.executable, "-m", "tests.fuzz.crowd", str(router.server.http_address), router.grpc, str(count)]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    ends = Counter[str]()
    assert process.stdout
    async for line in process.stdout:
        ends[line.decode().strip()] += 1
        on_end(ends)
    assert await process.wait() == 0
    return ends


@pytest.mark.timeout(180)
@pytest.mark.parametrize("count", [1_500, pytest.param(10_000, marks=pytest.mark.full)])
async def test_many_at_once(count: int) -> None:
    """The nodes hold all answers until the refused have heard so, so that all others, a fifth, are there at the same
    time. Of Python's memory less than a block is kept for each request, which has hundreds while it lives. (Resident
    memory does not tell: an allocator keeps the free ones between two that are used.)"""
    num_answered = count // 5
    hold = asyncio.Event()
    with descriptors(NUM_DESCRIPTORS):
        # Timelines are kept on purpose, up to a number of bytes.
        async with serving(max_num_requests=num_answered, max_timeline_bytes=0) as router:
            router.nodes.script = says("hello world")
            await crowd(router, NUM_WARM, lambda ends: None)  # what is imported and compiled once stays
            await router.idle()
            router.nodes.script = says("hello world", hold=hold)
            before = num_descriptors(), num_blocks(), num_alive(Generation, RequestState)
            num_refused = count - num_answered
            ends = await crowd(router, count, lambda ends: hold.set() if ends.total() >= num_refused else None)
            assert ends == {"200": num_answered, "429": count - num_answered}
            await router.idle()
            async with asyncio.timeout(CASE_S):
                while num_descriptors() > before[0] + 8:  # noqa: ASYNC110 - connections close behind their last bytes
                    await asyncio.sleep(0.01)
            router.nodes.prefills.clear()
            for node in router.nodes.nodes:
                node._attempts.clear()
            assert num_alive(Generation, RequestState) == before[2]
            assert num_blocks() - before[1] < count
