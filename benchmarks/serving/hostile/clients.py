"""Attacks on a router by a client, at the expense of others: cases of `benchmarks.serving.hostile`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import grpc
import grpc.aio

from baton.address import HostPort
from baton.v1 import generation_pb2, generation_pb2_grpc
from benchmarks.serving.hostile.case import Attack, case
from benchmarks.serving.hostile.watch import get, has_socket, many_descriptors

PIECE_BYTES = 1024 * 1024
PATIENCE_S = 120.0
MIB = 2**20
TRICKLE_S = 45.0
"""How long the router may take to close the connections of slow senders."""
MANY_S = 300.0
GRPC_OPTIONS = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]


# ---- sending ----


def post(path: str, body: bytes) -> Iterator[bytes]:
    """A request's bytes, in pieces."""
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    yield head.encode()
    for start in range(0, len(body), PIECE_BYTES):
        yield body[start : start + PIECE_BYTES]


async def exchange(address: HostPort, pieces: Iterable[bytes], timeout_s: float = PATIENCE_S) -> str:
    """Send until there is an answer; returns its status and error message, or how the connection ended."""
    reader, writer = await asyncio.open_connection(address.host, address.port)
    answer = asyncio.create_task(_answer(reader))
    sending = asyncio.create_task(_send(writer, pieces))
    try:
        async with asyncio.timeout(timeout_s):
            await asyncio.wait([answer, sending], return_when=asyncio.FIRST_COMPLETED)
            return await answer
    except TimeoutError:
        return f"no answer in {timeout_s:g} s"
    finally:
        for task in (answer, sending):
            task.cancel()
        await asyncio.gather(answer, sending, return_exceptions=True)
        writer.transport.abort()


async def _send(writer: asyncio.StreamWriter, pieces: Iterable[bytes]) -> None:
    with contextlib.suppress(OSError):
        for piece in pieces:
            writer.write(piece)
            await writer.drain()


async def _answer(reader: asyncio.StreamReader) -> str:
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    except asyncio.IncompleteReadError as error:
        return "closed" if not error.partial else f"closed after {error.partial[:40]!r}"
    except OSError as error:
        return f"closed: {error.strerror}"
    status = head.split(" ")[1]
    if status == "200":
        return status
    body = await reader.read(400)
    message = body.split(b'"message":"')[-1].split(b'"')[0].decode(errors="replace")
    return f"{status} {message[:70]}"


async def complete(attack: Attack, fields: dict[str, Any], path: str = "/v1/completions") -> str:
    body = await asyncio.to_thread(lambda: json.dumps(fields, separators=(",", ":")).encode())
    attack.begin(f"{len(body) / MIB:.1f} MiB" if len(body) > MIB // 10 else f"{len(body) / 1024:.0f} KiB")
    return await exchange(attack.http, post(path, body))


async def generate(attack: Attack, request: generation_pb2.GenerateRequest) -> str:
    attack.begin(f"{request.ByteSize() / MIB:.0f} MiB")
    async with grpc.aio.insecure_channel(str(attack.grpc), options=GRPC_OPTIONS) as channel:
        stub = generation_pb2_grpc.GenerationStub(channel)  # type: ignore[no-untyped-call]
        try:
            async for _ in stub.Generate(request, timeout=PATIENCE_S):
                pass
        except grpc.aio.AioRpcError as error:
            return f"{error.code().name} {(error.details() or '')[:70]}"
    return "OK"


# ---- single excessive requests ----


@case
async def prompts_2048_by_128(attack: Attack) -> str:
    """2,048 prompts x n=128"""
    return await complete(attack, {"prompt": ["abcde"] * 2048, "n": 128, "max_tokens": 1})


@case
async def prompt_10_mb(attack: Attack) -> str:
    """a prompt of 10.5 MB"""
    return await complete(attack, {"prompt": "hello there world " * 583_000, "max_tokens": 1})


@case
async def prompt_500_kb(attack: Attack) -> str:
    """a prompt of 500 KB (beyond this model's context)"""
    return await complete(attack, {"prompt": "hello there world " * 28_000, "max_tokens": 1})


@case
async def prompt_near_limit(attack: Attack) -> str:
    """a prompt near the context's limit"""
    fields = {"prompt": [17] * (attack.max_model_len - 16), "max_tokens": 8, "cache_salt": "near"}
    return await complete(attack, fields)


@case
async def tokenize_6_mb(attack: Attack) -> str:
    """/tokenize of 6 MB with return_token_strs"""
    return await complete(attack, {"prompt": "hello there world " * 333_000, "return_token_strs": True}, "/tokenize")


@case
async def chat_900k_messages(attack: Attack) -> str:
    """a chat of 900,000 messages"""
    message = {"role": "user", "content": "a"}
    return await complete(attack, {"messages": [message] * 900_000, "max_tokens": 1}, "/v1/chat/completions")


@case
async def grpc_prompt_31_mib(attack: Attack) -> str:
    """a gRPC prompt of 31 MiB"""
    prompt = ("hello there world " * (31 * MIB // 18 + 1))[: 31 * MIB]
    return await generate(attack, generation_pb2.GenerateRequest(prompt=prompt, max_tokens=1))


@case
async def grpc_message_200_mib(attack: Attack) -> str:
    """a gRPC message of 200 MiB"""
    ids = generation_pb2.TokenIds(ids=b"\x11\0\0\0" * (50 * MIB))
    return await generate(attack, generation_pb2.GenerateRequest(prompt_tokens=ids, max_tokens=1))


@case
async def stop_ids_60_by_1m(attack: Attack) -> str:
    """60 prompts x 1M stop_token_ids"""
    ids = [5 + i % 4000 for i in range(1_000_000)]
    return await complete(attack, {"prompt": ["abc"] * 60, "stop_token_ids": ids, "max_tokens": 64, "ignore_eos": True})


@case
async def stop_ids_5m(attack: Attack) -> str:
    """5M stop_token_ids"""
    ids = [4000 + i % 90 for i in range(5_000_000)]
    return await complete(attack, {"prompt": "abc", "stop_token_ids": ids, "max_tokens": 16, "ignore_eos": True})


@case
async def stop_strings_1m(attack: Attack) -> str:
    """1M stop strings"""
    stop = [f"never said {i}" for i in range(1_000_000)]
    return await complete(attack, {"prompt": "abc", "stop": stop, "max_tokens": 16, "ignore_eos": True})


@case
async def logit_bias_all(attack: Attack) -> str:
    """16 prompts with a logit_bias for each token"""
    bias = {str(token): 0.5 for token in range(attack.vocab_size)}
    return await complete(attack, {"prompt": ["abc"] * 16, "logit_bias": bias, "max_tokens": 32, "ignore_eos": True})


@case
async def deep_json(attack: Attack) -> str:
    """JSON nested 1M deep"""
    body = b'{"prompt":' + b"[" * 1_000_000
    attack.begin("1.0 MiB")
    return await exchange(attack.http, post("/v1/completions", body))


@case
async def deep_json_field(attack: Attack) -> str:
    """valid JSON nested 150 deep in chat_template_kwargs, 20,000 times"""
    deep = b'{"a":' * 150 + b"1" + b"}" * 150
    fields = b",".join(b'"k%d":%b' % (i, deep) for i in range(20_000))
    body = b'{"messages":[{"role":"user","content":"a"}],"max_tokens":1,"chat_template_kwargs":{' + fields + b"}}"
    attack.begin(f"{len(body) / MIB:.1f} MiB")
    return await exchange(attack.http, post("/v1/chat/completions", body))


# ---- connections ----


@case
async def headers_300_mib(attack: Attack) -> str:
    """300 MiB of headers on one connection"""
    line = b"x-header: " + b"a" * 1000 + b"\r\n"
    pieces = [b"GET /health HTTP/1.1\r\nhost: x\r\n", *[line * 1024] * 300]
    attack.begin("300 MiB")
    return await exchange(attack.http, pieces, 30.0)


@case
async def slow_reader(attack: Attack) -> str:
    """a stream that is never read (timeout 10 s)"""
    fields = {"prompt": ["abc"] * 16, "n": 2, "max_tokens": 3500, "ignore_eos": True, "logprobs": 20, "timeout": 10}
    body = json.dumps({**fields, "stream": True}).encode()
    attack.begin()
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect((attack.http.host, attack.http.port))
        connection.sendall(b"".join(post("/v1/completions", body)))
        ports = attack.http.port, connection.getsockname()[1]
        await _until(lambda: has_socket(*ports), 10.0, "")
        return await _until(lambda: not has_socket(*ports), TRICKLE_S, "its connection")


@case
async def idle_connections_1100(attack: Attack) -> str:
    """1,100 idle connections (soft limit of descriptors 1,024)"""
    attack.begin()
    with many_descriptors(), contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(1100)]
        for one in sockets:
            one.setblocking(False)
            one.connect_ex((attack.http.host, attack.http.port))
        await asyncio.sleep(1.0)  # let the connections get as far as they can
        status, why = await get(attack.http, "/health", 5.0)
    return f"a newcomer's /health: {status or why}"


@case
async def slow_headers(attack: Attack) -> str:
    """200 connections that send a header's byte per second"""
    return await _trickle(attack, b"GET /health HTTP/1.1\r\nx-slow: ")


@case
async def slow_body(attack: Attack) -> str:
    """200 connections that send a body's byte per second"""
    return await _trickle(attack, b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100000\r\n\r\n")


async def _trickle(attack: Attack, head: bytes) -> str:
    attack.begin()
    began = time.monotonic()
    async with contextlib.AsyncExitStack() as stack:
        ends = [await asyncio.open_connection(attack.http.host, attack.http.port) for _ in range(200)]
        for _, writer in ends:
            stack.callback(writer.transport.abort)
            writer.write(head)
        reads = {asyncio.create_task(reader.read(300)) for reader, _ in ends}
        stack.callback(lambda: [read.cancel() for read in reads])
        open_, firsts = set(reads), Counter[str]()
        while open_ and time.monotonic() - began < TRICKLE_S:
            for _, writer in ends:
                if not writer.transport.is_closing():
                    writer.write(b"a")
            done, open_ = await asyncio.wait(open_, timeout=1.0)
            firsts.update(_how(read) for read in done)
        held = f"{len(open_)} open after {time.monotonic() - began:.0f} s"
        return f"{held}, {', '.join(f'{count} {how}' for how, count in firsts.items())}".removesuffix(", ")


def _how(read: asyncio.Task[bytes]) -> str:
    if read.exception():
        return "reset"
    return " ".join(read.result().decode("latin-1").split("\r\n")[0].split(" ")[1:3]) or "closed"


async def _until(holds: Any, timeout_s: float, what: str) -> str:
    began = time.monotonic()
    while not holds():
        if time.monotonic() - began > timeout_s:
            return f"{what} is still held after {timeout_s:g} s"
        await asyncio.sleep(0.1)
    return f"{what} is free after {time.monotonic() - began:.1f} s"


# ---- many requests ----


@case
async def ten_thousand(attack: Attack) -> str:
    """10,000 requests at once, 200 of them over gRPC"""
    body = json.dumps({"prompt": "abc", "max_tokens": 2, "ignore_eos": True}).encode()
    attack.begin()

    async def over_http() -> str:
        try:
            return (await exchange(attack.http, post("/v1/completions", body), MANY_S)).split(" ")[0]
        except OSError as error:
            return f"no connection: {error.strerror}"

    async def over_grpc(stub: Any) -> str:
        try:
            async for _ in stub.Generate(request, timeout=MANY_S):
                pass
        except grpc.aio.AioRpcError as error:
            return "429" if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED else error.code().name
        return "200"

    request = generation_pb2.GenerateRequest(prompt="abc", max_tokens=2, ignore_eos=True)
    async with grpc.aio.insecure_channel(str(attack.grpc), options=GRPC_OPTIONS) as channel:
        stub = generation_pb2_grpc.GenerationStub(channel)  # type: ignore[no-untyped-call]
        with many_descriptors():
            all_ = (*(over_grpc(stub) for _ in range(200)), *(over_http() for _ in range(9800)))
            ends = Counter(await asyncio.gather(*all_))
    return ", ".join(f"{count} x {how}" for how, count in ends.most_common())
