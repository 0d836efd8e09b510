"""Many clients at once, in a process of their own for its descriptors: `python -m tests.fuzz.crowd HTTP GRPC COUNT`.

All but NUM_GRPC have a connection of their own; those share one, since descriptors are scarce. For each that ends
a line on stdout: its status, or what became of it.
"""

from __future__ import annotations

import asyncio
import json
import resource
import sys
from collections.abc import Coroutine
from typing import Any

import grpc
import grpc.aio

from baton.address import HostPort
from baton.v1 import generation_pb2, generation_pb2_grpc

NUM_GRPC = 200
PATIENCE_S = 100.0
BODY = json.dumps({"prompt": "hi", "max_tokens": 50}).encode()
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
REQUEST = HEAD % len(BODY) + BODY


async def over_http(address: HostPort) -> str:
    try:
        async with asyncio.timeout(PATIENCE_S):
            reader, writer = await asyncio.open_connection(address.host, address.port)
            try:
                writer.write(REQUEST)
                answer = await reader.read()
            finally:
                writer.close()
        return answer.split(b" ", 2)[1].decode() if answer else "closed without a word"
    except TimeoutError:
        return f"no end within {PATIENCE_S:g} s"
    except OSError as error:
        return str(error.strerror)


async def over_grpc(stub: generation_pb2_grpc.GenerationStub) -> str:
    try:
        async for _ in stub.Generate(generation_pb2.GenerateRequest(prompt="hi", max_tokens=50), timeout=PATIENCE_S):
            pass
    except grpc.aio.AioRpcError as error:
        return "429" if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED else f"{error.code().name} {error.details()}"
    return "200"


async def main(http: HostPort, address: str, count: int) -> None:
    async def told(one: Coroutine[Any, Any, str]) -> None:
        sys.stdout.write(await one + "\n")
        sys.stdout.flush()

    async with grpc.aio.insecure_channel(address) as channel, asyncio.TaskGroup() as clients:
        stub = generation_pb2_grpc.GenerationStub(channel)
        for one in (*(over_grpc(stub) for _ in range(NUM_GRPC)), *(over_http(http) for _ in range(count - NUM_GRPC))):
            clients.create_task(told(one))


if __name__ == "__main__":
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    asyncio.run(main(HostPort.parse(sys.argv[1]), sys.argv[2], int(sys.argv[3])))
