"""Requests of one shape: one after another, many at once, or as they come."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import secrets
import time
from collections.abc import Mapping, Sequence
from random import Random
from typing import Any
from urllib.parse import urlsplit

from baton.address import HostPort
from benchmarks.http_stream import Connection, Streamed
from tools import tiny_tasks

POOL_TOKENS = 8192


def address_of(url: str) -> HostPort:
    """Of http://HOST:PORT. Raises ValueError."""
    parts = urlsplit(url)
    if parts.scheme != "http" or not parts.hostname or parts.path not in ("", "/"):
        raise ValueError(f"must be http://HOST:PORT, not {url!r}")
    return HostPort(parts.hostname, parts.port or 80)


class Prompts:
    """Prompts of any length out of tokens that the served model has, each a function of its number."""

    def __init__(self, pool: Sequence[int], seed: int) -> None:
        self._pool = pool
        self._seed = seed

    @classmethod
    async def of(cls, connection: Connection, seed: int) -> Prompts:
        """From what the router's tokenizer makes of generated text."""
        text = " ".join(tiny_tasks.filler(Random(seed), POOL_TOKENS))
        return cls((await connection.ask("/tokenize", {"prompt": text}))["tokens"], seed)

    def make(self, number: int, length: int) -> list[int]:
        return Random(f"{self._seed} {number}").choices(self._pool, k=length)


class Load:
    """Streams of `output_len` tokens for prompts of `input_len`, to the router at `address`."""

    def __init__(self, address: HostPort, prompts: Prompts, input_len: int, output_len: int) -> None:
        self.address = address
        self._prompts = prompts
        self._input_len = input_len
        self._output_len = output_len
        self._numbers = itertools.count()

    def body(self, number: int, **fields: Any) -> dict[str, Any]:
        """Of request `number`. Each call draws a new salt."""
        return {
            "prompt": self._prompts.make(number, self._input_len),
            "max_tokens": self._output_len,
            "ignore_eos": True,
            "temperature": 0,
            "cache_salt": secrets.token_hex(8),
            **fields,
        }

    async def one(self) -> Streamed:
        """A new prompt, on a connection of its own."""
        return (await self.send("/v1/completions", [self.body(next(self._numbers))], 1))[0]

    async def many(self, count: int, concurrency: int) -> list[Streamed]:
        """New prompts."""
        return await self.send("/v1/completions", [self.body(next(self._numbers)) for _ in range(count)], concurrency)

    async def arriving(self, count: int, per_s: float, seed: int) -> list[Streamed]:
        """New prompts at the times of a Poisson process, the same for the same seed, however long the answers take.
        Raises RequestFailed if one fails."""
        bodies = [self.body(next(self._numbers)) for _ in range(count)]
        random, idle, began, at = Random(seed), list[Connection](), time.perf_counter(), 0.0
        answers: dict[int, Streamed] = {}

        async def one(index: int, at: float, stack: contextlib.AsyncExitStack) -> None:
            await asyncio.sleep(began + at - time.perf_counter())
            connection = idle.pop() if idle else await stack.enter_async_context(Connection(self.address))
            answers[index] = await connection.stream("/v1/completions", bodies[index])
            idle.append(connection)

        async with contextlib.AsyncExitStack() as stack, asyncio.TaskGroup() as requests:
            for index in range(count):
                at += random.expovariate(per_s)
                requests.create_task(one(index, at, stack))
        return [answers[index] for index in range(count)]

    async def send(self, path: str, bodies: Sequence[Mapping[str, Any]], concurrency: int) -> list[Streamed]:
        """All of them, in order, on so many connections. Raises RequestFailed if one fails."""
        waiting = enumerate(bodies)
        answers: dict[int, Streamed] = {}

        async def stream() -> None:
            async with Connection(self.address) as connection:
                for index, body in waiting:  # shared: each takes the next
                    answers[index] = await connection.stream(path, body)

        async with asyncio.TaskGroup() as streams:
            for _ in range(min(concurrency, len(bodies))):
                streams.create_task(stream())
        return [answers[index] for index in range(len(bodies))]
