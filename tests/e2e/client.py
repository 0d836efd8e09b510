"""Plain clients, over HTTP and over gRPC, that keep all that a router says: with them tests see what a client sees."""

from __future__ import annotations

import asyncio
import json
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import grpc
import httpx

from baton.rpc.channels import CHANNEL_OPTIONS
from baton.v1 import generation_pb2 as pb
from baton.v1 import generation_pb2_grpc, node_pb2
from baton.wire import pack_tokens, unpack_tokens
from tests.e2e.cluster import PATIENCE_S, Router


@dataclass
class Answer:
    """All that came back. `tokens`, `texts`, `finishes`: by index of the sample. `came`: when each event with tokens
    came, `ended`: when the last one did (`time.monotonic`)."""

    status: int = 0
    tokens: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    texts: dict[int, str] = field(default_factory=lambda: defaultdict(str))
    finishes: dict[int, str] = field(default_factory=dict)
    usage: dict[str, Any] = field(default_factory=dict)
    timings: dict[str, Any] = field(default_factory=dict)
    error: dict[str, Any] | None = None
    done: bool = False  # a stream's [DONE], or a whole body
    ended: float = 0.0
    came: list[float] = field(default_factory=list)

    def take(self, body: Mapping[str, Any]) -> None:
        """A whole answer, or an event of a stream."""
        self.error = body.get("error", self.error)
        self.usage = body.get("usage") or self.usage
        self.timings = body.get("timings") or self.timings
        for choice in body.get("choices", ()):
            index = choice["index"]
            if choice.get("token_ids"):
                self.came.append(time.monotonic())
            self.tokens[index] += choice.get("token_ids") or []
            self.texts[index] += choice.get("text", "")
            if choice["finish_reason"]:
                assert index not in self.finishes, f"sample {index} ended twice"
                self.finishes[index] = choice["finish_reason"]


class Client:
    """Completions of one router. To be used as `async with`. `generation` is the stub of its gRPC API."""

    def __init__(self, router: Router) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        self._http = httpx.AsyncClient(
            base_url=router.url, trust_env=False, verify=False, timeout=PATIENCE_S, limits=limits
        )
        self._channel = grpc.aio.insecure_channel(str(router.grpc), options=CHANNEL_OPTIONS)
        self.generation = generation_pb2_grpc.GenerationStub(self._channel)
        self._requests: list[Request] = []

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for request in self._requests:
            await request.leave()
        await self._http.aclose()
        await self._channel.close(None)

    async def complete(self, prompt: object, **fields: Any) -> Answer:
        """To the end, whichever it is."""
        return await self.begin(prompt, **fields).end()

    def begin(self, prompt: object, *, stream: bool = False, **fields: object) -> Request:
        """Send it, and go on. Greedy unless told otherwise."""
        body = {"prompt": prompt, "temperature": 0.0, "return_token_ids": True, "stream": stream, **fields}
        if stream:
            body.setdefault("stream_options", {"include_usage": True})
        request = Request(self._http, body)
        self._requests.append(request)
        return request

    async def generate(self, prompt: str | Sequence[int], **fields: Any) -> Answer:
        """The same over gRPC. Raises grpc.aio.AioRpcError."""
        given = (
            {"prompt": prompt} if isinstance(prompt, str) else {"prompt_tokens": pb.TokenIds(ids=pack_tokens(prompt))}
        )
        answer = Answer()
        request = pb.GenerateRequest(**given, **{"temperature": 0.0, **fields})
        async for response in self.generation.Generate(request, timeout=PATIENCE_S):
            _take_response(answer, response)
        answer.ended = time.monotonic()
        return answer

    async def text_of(self, tokens: Sequence[int]) -> str:
        """With special tokens, as /detokenize has it."""
        response = await self._http.post("/detokenize", json={"tokens": list(tokens)})
        return str(response.raise_for_status().json()["prompt"])


def _take_response(answer: Answer, response: pb.GenerateResponse) -> None:
    assert not answer.done, "a message after the last"
    match response.WhichOneof("event"):
        case "delta":
            delta = response.delta
            answer.tokens[delta.index] += unpack_tokens(delta.token_ids)
            answer.texts[delta.index] += delta.text
            if delta.finish_reason:
                assert delta.index not in answer.finishes, f"sample {delta.index} ended twice"
                name = node_pb2.FinishReason.Name(delta.finish_reason)
                answer.finishes[delta.index] = name.removeprefix("FINISH_REASON_").lower()
        case "finished":
            usage, timings = response.finished.usage, response.finished.timings
            answer.usage = {
                "prompt_tokens": usage.num_prompt_tokens,
                "completion_tokens": usage.num_completion_tokens,
                "prompt_tokens_details": {"cached_tokens": usage.num_cached_tokens},
            }
            answer.timings = {
                "decode_cached_tokens": timings.num_decode_cached_tokens,
                "cached_tokens": usage.num_cached_tokens,
                "attempts": timings.num_attempts,
                "prefill_node": timings.prefill_node,
                "decode_node": timings.decode_node,
            }
            answer.status, answer.done = httpx.codes.OK, True


class Request:
    """One request under way. `answer` grows while it is streamed."""

    def __init__(self, http: httpx.AsyncClient, body: Mapping[str, Any]) -> None:
        self.answer = Answer()
        self._more = asyncio.Event()
        run = self._stream if body["stream"] else self._whole
        self._task = asyncio.create_task(run(http, body))

    async def end(self, timeout_s: float = PATIENCE_S) -> Answer:
        """Wait for it."""
        async with asyncio.timeout(timeout_s):
            await self._task
        self.answer.ended = self.answer.ended or time.monotonic()
        return self.answer

    @property
    def ended(self) -> bool:
        return self._task.done()

    async def until(self, num_tokens: int) -> None:
        """Until so many tokens of sample 0 have come."""
        assert await self.reaches(num_tokens), f"ended after {len(self.answer.tokens[0])} tokens: {self.answer}"

    async def reaches(self, num_tokens: int) -> bool:
        """Wait until so many tokens of sample 0 have come, or the stream has ended before: False."""
        async with asyncio.timeout(PATIENCE_S):
            while len(self.answer.tokens[0]) < num_tokens:
                if self._task.done():
                    return False
                self._more.clear()
                await self._more.wait()
        return True

    async def ends_within(self, seconds: float) -> bool:
        await asyncio.wait([self._task], timeout=seconds)
        return self._task.done()

    async def leave(self) -> None:
        """Close the connection, as a client that goes away does; nothing, if it has ended."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _whole(self, http: httpx.AsyncClient, body: Mapping[str, Any]) -> None:
        response = await http.post("/v1/completions", json=body)
        self.answer.ended = time.monotonic()
        self.answer.status = response.status_code
        self.answer.take(response.json())
        self.answer.done = True

    async def _stream(self, http: httpx.AsyncClient, body: Mapping[str, Any]) -> None:
        try:
            async with http.stream("POST", "/v1/completions", json=body) as response:
                self.answer.status = response.status_code
                if response.status_code != httpx.codes.OK:
                    self.answer.take(json.loads(await response.aread()))
                    return
                async for line in response.aiter_lines():
                    self._take_line(line)
        finally:
            self.answer.ended = time.monotonic()
            self._more.set()

    def _take_line(self, line: str) -> None:
        if line == "data: [DONE]":
            self.answer.done = True
        elif line.startswith("data: "):
            assert not self.answer.done, "an event after [DONE]"
            self.answer.take(json.loads(line.removeprefix("data: ")))
            self._more.set()
