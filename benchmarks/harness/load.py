"""Requests of one shape: one after another, many at once, or at random times."""

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
from benchmarks.harness.http_stream import Connection, RequestFailed, Streamed
from deploy.bench.load import shorten_collections
from tools import tiny_tasks

POOL_TOKENS = 8192


def address_of(url: str) -> HostPort:
    """Parse http://HOST:PORT. Raises ValueError."""
    parts = urlsplit(url)
    if parts.scheme != "http" or not parts.hostname or parts.path not in ("", "/"):
        raise ValueError(f"must be http://HOST:PORT, not {url!r}")
    return HostPort(parts.hostname, parts.port or 80)


class Prompts:
    """Prompts of any length from tokens of the served model, each a function of its number."""

    def __init__(self, pool: Sequence[int], seed: int) -> None:
        self._pool = pool
        self._seed = seed

    @classmethod
    async def of(cls, connection: Connection, seed: int) -> Prompts:
        """Uses the tokens that the router's tokenizer gives for generated text."""
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
        """The body of request `number`. Each call draws a new salt."""
        return {
            "prompt": self._prompts.make(number, self._input_len),
            "max_tokens": self._output_len,
            "ignore_eos": True,
            "temperature": 0,
            "cache_salt": secrets.token_hex(8),
            **fields,
        }

    async def one(self) -> Streamed:
        """Send a new prompt on its own connection."""
        return (await self.send("/v1/completions", [self.body(next(self._numbers))], 1))[0]

    async def many(self, count: int, concurrency: int) -> list[Streamed]:
        """Send new prompts on `concurrency` connections."""
        shorten_collections()
        return await self.send("/v1/completions", [self.body(next(self._numbers)) for _ in range(count)], concurrency)

    async def arriving(self, count: int, per_s: float, seed: int) -> list[Streamed]:
        """Send new prompts at the times of a Poisson process, which depend on the seed but not on how long the answers
        take. Raises RequestFailed if one fails."""
        bodies = [self.body(next(self._numbers)) for _ in range(count)]
        shorten_collections()
        random, idle, began, at = Random(seed), list[Connection](), time.perf_counter(), 0.0
        answers: dict[int, Streamed] = {}

        async def one(index: int, at: float, stack: contextlib.AsyncExitStack) -> None:
            await asyncio.sleep(began + at - time.perf_counter())
            connection = idle.pop() if idle else await stack.enter_async_context(Connection(self.address))
            answers[index] = await _whole(connection, "/v1/completions", bodies[index], Streamed(0.0, due=began + at))
            idle.append(connection)

        async with contextlib.AsyncExitStack() as stack, asyncio.TaskGroup() as requests:
            for index in range(count):
                at += random.expovariate(per_s)
                requests.create_task(one(index, at, stack))
        return [answers[index] for index in range(count)]

    async def send(self, path: str, bodies: Sequence[Mapping[str, Any]], concurrency: int) -> list[Streamed]:
        """Send all bodies, in order, on `concurrency` connections. Raises RequestFailed if one fails."""
        waiting = enumerate(bodies)
        answers: dict[int, Streamed] = {}

        async def stream() -> None:
            async with Connection(self.address) as connection:
                for index, body in waiting:  # shared: each stream takes the next
                    answers[index] = await _whole(connection, path, body)

        async with asyncio.TaskGroup() as streams:
            for _ in range(min(concurrency, len(bodies))):
                streams.create_task(stream())
        return [answers[index] for index in range(len(bodies))]


async def _whole(
    connection: Connection, path: str, body: Mapping[str, Any], answer: Streamed | None = None
) -> Streamed:
    """An answer of as many tokens as were asked for: a shorter one would look fast. Raises RequestFailed."""
    answer = await connection.stream(path, body, answer)
    if body.get("ignore_eos") and len(answer.tokens) != body["max_tokens"]:
        raise RequestFailed(f"an answer ended with {len(answer.tokens)} of {body['max_tokens']} tokens")
    return answer
