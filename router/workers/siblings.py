"""What the workers of a router tell each other, over a Unix socket each, for pages that speak of all of them.

worker i --a question, such as "load", in a line--> worker j --JSON--> worker i, for the page that was asked of worker i
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baton.address import HostPort

log = logging.getLogger(__name__)

ANSWER_S = 2.0
_MAX_BYTES = 16 * 2**20


@dataclass(frozen=True, slots=True)
class WorkerPlace:
    """Which of `count` workers this process is. `directory` is the folder of their sockets."""

    index: int
    count: int
    directory: Path

    def socket_of(self, index: int) -> str:
        return str(self.directory / f"{index}.sock")


class Siblings:
    """This worker's view of all workers; `place` None: it is alone. `answers`: what it tells about itself, by question,
    to which each page adds its own. A question may have an argument behind a space."""

    def __init__(self, place: WorkerPlace | None = None) -> None:
        self.place = place
        self.answers: dict[str, Callable[..., Any]] = {}
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        if self.place is None:
            return
        path = self.place.socket_of(self.place.index)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)  # noqa: PTH108  (a quick call, of an earlier run of this worker)
        self._server = await asyncio.start_unix_server(self._answer, path)

    def close(self) -> None:
        if self._server is not None:
            self._server.close()

    async def ask(self, question: str) -> dict[int, Any]:
        """Every worker's answer by its index, with this one's; None for one that gave none in time."""
        if (place := self.place) is None:
            return {0: self._tell(question)}
        indexes = range(place.count)
        return dict(zip(indexes, await asyncio.gather(*(self._ask(place, i, question) for i in indexes)), strict=True))

    async def _ask(self, place: WorkerPlace, index: int, question: str) -> Any:
        if index == place.index:
            return self._tell(question)
        try:
            async with asyncio.timeout(ANSWER_S):
                reader, writer = await asyncio.open_unix_connection(place.socket_of(index), limit=_MAX_BYTES)
                with contextlib.closing(writer):
                    writer.write(f"{question}\n".encode())
                    return json.loads(await reader.read())
        except (OSError, TimeoutError, ValueError) as error:
            log.warning("worker=%d does not tell its %s: %r", index, question, error)
            return None

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer), contextlib.suppress(OSError, TimeoutError, ValueError):
            async with asyncio.timeout(ANSWER_S):
                question = (await reader.readline()).decode().strip()
                if question.partition(" ")[0] in self.answers:
                    writer.write(json.dumps(self._tell(question)).encode())
                    await writer.drain()

    def _tell(self, question: str) -> Any:
        name, _, argument = question.partition(" ")
        return self.answers[name](argument) if argument else self.answers[name]()


@dataclass(frozen=True, slots=True)
class WorkerContext:
    """What a worker gets from its supervisor: its place, and the addresses that it shares with the other workers."""

    place: WorkerPlace
    http: HostPort
    grpc: HostPort
