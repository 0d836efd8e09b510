"""A peer that knows the protocol and what nodes tell anyone, but no secret: its streams to one node."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
import grpc.aio

import kv_transfer
from baton import PROTOCOL_VERSION
from baton.address import HostPort
from baton.rpc.channels import CHANNEL_OPTIONS
from baton.v1 import common_pb2, node_pb2, node_pb2_grpc
from benchmarks.serving.hostile.case import Attack

WAIT_S = 10.0
PROMPT = [17 + i for i in range(32)]


class Stranger:
    """Streams to one node. To be used as `async with`."""

    def __init__(self, address: HostPort) -> None:
        self._address = address
        self.epoch = secrets.randbits(62)
        self._calls: list[Any] = []

    async def __aenter__(self) -> Stranger:
        self._channel = grpc.aio.insecure_channel(str(self._address), options=CHANNEL_OPTIONS)
        status = node_pb2_grpc.NodeStatusStub(self._channel)  # type: ignore[no-untyped-call]
        self.info = await status.Describe(node_pb2.DescribeRequest(), timeout=WAIT_S, wait_for_ready=True)
        return self

    async def __aexit__(self, *_: object) -> None:
        for call in self._calls:
            call.cancel()
        await self._channel.close(None)

    async def session(self, epoch: int | None = None) -> Any:
        role = self.info.role == common_pb2.NODE_ROLE_DECODE
        stub = (node_pb2_grpc.DecodeNodeStub if role else node_pb2_grpc.PrefillNodeStub)(self._channel)
        call = stub.Session()
        self._calls.append(call)
        subscribe = node_pb2.Subscribe(
            protocol_version=PROTOCOL_VERSION,
            router_epoch=self.epoch if epoch is None else epoch,
            target_incarnation=self.info.incarnation,
        )
        await call.write(node_pb2.RouterMessage(subscribe=subscribe))
        await self.read(call)
        return call

    async def handoff(self, endpoints: list[Any]) -> tuple[Any, Any]:
        """The stream, and the decode node's answer to Hello."""
        call = node_pb2_grpc.DecodeNodeStub(self._channel).Handoff()  # type: ignore[no-untyped-call]
        self._calls.append(call)
        hello = node_pb2.Hello(
            protocol_version=PROTOCOL_VERSION,
            incarnation=f"stranger-{secrets.token_hex(4)}",
            target_incarnation=self.info.incarnation,
            node_id="stranger",
            layout=self.info.layout,
            endpoints=endpoints,
            part_blocks=4,
        )
        await call.write(node_pb2.PrefillMessage(hello=hello))
        return call, await self.read(call)

    @staticmethod
    async def read(call: Any) -> Any:
        """Raises AioRpcError for a call that ended, TimeoutError."""
        async with asyncio.timeout(WAIT_S):
            message = await call.read()
        if message is grpc.aio.EOF:  # type: ignore[attr-defined]
            raise TimeoutError(f"the stream ended: {(await call.code()).name} {await call.details()}")
        return message

    async def next_of(self, call: Any, *kinds: str) -> Any:
        """The next message of one of these kinds."""
        while (message := await self.read(call)).WhichOneof("kind") not in kinds:
            pass
        return message

    def attempt_id(self, name: str) -> common_pb2.AttemptId:
        return common_pb2.AttemptId(router_epoch=self.epoch, request_id=f"{name}-{secrets.token_hex(4)}")

    def prefill(self, name: str, deadline_s: float = 60.0, **fields: Any) -> node_pb2.RouterMessage:
        given = {
            "prompt_tokens": pack(PROMPT),
            "samples": [common_pb2.Sample()],
            "sampling": sampling(),
            **fields,
        }
        target = self.info.incarnation
        prefill = node_pb2.Prefill(
            attempt_id=self.attempt_id(name), target_incarnation=target, deadline_s=deadline_s, **given
        )
        return node_pb2.RouterMessage(prefill=prefill)


def pack(tokens: list[int]) -> bytes:
    return b"".join(token.to_bytes(4, "little") for token in tokens)


def sampling(max_tokens: int = 4, **fields: Any) -> common_pb2.SamplingParams:
    base = {"top_p": 1.0, "repetition_penalty": 1.0, "num_logprobs": -1, "ignore_eos": True, "max_tokens": max_tokens}
    return common_pb2.SamplingParams(**{**base, **fields})


@contextlib.asynccontextmanager
async def stranger(attack: Attack, name: str) -> AsyncIterator[Stranger]:
    async with Stranger(attack.nodes[name]) as one:
        yield one


@contextlib.contextmanager
def own_endpoint(transport: str) -> Iterator[common_pb2.TransportEndpoint]:
    """An address that is well made: nodes tell strangers none, but anyone can run what makes one."""
    mine = kv_transfer.create(transport, kv_transfer.staging_for(transport, 1, 4096, "cpu"), lambda: None)
    try:
        yield common_pb2.TransportEndpoint(transport=transport, address=mine.info())
    finally:
        mine.close()


async def outcome(attempt: Any) -> str:
    """What `attempt` says, or how it was cut off."""
    try:
        return str(await attempt)
    except grpc.aio.AioRpcError as error:
        return f"{error.code().name} {(error.details() or '')[:60]}"
    except TimeoutError as error:
        return str(error)[:80] or f"no answer in {WAIT_S:g} s"
