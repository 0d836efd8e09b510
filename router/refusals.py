"""Requests that are refused for lack of room or nodes before they are placed: each is counted, where it is refused."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Protocol, TypeVar

from baton.errors import BatonError, Overloaded

OnRefused = Callable[[BatonError], None]
"""Called with the reason for which a request is refused before it is placed, for metrics."""

E = TypeVar("E", bound=BatonError)


class Lock(Protocol):
    """What `asyncio.Lock` and `asyncio.Semaphore` have in common."""

    async def acquire(self) -> object: ...

    def release(self) -> None: ...


def uncounted(error: BatonError) -> None:
    """An OnRefused where nobody counts."""


def counted(error: E, on_refused: OnRefused) -> E:
    """The error, to be raised now that it is counted."""
    on_refused(error)
    return error


@contextlib.asynccontextmanager
async def turn(lock: Lock, wait_s: float, why: str, on_refused: OnRefused) -> AsyncIterator[None]:
    """Holds `lock` within the context. Raises Overloaded, which says `why`, if others keep it for `wait_s` seconds."""
    try:
        async with asyncio.timeout(wait_s):
            await lock.acquire()
    except TimeoutError:
        raise counted(Overloaded(f"{why} for {wait_s:g} s"), on_refused) from None
    try:
        yield
    finally:
        lock.release()
