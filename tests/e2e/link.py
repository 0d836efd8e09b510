"""A TCP connection's path that can be cut, or stall, between processes that are well."""

from __future__ import annotations

import asyncio
import contextlib
from types import TracebackType

from baton.address import HostPort

CHUNK_BYTES = 1 << 16


class Link:
    """Passes on what arrives at `address`, both ways. To be used as `async with`; `target` may be set later."""

    def __init__(self) -> None:
        self.target: HostPort | None = None
        self.address: HostPort
        self._server: asyncio.Server
        self._connections: set[asyncio.Task[None]] = set()
        self._flows = asyncio.Event()
        self._flows.set()
        self._is_cut = False

    async def __aenter__(self) -> Link:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.address = HostPort("127.0.0.1", self._server.sockets[0].getsockname()[1])
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.close()
        await asyncio.sleep(0)  # for those that were accepted just now
        await self._end_connections()

    async def cut(self) -> None:
        """Close all connections, and each new one at once."""
        self._is_cut = True
        await self._end_connections()

    def stall(self) -> None:
        """All bytes wait; no end notices."""
        self._flows.clear()

    def heal(self) -> None:
        self._is_cut = False
        self._flows.set()

    async def _end_connections(self) -> None:
        ending = list(self._connections)
        for task in ending:
            task.cancel()
        await asyncio.gather(*ending, return_exceptions=True)

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._pass_on(reader, writer))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)
        task.add_done_callback(lambda _: writer.transport.abort())  # also if it was cancelled before it began

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert self.target
        writers = [writer]
        try:
            with contextlib.suppress(OSError):
                if not self._is_cut:
                    there, back = await asyncio.open_connection(self.target.host, self.target.port)
                    writers.append(back)
                    both = (asyncio.create_task(self._copy(*way)) for way in ((reader, back), (there, writer)))
                    await _first_of(*both)
        finally:
            for each in writers:
                each.transport.abort()

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(CHUNK_BYTES):
                await self._flows.wait()
                writer.write(data)
                await writer.drain()


async def _first_of(*tasks: asyncio.Task[None]) -> None:
    """Wait for one, and end the others."""
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
