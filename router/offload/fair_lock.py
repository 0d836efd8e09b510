"""A lock that clients get in turn, however many of one client's requests wait for it."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable
from weakref import WeakValueDictionary


class FairLock:
    """Each client has one request in the queue for it; the others of that client wait until that one is done."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._of_clients = WeakValueDictionary[Hashable, asyncio.Lock]()  # those that somebody has, or waits for

    def of(self, client: Hashable) -> ClientLock:
        """For one request of that client."""
        own = self._of_clients.setdefault(client, asyncio.Lock())
        return ClientLock(own, self._lock)


class ClientLock:
    """Both of these locks, in this order. To be acquired and released once."""

    def __init__(self, own: asyncio.Lock, shared: asyncio.Lock) -> None:
        self._own = own
        self._shared = shared

    async def acquire(self) -> None:
        await self._own.acquire()
        try:
            await self._shared.acquire()
        except BaseException:
            self._own.release()
            raise

    def release(self) -> None:
        self._shared.release()
        self._own.release()
