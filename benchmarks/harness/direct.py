"""A client of the nodes' own services that, like the router, keeps streams open: the shortest path to a first token."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Sequence
from typing import Any

import grpc
import grpc.aio

from baton import wire
from baton.address import HostPort
from baton.messages import AttemptId, DecodeTarget, End, HandedOff, Prefill, Sample, Subscribe, Tokens, Update
from baton.node_info import NodeInfo
from baton.rpc.channels import CHANNEL_OPTIONS
from baton.sampling import SamplingParams
from baton.v1 import node_pb2, node_pb2_grpc

TIMEOUT_S = 60.0


class Direct:
    """Sends one request at a time, which is prefilled and handed off. Use with `async with`."""

    def __init__(self, prefill: HostPort, decode: HostPort) -> None:
        self._epoch = secrets.randbits(63)
        self._updates: asyncio.Queue[tuple[float, Update]] = asyncio.Queue()
        self._prefill = _Session(prefill, node_pb2_grpc.PrefillNodeStub, self._epoch, self._updates)
        self._decode = _Session(decode, node_pb2_grpc.DecodeNodeStub, self._epoch, self._updates)
        self._count = 0

    async def __aenter__(self) -> Direct:
        await self._prefill.open()
        await self._decode.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._decode.close()
        await self._prefill.close()

    async def generate(
        self, prompt: Sequence[int], sampling: SamplingParams, cache_salt: str
    ) -> tuple[float, tuple[int, ...]]:
        """Seconds to the first token, and all tokens. Returns when both nodes have finished. Raises BatonError."""
        self._count += 1
        attempt_id = AttemptId(self._epoch, f"direct-{self._count}", 0)
        sent = time.perf_counter()
        await self._prefill.send(self._message(attempt_id, tuple(prompt), sampling, cache_salt))
        tokens: dict[int, int] = {}
        first, ends = 0.0, 0
        async with asyncio.timeout(TIMEOUT_S):
            while ends < 2:  # HandedOff of the prefill node, End of the decode node, in either order
                came, update = await self._updates.get()
                if isinstance(update.kind, Tokens):
                    first = first or came
                    tokens.update(enumerate(update.kind.token_ids, update.kind.first_index))
                elif isinstance(update.kind, End) and update.kind.error:
                    raise update.kind.error
                ends += isinstance(update.kind, End | HandedOff)
        return first - sent, tuple(tokens[index] for index in sorted(tokens))

    def _message(
        self, attempt_id: AttemptId, prompt: tuple[int, ...], sampling: SamplingParams, cache_salt: str
    ) -> Prefill:
        decode = self._decode.info
        return Prefill(
            attempt_id=attempt_id,
            target_incarnation=self._prefill.info.incarnation,
            prompt_tokens=prompt,
            samples=(Sample(0),),
            sampling=sampling,
            deadline_s=TIMEOUT_S,
            decode=DecodeTarget(decode.address, decode.incarnation),
            cache_salt=cache_salt,
        )


class _Session:
    """A session with one node. Its updates are put into `updates` with their time of arrival."""

    def __init__(self, address: HostPort, stub: Any, epoch: int, updates: asyncio.Queue[tuple[float, Update]]) -> None:
        self._address = address
        self._stub = stub
        self._epoch = epoch
        self._updates = updates
        self.info: NodeInfo

    async def open(self) -> None:
        self._channel = grpc.aio.insecure_channel(str(self._address), options=CHANNEL_OPTIONS)
        status = node_pb2_grpc.NodeStatusStub(self._channel)  # type: ignore[no-untyped-call] # generated
        self.info = wire.read_node_info(await status.Describe(node_pb2.DescribeRequest(), timeout=TIMEOUT_S))
        self._call = self._stub(self._channel).Session()
        await self.send(Subscribe(self._epoch, self.info.incarnation))
        await self._call.read()  # Subscribed
        self._reading = asyncio.create_task(self._read())

    async def close(self) -> None:
        self._reading.cancel()
        self._call.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)
        await self._channel.close(None)

    async def send(self, message: Any) -> None:
        await self._call.write(wire.write_router_message(message))

    async def _read(self) -> None:
        while True:
            message = wire.read_node_message(await self._call.read())
            if isinstance(message, tuple):
                now = time.perf_counter()
                for update in message:
                    self._updates.put_nowait((now, update))


async def generate_alone(decode: HostPort, prompt: Sequence[int], sampling: SamplingParams) -> tuple[int, ...]:
    """All tokens for a prompt that a decode node computes by itself. Raises BatonError."""
    epoch = secrets.randbits(63)
    updates: asyncio.Queue[tuple[float, Update]] = asyncio.Queue()
    session = _Session(decode, node_pb2_grpc.DecodeNodeStub, epoch, updates)
    await session.open()
    tokens: dict[int, int] = {}
    try:
        attempt_id = AttemptId(epoch, "alone", 0)
        await session.send(
            Prefill(attempt_id, session.info.incarnation, tuple(prompt), (Sample(0),), sampling, TIMEOUT_S, None)
        )
        async with asyncio.timeout(TIMEOUT_S):
            while True:
                _, update = await updates.get()
                if isinstance(update.kind, Tokens):
                    tokens.update(enumerate(update.kind.token_ids, update.kind.first_index))
                elif isinstance(update.kind, End):
                    if update.kind.error:
                        raise update.kind.error
                    return tuple(tokens[index] for index in sorted(tokens))
    finally:
        await session.close()
