"""Silence is a peer's, and not our own deafness."""

from __future__ import annotations

import asyncio
import gc
import time
import weakref

import pytest

from baton.rpc.silence import NUM_SLICES, until_silent

LIMIT_S = 0.2


async def test_silence_ends_the_body() -> None:
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        async with until_silent(LIMIT_S):
            await asyncio.Event().wait()
    assert time.monotonic() - began >= LIMIT_S * 0.9


async def test_each_word_is_heard() -> None:
    async with until_silent(LIMIT_S) as silence:
        loop = asyncio.get_running_loop()
        end = loop.time() + 2 * LIMIT_S
        while loop.time() < end:
            silence.heard()
            await asyncio.sleep(0)


async def test_whoever_stood_still_has_heard_nobody() -> None:
    """However long it was, it counts as one slice."""
    said = asyncio.Event()
    async with until_silent(LIMIT_S) as silence:
        asyncio.get_running_loop().call_later(LIMIT_S / NUM_SLICES / 2, said.set)
        stand_still(3 * LIMIT_S)
        await said.wait()
        silence.heard()


class Call:
    """What a body reads."""


async def test_a_body_that_is_cancelled_is_no_garbage() -> None:
    """Else a connection to a node that was removed stays open until garbage is collected."""
    reads = asyncio.Event()

    async def read(call: Call) -> None:
        async with until_silent(60.0) as silence:
            silence.heard()
            reads.set()
            await asyncio.Event().wait()

    call = Call()
    kept, task = weakref.ref(call), asyncio.create_task(read(call))
    await reads.wait()
    gc.disable()
    try:
        task.cancel()
        await asyncio.wait([task])
        del call, task
        assert kept() is None
    finally:
        gc.enable()


def stand_still(seconds: float) -> None:
    """What a long call without an await does to the event loop."""
    time.sleep(seconds)
